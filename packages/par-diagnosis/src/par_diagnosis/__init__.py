"""Which rank of a job hangs, where and why, from a thread that watches each rank.

`_watch` notices a timeout, SIGQUIT or an error; `_capture` writes what this rank was doing, and in `_meeting` the ranks
exchange it over the store. `_explain` turns it into words, with `_history` for what ranks have done differently. These
and `_dump` need no torch, so that `python -m par_diagnosis` reads the dumps of a job that has died.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._place import Place
    from ._watch import Diagnosis

__version__ = "0.1.0"

__all__ = ["Diagnosis", "Place"]

_MODULE_OF = {"Diagnosis": "_watch", "Place": "_place"}
"""The module of each public name: torch is imported when a name is first used."""


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
