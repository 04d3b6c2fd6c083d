"""Contenders take turns: what ran right before matters, and so does what else the machine does meanwhile."""

import argparse
import random
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
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


def chosen_cases(
    description: str | None, names: Sequence[str], turns: int, *, bench: str, contender: str
) -> argparse.Namespace:
    """Reads from the command line which cases to measure, and in how many turns.

    Args:
        description: What the benchmark measures.
        names: All cases.
        turns: Number of turns where nobody says.
        bench: The name of the benchmark, for `nox -s bench`.
        contender: A package that must be installed, as an index calls it.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"cases: {'; '.join(names)}")
    parser.add_argument("--turns", type=int, default=turns, metavar="NUMBER", help="how often every contender runs")
    wanted = parser.parse_args()
    if wanted.turns < 2:
        parser.error(f"--turns is {wanted.turns}; quartiles need 2 or more")
    unknown = [name for name in wanted.cases if name not in names]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; there are {'; '.join(names)}")
    if not find_spec(contender.replace("-", "_")):
        parser.error(f"{contender} is not installed, which is a contender; run `nox -s bench -- {bench}`")
    return wanted
