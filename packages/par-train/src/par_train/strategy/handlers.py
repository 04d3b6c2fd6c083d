"""Gradient handlers: what completes gradients before a step, each over axes of its own, exactly once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from par_groups import ProcessGroups, Registry
from par_layers import PartialGradientReducer, Router, update_correction_bias_

from .stages import Stages


@runtime_checkable
class GradientHandler(Protocol):
    """Completes gradients."""

    def handle_gradient(self) -> None:
        """Called on all ranks once a step, after the last backward and before the norm."""


Make = Callable[..., GradientHandler]
F = TypeVar("F", bound=Make)

HANDLERS: Registry[Make] = Registry("gradient handler", "par_train.gradient_handlers")

DATA_PARALLEL = "data_parallel"
DEFAULT: Sequence[Mapping[str, Any]] = (
    {"type": DATA_PARALLEL},
    {"type": "partial"},
    {"type": "pipeline_shared"},
    {"type": "correction_bias"},
)
"""What a strategy uses unless it is told otherwise."""


def register_gradient_handler(name: str) -> Callable[[F], F]:
    """Registers a gradient handler under `name`, as a decorator on a class or a function.

    It is called as `handler(model, optimizer, groups, **options)`, the options being the further keys of
    `dict(type=name, ...)` in a config, and gives an object with `handle_gradient()`. It finds gradients, wherever they
    live, by `par_groups.gradients(optimizer)`. Another wheel can provide one without being imported: by an entry point
    `name = "module:Class"` in the group `par_train.gradient_handlers`.

    Raises:
        ValueError: The name is taken.

    Example:
        >>> @register_gradient_handler("mean_over_teams")
        ... class MeanOverTeams:
        ...     def __init__(self, model, optimizer, groups): ...
        ...     def handle_gradient(self): ...
    """

    def register(make: F) -> F:
        HANDLERS.register(name, make)
        return make

    return register


def kinds_of(given: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Names and options of the handlers that a config lists, in order.

    Raises:
        ValueError: An entry without a type, or a type that nobody provides.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for each in given:
        kind = each.get("type") if isinstance(each, Mapping) else None
        if not isinstance(kind, str):
            raise ValueError(f"gradient_handlers holds {each!r}; give dict(type=NAME, ...). Names: {HANDLERS.names()}")
        HANDLERS[kind]
        found.append((kind, {key: value for key, value in each.items() if key != "type"}))
    return found


def make_handlers(
    kinds: Sequence[tuple[str, Mapping[str, Any]]], model: nn.Module, optimizer: Optimizer, groups: ProcessGroups
) -> list[GradientHandler]:
    """The handlers of one optimizer.

    Raises:
        ValueError: Options that one does not take, or an object without `handle_gradient`.
    """
    made = []
    for kind, options in kinds:
        try:
            handler = HANDLERS[kind](model, optimizer, groups, **options)
        except TypeError as error:
            raise ValueError(f"gradient handler {kind!r} does not take {dict(options)}: {error}") from error
        if not isinstance(handler, GradientHandler):
            raise ValueError(f"gradient handler {kind!r} is a {type(handler).__name__} without handle_gradient()")
        made.append(handler)
    return made


@register_gradient_handler(DATA_PARALLEL)
class DataParallel:
    """The mean over the data ranks, which par-zero takes during backward: here nothing is left to do.

    Without it in the list a strategy shards nothing, and gradients are the parameters' own.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> None:
        del model, optimizer, groups

    def handle_gradient(self) -> None:
        """It is done."""


@register_gradient_handler("partial")
def _partial(model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> PartialGradientReducer:
    """Sums over the tensor axes over which a gradient is partial."""
    del model
    return PartialGradientReducer(optimizer, groups)


@register_gradient_handler("pipeline_shared")
class PipelineShared:
    """Sums for parameters that several pipeline stages use."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> None:
        del optimizer, groups
        stages = [each for each in model.modules() if isinstance(each, Stages)]
        self._shared = [shared for each in stages for shared in each.shared]

    def handle_gradient(self) -> None:
        """Makes the copies' gradients their sum."""
        for each in self._shared:
            each.handle_gradient()


@register_gradient_handler("correction_bias")
class ChoiceBias:
    """Ends the step of all routers: token counts are reset, and the correction biases, if any, are updated.

    It runs once a step, however many microbatches there were, and also where fp16 skips the step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> None:
        del optimizer
        # The optimizer holds its handlers, and the model the optimizer: nothing but the garbage collector would end it.
        self._routers = [ref(module) for module in model.modules() if isinstance(module, Router)]
        self._groups = groups

    def handle_gradient(self) -> None:
        """One all-reduce of the counts of all layers, where there are routers."""
        if self._routers:
            routers = (router() for router in self._routers)
            update_correction_bias_(nn.ModuleList(router for router in routers if router is not None), self._groups)
