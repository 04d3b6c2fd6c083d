"""The pieces of par wired together.

Modules that need torch are imported on first use, so that the command line starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .jobs.byte_gpt import load_model
    from .run.policies import CheckpointPolicy, LoggingPolicy, MonitoringPolicy
    from .run.run import Run
    from .run.survive.survivors import StateLostError, Survivors, TrainState
    from .strategy.handlers import GradientHandler, register_gradient_handler
    from .strategy.options import StrategyOptions
    from .strategy.plugin import Plugin
    from .strategy.strategy import Strategy

__version__ = "0.1.0"

__all__ = [
    "CheckpointPolicy",
    "GradientHandler",
    "LoggingPolicy",
    "MonitoringPolicy",
    "Plugin",
    "Run",
    "StateLostError",
    "Strategy",
    "StrategyOptions",
    "Survivors",
    "TrainState",
    "load_model",
    "register_gradient_handler",
]

_LATE = {
    "jobs.byte_gpt": ("load_model",),
    "strategy.handlers": ("GradientHandler", "register_gradient_handler"),
    "run.policies": ("CheckpointPolicy", "LoggingPolicy", "MonitoringPolicy"),
    "run.run": ("Run",),
    "run.survive.survivors": ("StateLostError", "Survivors", "TrainState"),
    "strategy.plugin": ("Plugin",),
    "strategy.strategy": ("Strategy",),
    "strategy.options": ("StrategyOptions",),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
