"""What `Strategy.initialize` does with one optimizer and its models: through all plugins, in their order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from par_groups import together
from par_precision import MixedOptimizer

from .handlers import DEFAULT, kinds_of, make_handlers
from .pairs import Pair, pair
from .plan import sizes_of

if TYPE_CHECKING:
    from .strategy import Strategy

_MARK = "par_train"  # on what was initialized


def paired(objects: Sequence[Any]) -> list[Pair]:
    """What belongs together. Nothing is changed.

    Raises:
        ValueError, TypeError: What cannot be initialized, or was before.
    """
    kinds: dict[type, list[Any]] = {nn.Module: [], Optimizer: [], DataLoader: []}
    schedulers = []
    for each in objects:
        kind = next((kind for kind in kinds if isinstance(each, kind)), None)
        if _MARK in getattr(each, "__dict__", {}):
            raise ValueError(f"this {type(each).__name__} was initialized before; initialize once")
        if kind is not None:
            kinds[kind].append(each)
        elif hasattr(each, "optimizer") and callable(getattr(each, "step", None)):
            schedulers.append(each)
        else:
            raise TypeError(
                f"initialize() was given a {type(each).__name__}; it takes modules, optimizers, DataLoaders and lr "
                "schedulers" + ("; first: Strategy.build(layers)" if isinstance(each, list | tuple) else "")
            )
    if len({id(each) for each in objects}) < len(objects):
        raise ValueError("initialize() was given an object twice; give each once")
    return pair(kinds[nn.Module], kinds[Optimizer], schedulers)


def wire(each: Pair, strategy: "Strategy") -> dict[int, Any]:
    """Takes a pair through all plugins. Collective.

    Returns:
        What has become of its objects, by the `id` of what was given.
    """
    before = [*each.models, each.optimizer, *each.schedulers]
    model = each.module
    for plugin in strategy.plugins:
        if plugin.name in ("zero", "precision") and each.sizes is None:
            each.sizes = sizes_of(model, strategy.options.stage)
        with together(f"plugin {plugin.name!r}", None):
            model = plugin.setup_model(model, each.optimizer, strategy)
            if each.optimizer is not None:
                each.optimizer = plugin.setup_optimizer(each.optimizer, model, strategy)
    each.models = list(model) if isinstance(model, nn.ModuleList) and len(each.models) > 1 else [model]
    for one in each.models:
        if "no_sync" in model.__dict__:
            one.__dict__["no_sync"] = model.__dict__["no_sync"]
    if isinstance(each.optimizer, MixedOptimizer) and each.optimizer.scaling.scale is not None:
        each.schedulers = [each.optimizer.schedule(scheduler) for scheduler in each.schedulers]
    with together("gradient handlers", None):
        if each.optimizer is not None:
            _attach(each.optimizer, model, strategy)
    after = [*each.models, each.optimizer, *each.schedulers]
    for one in (*before, *after):
        if one is not None:
            one.__dict__[_MARK] = True
    return {id(old): new for old, new in zip(before, after, strict=True)}


def _attach(optimizer: Optimizer, model: nn.Module, strategy: "Strategy") -> None:
    """Gradients are completed before each step; the strategy hears of it afterwards."""
    kinds = kinds_of(strategy.options.gradient_handlers or DEFAULT)
    handlers = make_handlers(kinds, model, optimizer, strategy.groups)

    def complete(_: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if len(args) > 1 or keywords.get("closure") is not None:
            raise ValueError("step() was given a closure; call Strategy.backward() first, then step() without one")
        for handler in handlers:
            handler.handle_gradient()

    optimizer.register_step_pre_hook(complete)
    optimizer.register_step_post_hook(strategy.after_step)
