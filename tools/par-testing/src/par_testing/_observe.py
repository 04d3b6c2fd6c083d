"""Waits of a test for what other threads or ranks do, by what they have done and not by the clock."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest


def wait_until(condition: Callable[[], object], pause: float = 0.01) -> None:
    """Return when a condition holds. There is no limit but the test's own, so that a slow machine fails nothing.

    Args:
        condition: Function whose result is true in the end, such as the `exists` of a path that another rank makes.
        pause: Seconds between two calls of it.
    """
    while not condition():
        time.sleep(pause)


def observe_results(patch: pytest.MonkeyPatch, owner: object, name: str, then: Callable[[Any], object]) -> None:
    """Call a function with each result of a method, in the thread that calls the method.

    Args:
        patch: The fixture `monkeypatch` of the test, at whose end the method is as before.
        owner: Class or module of the method.
        name: Name of the method.
        then: Function that is called with each result before the caller has it.
    """
    method = getattr(owner, name)

    @wraps(method)
    def observed(*arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        then(result)
        return result

    patch.setattr(owner, name, observed)
