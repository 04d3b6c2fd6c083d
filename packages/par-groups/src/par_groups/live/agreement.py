"""What only one rank may see, made known to all: they go on together, or every one of them raises.

A rank that raises alone leaves the others waiting in their next collective until it times out. So whatever may fail on
one rank, and whatever may differ between ranks, is agreed on before the first collective that depends on it.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from .._error_text import error_text

Said = TypeVar("Said")


def agree(problem: Exception | None, said: Said, *groups: dist.ProcessGroup | None) -> dict[int, Said]:
    """Gives every rank what each one says; or, if any rank has a problem, raises on every rank.

    One all-gather of small pickled objects per group.

    Args:
        problem: What went wrong on this rank, or None.
        said: What the other ranks shall know of this one. An object that cannot be pickled counts as a problem.
        *groups: The ranks that take part; None stands for the world. Where there are several groups, such as the rows
            and the columns of a grid, each passes on what the groups before it have gathered. Without any group, this
            rank agrees with itself alone.

    Returns:
        What the ranks said, by global rank, ascending.

    Raises:
        Exception: This rank's own problem, unchanged.
        ValueError: Another rank has a problem; the message has its number, and the type and text of the problem.
    """
    try:
        data = pickle.dumps(said)
    except Exception as error:  # of any type: the others wait for this rank
        problem, data = error if problem is None else problem, b""
    rank = dist.get_rank() if dist.is_initialized() else 0
    heard = {rank: ("" if problem is None else f"{type(problem).__name__}: {error_text(problem)}", data)}
    for group in groups:
        by_member = [heard] * dist.get_world_size(group)
        dist.all_gather_object(by_member, heard, group=group)
        heard = {number: theirs for member in by_member for number, theirs in member.items()}
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
    """Raises if the ranks said different things. No communication: `agree` has gathered what they said.

    Args:
        said: What each rank said, by global rank, as `agree` returns it; so the check ends alike on every rank.
        what: What the values are, in the plural, such as "options".
        remedy: The end of the message: what to do.
        show: Whether the message quotes the two values; False for those that nobody can read, such as digests.

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
    """A context: its block ends well on all ranks, or raises on all of them.

    Its end is a collective: one all-gather of a short text per group. What is done inside may be collective as well.

    Args:
        step: What the block does, such as "reading the data"; ranks that end different blocks are an error too.
        *groups: The ranks that take part; None stands for the world.

    Raises:
        Exception: What the block raised on this rank, unchanged.
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
