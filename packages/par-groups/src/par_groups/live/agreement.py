"""What only one rank may see, made known to all: they go on together, or every one of them raises."""

import pickle
from typing import TypeVar

import torch.distributed as dist

Said = TypeVar("Said")


def agree(problem: Exception | None, said: Said, *groups: dist.ProcessGroup | None) -> dict[int, Said]:
    """What each rank says; or, if any has a problem, an error on every rank. An all-gather of small objects a group.

    Args:
        problem: What this rank cannot do, if there is something.
        said: For the others to compare with theirs; what cannot be pickled is a problem.
        *groups: The ranks that take part; None is the world. Where there are several, such as the rows and the columns
            of a grid, each passes on what the ones before it have gathered. None at all: this rank alone.

    Returns:
        What the ranks said, by their numbers in the world, ascending.

    Raises:
        Exception: This rank's own problem, as it is.
        ValueError: Another rank's, with its number and the problem's type.
    """
    try:
        data = pickle.dumps(said)
    except Exception as error:  # of any type: the others wait for this rank
        problem, data = error if problem is None else problem, b""
    rank = dist.get_rank() if dist.is_initialized() else 0
    every = {rank: ("" if problem is None else f"{type(problem).__name__}: {problem}", data)}
    for group in groups:
        theirs = [every] * dist.get_world_size(group)
        dist.all_gather_object(theirs, every, group=group)
        every = {number: each for one in theirs for number, each in one.items()}
    if problem is not None:
        raise problem
    for number in sorted(every):
        if every[number][0]:
            raise ValueError(f"rank {number}: {every[number][0]}")
    return {number: pickle.loads(every[number][1]) for number in sorted(every)}  # noqa: S301 - from ranks of ours
