"""Report which rank of a job hangs, where and why, from a thread that watches each rank.

`_watchdog` notices a hang, SIGQUIT or an error. `_capture` makes the dump of this rank, and `_exchange` sends it to the
other ranks over the store. `_explain` compares the dumps in words, with `_divergence` for ranks that call different
collectives. These modules and `_dump` need no torch, so `python -m par_diagnosis` starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._activity import Activity
    from ._watchdog import Watchdog

__version__ = "0.1.0"

__all__ = ["Activity", "Watchdog"]

_MODULE_OF = {"Activity": "_activity", "Watchdog": "_watchdog"}
"""Module of each public name. A module is imported when a name is first used, because it imports torch."""


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
