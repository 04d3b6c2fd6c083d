"""Memory, traffic and step time of a distributed training job, computed without a GPU and without processes.

Modules are imported when a name is first used, so that `Job`, `Machine` and `Shape` are available without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .budget.budget import Budget, Spent, budget_of
    from .budget.measured import Measured, spend_rest
    from .budget.tiers import TooSmallError
    from .inputs import NUMBERS, PEAKS, RECOMPUTES, Job, Machine
    from .model import PlannedModel
    from .pipeline import pipe
    from .prediction import Prediction, model_flops, predict
    from .pretrained import PretrainedShape
    from .report import Report
    from .search import rank
    from .shape import Shape
    from .strategy_plan import Sizes, StrategyPlan, plan_of, plan_of_whole, sizes_of, spent_on

__version__ = "0.1.0"

__all__ = [
    "NUMBERS",
    "PEAKS",
    "RECOMPUTES",
    "Budget",
    "Job",
    "Machine",
    "Measured",
    "PlannedModel",
    "Prediction",
    "PretrainedShape",
    "Report",
    "Shape",
    "Sizes",
    "Spent",
    "StrategyPlan",
    "TooSmallError",
    "budget_of",
    "model_flops",
    "pipe",
    "plan_of",
    "plan_of_whole",
    "predict",
    "rank",
    "sizes_of",
    "spend_rest",
    "spent_on",
]

_LATE = {
    "budget.budget": ("Budget", "Spent", "budget_of"),
    "budget.measured": ("Measured", "spend_rest"),
    "budget.tiers": ("TooSmallError",),
    "inputs": ("NUMBERS", "PEAKS", "RECOMPUTES", "Job", "Machine"),
    "model": ("PlannedModel",),
    "pipeline": ("pipe",),
    "prediction": ("Prediction", "model_flops", "predict"),
    "pretrained": ("PretrainedShape",),
    "report": ("Report",),
    "search": ("rank",),
    "shape": ("Shape",),
    "strategy_plan": ("Sizes", "StrategyPlan", "plan_of", "plan_of_whole", "sizes_of", "spent_on"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
