"""Report which rank of a job hangs, where and why, and where the time of a job goes.

`_watchdog` notices a hang, SIGQUIT or an error. `_capture` makes the dump of this rank, and `_exchange` sends it to the
other ranks over the store. `_explain` compares the dumps in words, with `_divergence` for ranks that call different
collectives. `_failure` prints the error of the first rank that fails. `_goodput` divides the time into phases and waits
for other ranks, and `_profile` records a trace of all ranks. `_explain`, `_divergence`, `_dump` and `_failure` need no
torch, so `python -m par_diagnosis` starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._activity import Activity
    from ._failure import FailureReported, report_first_failure
    from ._goodput import CollectiveWaits, Goodput, PhaseClock, peak_flops_of
    from ._profile import StepProfiler, merge_traces
    from ._watchdog import Watchdog

__version__ = "0.1.0"

__all__ = [
    "Activity",
    "CollectiveWaits",
    "FailureReported",
    "Goodput",
    "PhaseClock",
    "StepProfiler",
    "Watchdog",
    "merge_traces",
    "peak_flops_of",
    "report_first_failure",
]

_MODULE_OF = {
    "Activity": "_activity",
    "CollectiveWaits": "_goodput",
    "FailureReported": "_failure",
    "Goodput": "_goodput",
    "PhaseClock": "_goodput",
    "StepProfiler": "_profile",
    "Watchdog": "_watchdog",
    "merge_traces": "_profile",
    "peak_flops_of": "_goodput",
    "report_first_failure": "_failure",
}
"""Module of each public name. A module is imported when a name is first used, because it imports torch."""


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
