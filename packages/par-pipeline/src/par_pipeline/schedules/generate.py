"""Lazy action lists of the built-in schedules, generated one action at a time."""

from collections.abc import Callable, Iterable, Iterator

from .actions import BACKWARD, INPUT_GRAD, WEIGHT_GRAD, Action


class Generated:
    """Actions of one rank, generated again at each iteration.

    Args:
        generator: A function that yields the actions. A module's own function, so that the schedule can be pickled.
        *args: The numbers that the generator is called with.
    """

    def __init__(self, generator: Callable[..., Iterator[Action]], *args: int) -> None:
        self._generator, self._args = generator, args

    def __iter__(self) -> Iterator[Action]:
        return self._generator(*self._args)


def numbered(order: Iterable[tuple[str, int]], microbatches: int) -> Iterator[Action]:
    """Give operations their microbatches: the n-th of a kind is for microbatch n, and is left out beyond the last.

    Args:
        order: Operations and stages; a whole backward counts as both of its parts.
        microbatches: Number of microbatches in the step.
    """
    counts: dict[tuple[str, int], int] = {}
    for op, stage in order:
        first = INPUT_GRAD if op == BACKWARD else op
        microbatch = counts.get((first, stage), 0)
        counts[first, stage] = microbatch + 1
        if op == BACKWARD:
            counts[WEIGHT_GRAD, stage] = microbatch + 1
        if microbatch < microbatches:
            yield Action(op, stage, microbatch)


def check_sizes(**sizes: int) -> None:
    """Refuses a number of ranks, microbatches or chunks that is no positive whole number.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is below 1.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} is {size!r}, it must be a whole number")
        if size < 1:
            raise ValueError(f"{name} is {size}, it must be at least 1")
