"""What `Strategy.initialize` does: objects are sorted into pairs, and each pair goes through all plugins in order."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from par_groups import agree, together
from par_precision import MixedOptimizer

from .handlers import DEFAULT, GradientHandler, kinds_of, make_handlers
from .mixture.factor import LossFactor, adds_losses
from .pairs import Pair, find_pairs
from .plugin import Plugin
from .setup import Setup

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_MARK = "par_train"  # on what was initialized


def paired(objects: Sequence[Any]) -> list[Pair]:
    """Sorts what `initialize` was given by kind, and finds what belongs together. Nothing is changed.

    Raises:
        ValueError, TypeError: What cannot be initialized, or was before.
    """
    kinds: dict[type, list[Any]] = {nn.Module: [], Optimizer: [], DataLoader: []}
    schedulers = []
    for given in objects:
        kind = next((kind for kind in kinds if isinstance(given, kind)), None)
        if _MARK in getattr(given, "__dict__", {}):
            raise ValueError(f"this {type(given).__name__} was initialized before; initialize once")
        if kind is not None:
            kinds[kind].append(given)
        elif hasattr(given, "optimizer") and callable(getattr(given, "step", None)):
            schedulers.append(given)
        else:
            raise TypeError(
                f"initialize() was given a {type(given).__name__}; it takes modules, optimizers, DataLoaders and lr "
                "schedulers" + ("; first: Strategy.build(layers)" if isinstance(given, list | tuple) else "")
            )
    if len({id(given) for given in objects}) < len(objects):
        raise ValueError("initialize() was given an object twice; give each once")
    return find_pairs(kinds[nn.Module], kinds[Optimizer], schedulers)


def wire(
    pair: Pair, plugins: Sequence[Plugin], strategy: Setup, after_step: Callable[..., None]
) -> tuple[dict[int, Any], "RemovableHandle | None"]:
    """Takes a pair through all plugins, in place. Collective.

    Args:
        pair: Models, their optimizer and its schedulers.
        plugins: All plugins, in the order in which they are applied.
        strategy: The strategy, which plugins may ask.
        after_step: Called after each step of the optimizer.

    Returns:
        What has become of the pair's objects, by the `id` of what was given; and what takes `after_step` away from the
        optimizer again.
    """
    before = [*pair.models, pair.optimizer, *pair.schedulers]
    model = pair.module
    for plugin in plugins:
        with together(f"plugin {plugin.name!r}", None):
            if plugin.name in ("zero", "precision") and pair.sizes is None:
                pair.sizes = strategy.sizes_of(model, pair.optimizer)
            model = plugin.setup_model(model, pair.optimizer, strategy)
            if pair.optimizer is not None:
                pair.optimizer = plugin.setup_optimizer(pair.optimizer, model, strategy)
    with together("routers", None):
        pipeline = strategy.groups["pipeline"] if strategy.schedule is not None else None
        travels = pipeline is not None and any(agree(None, adds_losses(model), pipeline).values())
        pair.factor = LossFactor(model, travels=travels, device=strategy.device)
    pair.models = list(model) if isinstance(model, nn.ModuleList) and len(pair.models) > 1 else [model]
    for one in pair.models:
        if hasattr(model, "no_sync"):  # what torch.compile returns has the one of the module inside
            one.__dict__["no_sync"] = model.no_sync
    if isinstance(pair.optimizer, MixedOptimizer) and pair.optimizer.scaling.scale is not None:
        pair.schedulers = [pair.optimizer.schedule(scheduler) for scheduler in pair.schedulers]
    handle = None
    with together("gradient handlers", None):
        if pair.optimizer is not None:
            kinds = kinds_of(strategy.options.gradient_handlers or DEFAULT)
            _complete_before_step(pair.optimizer, make_handlers(kinds, model, pair.optimizer, strategy.groups))
            handle = pair.optimizer.register_step_post_hook(after_step)
    after = [*pair.models, pair.optimizer, *pair.schedulers]
    for one in (*before, *after):
        if one is not None:
            one.__dict__[_MARK] = True
    return {id(old): new for old, new in zip(before, after, strict=True)}, handle


def _complete_before_step(optimizer: Optimizer, handlers: Sequence[GradientHandler]) -> None:
    """Lets handlers complete the gradients before each step."""

    def complete(_: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if any(given is not None for given in (*args[1:], *keywords.values())):
            raise ValueError("step() was given a closure; call Strategy.backward() first, then step() without one")
        for handler in handlers:
            handler.handle_gradient()

    optimizer.register_step_pre_hook(complete)
