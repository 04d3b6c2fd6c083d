"""Gradient handlers: they complete the gradients before a step, each over its own axes, once per step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from par_groups import ProcessGroups, Registry
from par_layers import PartialGradientReducer, Router, update_correction_bias_
from par_pipeline import PipelineStages


@runtime_checkable
class GradientHandler(Protocol):
    """An object that completes gradients, such as sums over an axis."""

    def handle_gradient(self) -> None:
        """Complete the gradients. All ranks call it once per step, after the last backward and before the norm."""


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
"""The default of `Strategy(gradient_handlers=...)`."""


def register_gradient_handler(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a class or a function as the gradient handler `name`.

    A strategy calls it as `handler(model, optimizer, groups, **options)`, with the other keys of `dict(type=name, ...)`
    as options, and uses the `handle_gradient()` of the result. `par_groups.gradients(optimizer)` returns the gradients
    wherever they are stored. An installed package can provide a handler by an entry point `name = "module:Class"` in
    the group `par_train.gradient_handlers`.

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
    """Return the names and options of the handlers in a config, in order.

    Raises:
        ValueError: An entry has no type, or no handler has this type.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for each in given:
        kind = each.get("type") if isinstance(each, Mapping) else None
        if not isinstance(kind, str):
            raise ValueError(
                f"gradient_handlers has {each!r}: each must be a dict with a type; pass dict(type=NAME, ...), with one "
                f"of {HANDLERS.names()}"
            )
        # It raises for an unknown name.
        HANDLERS[kind]
        found.append((kind, {key: value for key, value in each.items() if key != "type"}))
    return found


def make_handlers(
    kinds: Sequence[tuple[str, Mapping[str, Any]]], model: nn.Module, optimizer: Optimizer, groups: ProcessGroups
) -> list[GradientHandler]:
    """Make the handlers of one optimizer.

    Raises:
        ValueError: A handler does not take its options, or has no `handle_gradient`.
    """
    made = []
    for kind, options in kinds:
        try:
            # The signature belongs to the user's class, so a TypeError is a mistake in the config.
            handler = HANDLERS[kind](model, optimizer, groups, **options)
        except TypeError as error:
            raise ValueError(f"gradient handler {kind!r} does not take {dict(options)}: {error}") from error
        if not isinstance(handler, GradientHandler):
            raise ValueError(f"gradient handler {kind!r} is a {type(handler).__name__} without handle_gradient()")
        made.append(handler)
    return made


@register_gradient_handler(DATA_PARALLEL)
class DataParallel:
    """The mean over the data ranks, which par-zero computes during backward; this object has nothing left to do.

    Without it in the list the strategy does not shard, and gradients stay in the parameters' own `grad`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> None:
        del model, optimizer, groups

    def handle_gradient(self) -> None:
        """Do nothing: par-zero has already averaged the gradients during backward."""


@register_gradient_handler("partial")
def _partial(model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> PartialGradientReducer:
    """Make the handler that sums partial gradients over tensor axes."""
    del model
    return PartialGradientReducer(optimizer, groups)


@register_gradient_handler("pipeline_shared")
class PipelineShared:
    """The sum of the gradients of each parameter that several pipeline stages use."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> None:
        del optimizer, groups
        stages = [each for each in model.modules() if isinstance(each, PipelineStages)]
        self._shared = [shared for each in stages for shared in each.shared]

    def handle_gradient(self) -> None:
        """Replace the gradient of each replica by the sum."""
        for each in self._shared:
            each.handle_gradient()


@register_gradient_handler("correction_bias")
class CorrectionBiasUpdate:
    """The end of a step for all routers: it resets token counts, and updates correction biases.

    It runs once per step, for any number of microbatches, also if fp16 skips the step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> None:
        del optimizer
        # Weak: the optimizer holds its handlers and the model holds the optimizer, a cycle that only the garbage
        # collector would free.
        self._routers = [ref(module) for module in model.modules() if isinstance(module, Router)]
        self._groups = groups

    def handle_gradient(self) -> None:
        """Run the update, with one all-reduce of the token counts of all layers if there are routers."""
        if self._routers:
            routers = (router() for router in self._routers)
            update_correction_bias_(nn.ModuleList(router for router in routers if router is not None), self._groups)
