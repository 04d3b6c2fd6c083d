"""Pipeline parallelism: schedules as data, a simulator with pictures, and a runtime for any valid schedule.

Schedules and the simulator are imported at once and need no torch; what runs on tensors is imported when it is first
used, so that planning for thousands of stages stays a small, quick process.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._actions import Action
from ._costs import Costs
from ._dualpipe import dualpipe_v
from ._gpipe import gpipe, looped_bfs
from ._one_f_one_b import interleaved, one_f_one_b
from ._partition import partition
from ._registry import register_schedule, schedule
from ._schedule import Schedule
from ._simulate import simulate
from ._timeline import Event, Timeline
from ._v_half import v_half
from ._v_min import v_min
from ._zb_v import zb_v
from ._zero_bubble import zb_h1, zb_h2

if TYPE_CHECKING:
    from ._build import build_stage
    from ._errors import PipelineError
    from ._lazy import Lazy
    from ._microbatches import Microbatches, split_rows
    from ._offload import Offload
    from ._pipeline import Pipeline, PipelineOptions, Result
    from ._shared import Shared

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Costs",
    "Event",
    "Lazy",
    "Microbatches",
    "Offload",
    "Pipeline",
    "PipelineError",
    "PipelineOptions",
    "Result",
    "Schedule",
    "Shared",
    "Timeline",
    "build_stage",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "partition",
    "register_schedule",
    "schedule",
    "simulate",
    "split_rows",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

_LATE = {
    "_build": ("build_stage",),
    "_errors": ("PipelineError",),
    "_lazy": ("Lazy",),
    "_microbatches": ("Microbatches", "split_rows"),
    "_offload": ("Offload",),
    "_pipeline": ("Pipeline", "PipelineOptions", "Result"),
    "_shared": ("Shared",),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
