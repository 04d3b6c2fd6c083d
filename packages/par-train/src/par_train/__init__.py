"""The pieces of par wired together.

What needs torch is imported when it is first used, so that the command line answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._checkpoint import load_model
    from ._data import GlobalDataLoader
    from ._gpt import GPT
    from ._handlers import GradientHandler, register_gradient_handler
    from ._plan_options import Job, Machine
    from ._plan_predict import Prediction, predict
    from ._plan_shape import Shape
    from ._plugin import Plugin
    from ._stages import Stages
    from ._strategy import Strategy
    from ._strategy_options import StrategyOptions
    from ._strategy_plan import StrategyPlan

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "GlobalDataLoader",
    "GradientHandler",
    "Job",
    "Machine",
    "Plugin",
    "Prediction",
    "Shape",
    "Stages",
    "Strategy",
    "StrategyOptions",
    "StrategyPlan",
    "load_model",
    "predict",
    "register_gradient_handler",
]

_LATE = {
    "_checkpoint": ("load_model",),
    "_data": ("GlobalDataLoader",),
    "_gpt": ("GPT",),
    "_handlers": ("GradientHandler", "register_gradient_handler"),
    "_plan_options": ("Job", "Machine"),
    "_plan_predict": ("Prediction", "predict"),
    "_plan_shape": ("Shape",),
    "_plugin": ("Plugin",),
    "_stages": ("Stages",),
    "_strategy": ("Strategy",),
    "_strategy_options": ("StrategyOptions",),
    "_strategy_plan": ("StrategyPlan",),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
