"""Contenders take turns: what ran right before matters, and so does what else the machine does meanwhile."""

import random
import statistics
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def shuffled(contenders: Sequence[T], turn: int) -> list[T]:
    """All of them in an order of this turn, the same on all ranks."""
    return random.Random(turn).sample(contenders, len(contenders))


def ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the ratios within a turn."""
    return statistics.median(it / base for it, base in zip(times, reference, strict=True))


def quartile(values: Sequence[float], which: int) -> float:
    """The first, second or third."""
    return statistics.quantiles(values, n=4)[which - 1]
