"""Many values for one test in one world: to start a world takes longer than most of what is tested in it."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

Test = Callable[..., None]

_STORM = "storm"  # the parameter that says which combinations a test goes through


def storm(*values: object) -> ParameterSet:
    """Values for which others stand, for `for_each` and `parametrize`: a test has them with `-m storm` alone.

    Raises:
        TypeError: A test was decorated: pytest would not collect it.
    """
    if inspect.isfunction(values[0]) and values[0].__name__.startswith("test_"):
        raise TypeError(f"storm({values[0].__name__}): it marks values; decorate a test with @pytest.mark.storm")
    return pytest.param(*values, marks=pytest.mark.storm)


def for_each(**cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Calls a test once for every combination of values; a failure bears a note that says with which.

    The decorator for what needs no report of its own for each value: that is what `pytest.mark.parametrize` is for.
    Combinations with a value that is a `storm` are a test of their own, which is left out unless asked for.

    Args:
        cases: The values of some of the test's arguments, by name. The others are fixtures as ever.
    """
    usual, storms = _combinations(cases)

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            for chosen in storms if fixtures.pop(_STORM, False) else usual:
                try:
                    test(**fixtures, **chosen)
                except BaseException as error:  # pytest.fail raises one that is no Exception
                    error.add_note(f"with {chosen}")
                    raise

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in cases]
        more = [inspect.Parameter(_STORM, inspect.Parameter.KEYWORD_ONLY)] if storms else []
        run.__signature__ = signature.replace(parameters=[*others, *more])  # type: ignore[attr-defined]  # for pytest
        if not storms:
            return run
        marked: Test = pytest.mark.parametrize(_STORM, [False, storm(True)], ids=["typical", "others"])(run)
        return marked

    return decorate


def _combinations(cases: dict[str, Iterable[Any]]) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """What a test goes through as ever, and among the storms."""
    usual: list[dict[str, Any]] = []
    storms: list[dict[str, Any]] = []
    for values in product(*cases.values()):
        marked = [each for each in values if isinstance(each, ParameterSet)]
        plain = (each.values[0] if isinstance(each, ParameterSet) else each for each in values)
        (storms if marked else usual).append(dict(zip(cases, plain, strict=True)))
    return usual, storms
