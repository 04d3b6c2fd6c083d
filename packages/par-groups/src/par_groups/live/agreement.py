"""Agreement between ranks on errors and values: all ranks continue, or all ranks raise an error.

If only one rank raises an error, the other ranks wait in their next collective until it times out. Code therefore
agrees on each possible failure, and on each value that may differ, before the first collective that depends on it.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from .._error_text import error_text

Said = TypeVar("Said")


def agree(problem: Exception | None, said: Said, *groups: dist.ProcessGroup | None) -> dict[int, Said]:
    """Gather a value of every rank; if any rank has a problem, raise an error on every rank.

    Communication: one all-gather of small pickled objects per group.

    Args:
        problem: Error on this rank, or None.
        said: Value that this rank sends to the other ranks. An object that cannot be pickled counts as a problem.
        *groups: Groups that take part; None is the world. With several groups, such as the rows and the columns of a
            grid, each group also gathers the values from the groups before it. Without a group, only this rank takes
            part.

    Returns:
        The values by global rank, ascending.

    Raises:
        Exception: This rank's own problem, unchanged.
        ValueError: Another rank has a problem; the message has its number, and the type and text of the problem.
    """
    try:
        data = pickle.dumps(said)
    except Exception as error:  # of any type: the others wait for this rank
        problem, data = error if problem is None else problem, b""
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Values travel as bytes, so that a rank with a problem can send the problem even if its value cannot be pickled.
    heard = {rank: ("" if problem is None else f"{type(problem).__name__}: {error_text(problem)}", data)}
    for group in groups:
        # Every member of a row has gathered the row, so a gather over the columns completes the grid.
        by_member = [heard] * dist.get_world_size(group)
        dist.all_gather_object(by_member, heard, group=group)
        heard = {number: theirs for member in by_member for number, theirs in member.items()}
    # The own error comes first: it has the traceback that a message from another rank lacks.
    if problem is not None:
        raise problem
    heard = dict(sorted(heard.items()))
    for number, (text, _) in heard.items():
        if text:
            raise ValueError(f"rank {number}: {text}")
    return {number: pickle.loads(data) for number, (_, data) in heard.items()}  # noqa: S301 - from ranks of ours


def check_alike(
    said: Mapping[int, object], what: str, *, remedy: str = "give all ranks the same", show: bool = True
) -> None:
    """Raise an error if the values of the ranks differ. No communication: `agree` has gathered the values.

    Args:
        said: Values by global rank, as returned by `agree`; the check has the same result on every rank.
        what: Noun for the values, in the plural, such as "options".
        remedy: End of the message: the fix. Default: "give all ranks the same".
        show: Whether the message quotes two values; False for unreadable values such as digests. Default: True.

    Raises:
        ValueError: The values differ; the message has the ranks whose value is not the first rank's.
    """
    first = next(iter(said))
    different = [rank for rank, value in said.items() if value != said[first]]
    if different:
        other = different[0]
        values = f" (rank {other}: {said[other]}; rank {first}: {said[first]})" if show else ""
        ranks = f"rank {other} has" if len(different) == 1 else f"ranks {different} have"
        raise ValueError(f"{ranks} other {what} than rank {first}{values}; {remedy}")


@contextmanager
def together(step: str, *groups: dist.ProcessGroup | None) -> Iterator[None]:
    """Run a block that succeeds on all ranks or raises an error on all ranks.

    The end of the context is a collective: one all-gather of a short text per group. The block itself may contain
    collectives.

    Args:
        step: Name of the block, such as "reading the data"; all ranks must end the same block.
        *groups: Groups that take part; None is the world.

    Raises:
        Exception: The block raised this error on this rank; it is unchanged.
        ValueError: The block raised on another rank, whose number the message has.

    Example:
        with together("reading the data", None):
            batch = read(path)
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # raised when all ranks know of it
        problem = error
    check_alike(agree(problem, step, *groups), "steps", remedy="let all ranks do the same")
