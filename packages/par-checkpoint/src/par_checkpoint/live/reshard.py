"""`reshard`: the state of one run moves into the objects of another, in memory."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from par_groups import parse_size

from .._agreement import SameOptions
from .._apply import Into, StateReport, apply_
from .._policies import TIMEOUT, check_one_of, check_timeout, is_timeout
from ..state.collect import collect
from ..state.quantised import is_float8
from ..state.state import State
from ..transfer.sessions import session_of
from .holdings import Holdings
from .source import MemorySource, MoveOptions


@dataclass(frozen=True, kw_only=True)
class Moved(StateReport):
    """Outcome of `reshard` on one rank.

    Args:
        received: Bytes of tensors that the rank received from others.
        sent: Bytes that it sent to others.
        local: Bytes that it copied within its own memory.
        seconds: Duration of the call.
    """

    received: int = 0
    sent: int = 0
    local: int = 0
    seconds: float = 0.0


def reshard(
    source: State,
    target: State,
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    strict: bool = True,
    budget: str | int = "256MB",
    release: bool = False,
    verify: bool = False,
    timeout: float = TIMEOUT,
) -> Moved:
    """Fill the target of each rank with the state that the ranks hold in their sources, however both are sharded.

    Collective. Each rank receives only the elements that it lacks, each of them once, and none from a file. All ranks
    check names, shapes, dtypes and coverage before anything changes.

    Args:
        source: Objects of this rank whose state moves; `State()` on a rank that has none.
        target: Objects of this rank that are filled; `State()` on a rank that has none. Tensors on the meta device are
            allocated. Its `extra` is ignored.
        group: Ranks that take part: all ranks with a source or a target. Default: all ranks.
        dtype: Dtype, or tuple of dtypes, of floating-point tensors in the target's model whose values may be cast. The
            rank with the wider dtype casts. None: the dtypes must be equal.
        strict: Whether to raise one error that lists all missing, unexpected and mismatched names. With False, the
            report lists them.
        budget: Memory that a rank may use in addition to source and target, such as "256MB".
        release: Whether to free each tensor of the source after its last element has left. A rank then needs memory
            for the larger of source and target, and the budget. The source cannot be used any more.
        verify: Whether to compare digests of the values before and after the move.
        timeout: Seconds to wait for a rank that does not answer.

    Returns:
        Names that did not fit, the source's `extra`, bytes and seconds.

    Raises:
        ValueError, TypeError: An argument is not valid, no rank holds some elements, or source and target share memory;
            on every rank, and nothing has changed.
        CheckpointError: Names, shapes or dtypes do not fit, and nothing has changed; or a rank failed on the way, and
            the message says that the target is undefined. On every rank.
        CorruptError: Digests differ.
    """
    begin = time.perf_counter()
    with session_of(group).calling("reshard()", timeout if is_timeout(timeout) else TIMEOUT) as session:
        ranks = session.ranks
        # A save in the background may still read tensors that this call writes or frees.
        session.settle("wait")

        def look() -> tuple[tuple[Holdings, MoveOptions, SameOptions], list[int]]:
            for name, given in (("source", source), ("target", target)):
                if not isinstance(given, State):
                    raise TypeError(f"{name} is a {type(given).__name__}; pass a par_checkpoint.State")
            check_timeout(timeout)
            for name, flag in (("strict", strict), ("release", release), ("verify", verify)):
                check_one_of(name, flag, (True, False))
            casts = dtype if isinstance(dtype, tuple) else (dtype,)
            if any(is_float8(each) for each in casts if isinstance(each, torch.dtype)):
                raise ValueError(
                    f"dtype={dtype}: a cast to float8 needs scales; move the values, and quantise them then"
                )
            how = MoveOptions(budget=parse_size(budget, name="budget", least=1), release=release, verify=verify)
            same = SameOptions({"strict": strict, "budget": how.budget, "release": release, "verify": verify})
            # Ranks of one side have no target, and must still send what those of the other side ask for.
            parts = [int(target.model is not None), int(target.optimizer is not None)]
            mine = Holdings.of(collect(source), source)
            return (mine, how, same), [*parts, *same.words(), *mine.words(ranks.rank)]

        # One sum carries all digests. Values travel only if their digests differ.
        (mine, how, same), (models, optimizers, *sums) = ranks.tell(look, 10 + Holdings.COUNT)
        same.check(sums[:8], ranks)
        # Summed over the ranks: a section moves if any rank wants it.
        sections = [name for name, count in (("model", models), ("optimizer", optimizers)) if count]
        tensors, outline = mine.united(sums[8:], ranks, session.planned, sections)
        memory = MemorySource(ranks, mine.content, tensors, outline, target, how, session)
        report = apply_(Into(state=target, strict=strict, dtype=dtype, device=None), memory, ranks)
        return Moved(
            **vars(report),
            received=memory.received,
            sent=memory.sent,
            local=memory.local,
            seconds=time.perf_counter() - begin,
        )
