"""Pipeline parallelism: schedules as data, a simulator with pictures, and a runtime for any valid schedule.

Schedules and the simulator are imported at once and need no torch. The runtime is imported on first use. A plan for
thousands of stages therefore takes a small, quick process.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._errors import PipelineError
from .analysis.costs import Costs
from .analysis.simulate import simulate
from .analysis.timeline import Timeline
from .schedules.actions import Action
from .schedules.dualpipe import dualpipe_v
from .schedules.gpipe import gpipe, looped_bfs
from .schedules.one_f_one_b import interleaved, one_f_one_b
from .schedules.registry import register_schedule, schedule
from .schedules.schedule import Schedule
from .schedules.v_half import v_half
from .schedules.v_min import v_min
from .schedules.walk import Event
from .schedules.zb_v import zb_v
from .schedules.zero_bubble import zb_h1, zb_h2
from .stages.partition import partition

if TYPE_CHECKING:
    from .runtime.microbatches import Batch, Microbatches, Result, split_keywords, split_rows
    from .runtime.offload import ActivationOffload
    from .runtime.options import LossWeight, Transport
    from .runtime.pipeline import Pipeline
    from .runtime.shared import Shared
    from .runtime.stage_modules import (
        PipelineStages,
        StageRunner,
        build_model_stages,
        build_stages,
        remove_foreign_parameters_,
    )
    from .stages.build import build_stage
    from .stages.images import image_inputs
    from .stages.lazy import Lazy
    from .wire.lanes import Lanes, make_lanes

__version__ = "0.1.0"

__all__ = [
    "Action",
    "ActivationOffload",
    "Batch",
    "Costs",
    "Event",
    "Lanes",
    "Lazy",
    "LossWeight",
    "Microbatches",
    "Pipeline",
    "PipelineError",
    "PipelineStages",
    "Result",
    "Schedule",
    "Shared",
    "StageRunner",
    "Timeline",
    "Transport",
    "build_model_stages",
    "build_stage",
    "build_stages",
    "dualpipe_v",
    "gpipe",
    "image_inputs",
    "interleaved",
    "looped_bfs",
    "make_lanes",
    "one_f_one_b",
    "partition",
    "register_schedule",
    "remove_foreign_parameters_",
    "schedule",
    "simulate",
    "split_keywords",
    "split_rows",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

_LATE = {
    "stages.build": ("build_stage",),
    "stages.images": ("image_inputs",),
    "stages.lazy": ("Lazy",),
    "runtime.microbatches": ("Batch", "Microbatches", "Result", "split_keywords", "split_rows"),
    "runtime.offload": ("ActivationOffload",),
    "runtime.options": ("LossWeight", "Transport"),
    "runtime.pipeline": ("Pipeline",),
    "runtime.shared": ("Shared",),
    "runtime.stage_modules": (
        "PipelineStages",
        "StageRunner",
        "build_model_stages",
        "build_stages",
        "remove_foreign_parameters_",
    ),
    "wire.lanes": ("Lanes", "make_lanes"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
