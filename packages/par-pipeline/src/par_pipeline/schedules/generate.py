"""What the built-in schedules are made with: actions one by one, and where the stages lie."""

from collections.abc import Callable, Iterable, Iterator

from .actions import Action


class Generated:
    """The actions of one rank, made anew by a generator at each iteration."""

    def __init__(self, generator: Callable[..., Iterator[Action]], *args: int) -> None:
        self._generator, self._args = generator, args

    def __iter__(self) -> Iterator[Action]:
        return self._generator(*self._args)


def straight(ranks: int, chunks: int = 1) -> list[tuple[int, ...]]:
    """Stages around the ranks, `chunks` times: rank 1 of 4 holds 1, 5, 9, ..."""
    return [tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks)]


def v_shaped(ranks: int) -> list[tuple[int, int]]:
    """Stages down the ranks and up again: rank 0 holds the first and the last."""
    return [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]


def numbered(order: Iterable[tuple[str, int]], microbatches: int) -> Iterator[Action]:
    """Actions of these operations and stages: the n-th of a kind is for microbatch n, beyond the last it is left out.

    A whole backward counts as both of its parts.
    """
    counts: dict[tuple[str, int], int] = {}
    for op, stage in order:
        first = "I" if op == "B" else op
        microbatch = counts.get((first, stage), 0)
        counts[first, stage] = microbatch + 1
        if op == "B":
            counts["W", stage] = microbatch + 1
        if microbatch < microbatches:
            yield Action(op, stage, microbatch)


def check_sizes(**sizes: int) -> None:
    """Refuses what is no size.

    Raises:
        TypeError: A size that is no whole number.
        ValueError: A size below 1.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} is {size!r}, it must be a whole number")
        if size < 1:
            raise ValueError(f"{name} is {size}, it must be at least 1")
