"""Memory, traffic and step time of a distributed training job, computed without a GPU and without processes.

Modules are imported when a name is first used: `TrainingJob`, `Machine` and `Shape` do not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .budget.first_step import MeasuredPlan, MeasuredStep, plan_measured
    from .budget.plan import Budget, BudgetPlan, read_budget
    from .budget.tiers import TooSmallError
    from .costs.memory import shadow_memory
    from .costs.pipeline import PipelineCost, PipelineRank, pipeline_cost
    from .inputs import NUMBER_WIDTHS, PEAKS, RECOMPUTES, Machine, NumberWidths, OffloadTiers, TrainingJob
    from .live import ModelSizes, StepPlan, model_sizes, plan_budget, plan_models, plan_unsharded_model
    from .models.pretrained import PretrainedShape
    from .models.protocol import PlannedModel
    from .prediction import Prediction, model_flops, predict
    from .report import PlanReport
    from .search import SearchResult, search_configurations
    from .shape import ExpertLayers, Shape

__version__ = "0.1.0"

__all__ = [
    "NUMBER_WIDTHS",
    "PEAKS",
    "RECOMPUTES",
    "Budget",
    "BudgetPlan",
    "ExpertLayers",
    "Machine",
    "MeasuredPlan",
    "MeasuredStep",
    "ModelSizes",
    "NumberWidths",
    "OffloadTiers",
    "PipelineCost",
    "PipelineRank",
    "PlanReport",
    "PlannedModel",
    "Prediction",
    "PretrainedShape",
    "SearchResult",
    "Shape",
    "StepPlan",
    "TooSmallError",
    "TrainingJob",
    "model_flops",
    "model_sizes",
    "pipeline_cost",
    "plan_budget",
    "plan_measured",
    "plan_models",
    "plan_unsharded_model",
    "predict",
    "read_budget",
    "search_configurations",
    "shadow_memory",
]

_LATE = {
    "budget.plan": ("Budget", "BudgetPlan", "read_budget"),
    "budget.first_step": ("MeasuredPlan", "MeasuredStep", "plan_measured"),
    "budget.tiers": ("TooSmallError",),
    "inputs": ("NUMBER_WIDTHS", "PEAKS", "RECOMPUTES", "TrainingJob", "Machine", "NumberWidths", "OffloadTiers"),
    "models.protocol": ("PlannedModel",),
    "costs.memory": ("shadow_memory",),
    "costs.pipeline": ("PipelineCost", "PipelineRank", "pipeline_cost"),
    "prediction": ("Prediction", "model_flops", "predict"),
    "models.pretrained": ("PretrainedShape",),
    "report": ("PlanReport",),
    "search": ("SearchResult", "search_configurations"),
    "shape": ("ExpertLayers", "Shape"),
    "live": ("ModelSizes", "StepPlan", "plan_models", "plan_unsharded_model", "model_sizes", "plan_budget"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
