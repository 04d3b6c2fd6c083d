"""Many values for one test in one world: to start a world takes longer than most of what is tested in it."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any

Test = Callable[..., None]


def for_each(**cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Calls a test once for every combination of values; a failure bears a note that says with which.

    The decorator for what needs no report of its own for each value: that is what `pytest.mark.parametrize` is for.

    Args:
        cases: The values of some of the test's arguments, by name. The others are fixtures as ever.
    """
    combinations = [dict(zip(cases, values, strict=True)) for values in product(*cases.values())]

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            for chosen in combinations:
                try:
                    test(**fixtures, **chosen)
                except BaseException as error:  # pytest.fail raises one that is no Exception
                    error.add_note(f"with {chosen}")
                    raise

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in cases]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # which pytest looks at
        return run

    return decorate
