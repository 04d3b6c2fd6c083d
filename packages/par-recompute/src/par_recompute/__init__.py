"""Activations that are computed again, or wait in host memory: layers, single modules, or what a budget asks for."""

from ._checkpoint import checkpoint_layers
from ._layers import choose_layers
from ._policies import Drop, Keep, Layers, Ops
from ._report import Line, Report, choices, saved, set_budget
from ._to_host import ToHost
from .observe.measure import measure
from .plan.frontier import Choice, frontier
from .plan.knapsack import knapsack
from .plan.table import Made, Module, Saved, Table, kept
from .run.planner import Choices

__version__ = "0.1.0"

__all__ = [
    "Choice",
    "Choices",
    "Drop",
    "Keep",
    "Layers",
    "Line",
    "Made",
    "Module",
    "Ops",
    "Report",
    "Saved",
    "Table",
    "ToHost",
    "checkpoint_layers",
    "choices",
    "choose_layers",
    "frontier",
    "kept",
    "knapsack",
    "measure",
    "saved",
    "set_budget",
]
