"""The steps of `Strategy.initialize`: check all objects, then take each bundle of models through all plugins."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from par_data import ShardedDataLoader, WorkerSignals, check_order
from par_groups import agree, check_alike, replica_axes, together
from par_layers import LossFactor, adds_losses
from par_layers.pretrained import (
    attend_over_,
    check_adapter,
    check_pretrained,
    pretrained_in,
    pretrained_of,
    reaches_other_tokens,
)
from par_pipeline import build_model_stages
from par_precision import MixedOptimizer
from par_zero import check_update_scope

from .bundles import MARK, ModelBundle, bundles_of, joined
from .experts import has_experts, no_experts
from .handlers import GradientHandler, kinds_of, make_handlers
from .plugin import Plugin
from .plugins import ZeroPlugin
from .setup import Setup

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


def check_objects(
    objects: tuple[Any, ...], strategy: Setup, initialized: Sequence[ModelBundle], signals: WorkerSignals
) -> tuple[tuple[Any, ...], list[ModelBundle], dict[int, ShardedDataLoader]]:
    """Check everything that can be wrong with the arguments of `initialize` before any of them changes. Collective.

    Args:
        objects: The arguments.
        strategy: The strategy, with the `plans` of its models.
        initialized: The bundles of earlier calls.
        signals: The signals that workers of data loaders outlive.

    Returns:
        The arguments, each list of optimizers as one optimizer; the bundles; and the new data loaders, by the `id` of
        the argument.

    Raises:
        ValueError, TypeError: The arguments do not fit together, or differ between ranks; on every rank.
    """
    problem: Exception | None = None
    bundles: list[ModelBundle] = []
    loaders: dict[int, ShardedDataLoader] = {}
    orders: list[str] = []
    models: list[nn.Module] = []
    groups, context = strategy.groups, strategy.context if strategy.cuts_sequence else None
    try:
        # Everything below only looks. A mistake must leave all objects as they were, on every rank.
        objects = tuple(map(joined, objects))
        bundles = bundles_of(objects)
        models = [model for bundle in bundles for model in bundle.models]
        for model in strategy.plans:
            if not any(model is given for given in objects):
                raise ValueError(f"plans has a {type(model).__name__} that initialize() did not receive; pass it too")
        is_sharded = any(isinstance(plugin, ZeroPlugin) for plugin in strategy.plugins)
        for bundle in bundles:
            if bundle.optimizer is not None:
                update = strategy.options.zero_policy("update")
                check_update_scope(bundle.optimizer, bundle.models, groups, update, is_sharded=is_sharded)
            for model in bundle.models if context is not None else ():
                trained = bundle.optimizer is not None
                check_pretrained(model, strategy.context, tensor_ranks=groups.size("tensor"), trained=trained)
        _check_models(models, strategy)
        replicas, axes = groups.size(strategy.data_axes), replica_axes(groups.topology)
        is_broadcast = strategy.options.broadcast_batches and groups.size(axes) > 1
        for given in (given for given in objects if isinstance(given, DataLoader)):
            if bundles or initialized:  # a loader without any model is not trained on
                strategy.check_last_batch(given, replicas)
            loaders[id(given)] = ShardedDataLoader(
                given,
                rank=groups.rank(strategy.data_axes),
                num_replicas=replicas,
                seed=strategy.options.seed,
                replica_group=groups[axes] if is_broadcast else None,
                data_group=groups[strategy.data_axes] if replicas > 1 else None,
                worker_signals=signals,
                uneven=strategy.options.uneven_batches,
            )
            receives = is_broadcast and groups.rank(axes) > 0
            orders.append("" if receives else loaders[id(given)].hash_order())
    except Exception as error:  # of any kind: every rank raises what one rank has raised
        problem = error
    said = agree(problem, ([type(given).__name__ for given in objects], orders), None)
    check_alike({rank: names for rank, (names, _) in said.items()}, "objects")
    for number, given in enumerate(given for given in objects if isinstance(given, DataLoader)):
        # A rank that receives its batches from another rank may have any dataset.
        digests = {rank: by_loader[number] for rank, (_, by_loader) in said.items() if by_loader[number]}
        check_order(digests, given.sampler if given.batch_sampler is None else given.batch_sampler)
    if strategy.deals_experts and models:
        _check_has_experts([*models, *(model for bundle in initialized for model in bundle.models)], models, strategy)
    if context is not None:
        # A stage may hold no attention: the model is wrong only if no stage reaches the tokens of other ranks.
        found = agree(None, [reaches_other_tokens(model) for model in models], None)
        for number, model in enumerate(models):
            if not any(by_model[number] for by_model in found.values()):
                raise ValueError(
                    f"nothing in this {type(model).__name__} reaches the tokens of the other ranks of "
                    f"sequence={context.ranks}: no module of it has a layer set or a par_layers.Context as an "
                    "attribute; compute attention with context.attention of Strategy.context, or with Strategy.layers, "
                    "or give these ranks to data, tensor or pipeline"
                )
    # It is the first change of an object, once every rank has checked everything.
    with nullcontext() if context is None else together("attention over a sequence", None):
        for model in models:
            attend_over_(model, strategy.context)
    return objects, bundles, loaders


def _check_models(models: Sequence[nn.Module], strategy: Setup) -> None:
    """Check the adapters of models, and that transformers models can be split into stages, by splitting them.

    That changes no model.
    """
    replicas = strategy.groups.size(strategy.data_axes)
    for model in models:
        check_adapter(model, replicas=replicas, frees=strategy.options.stage == 3)
        if strategy.schedule is not None and pretrained_of(model) is model:
            build_model_stages(model, strategy.schedule, strategy.groups.rank("pipeline"))


def _check_has_experts(every: Sequence[nn.Module], new: Sequence[nn.Module], strategy: Setup) -> None:
    """Raise ValueError on all ranks if no model has experts to distribute."""
    # A model that is still to be parallelized raises its own error then.
    # A rank may hold only stages without experts, so one rank with experts suffices.
    mine = any(has_experts(one) or one in strategy.plans or pretrained_in(one) for one in every)
    if not any(agree(None, mine, None).values()):
        raise no_experts(new, strategy.groups.size("expert_parallel"))


def wire(
    bundle: ModelBundle, plugins: Sequence[Plugin], strategy: Setup, after_step: Callable[..., None]
) -> tuple[dict[int, Any], "RemovableHandle | None"]:
    """Take a bundle through all plugins, in place. Collective.

    Args:
        bundle: Models, their optimizer and its schedulers.
        plugins: All plugins, in the order in which they are applied.
        strategy: The strategy, which plugins may use.
        after_step: A function to call after each step of the optimizer.

    Returns:
        What each object of the bundle has become, by the `id` of the argument; and the handle that removes
        `after_step` from the optimizer, None without an optimizer.
    """
    before = [*bundle.models, bundle.optimizer, *bundle.schedulers]
    model = bundle.module
    for plugin in plugins:
        with together(f"plugin {plugin.name!r}", None):
            # The sizes are those of full parameters on this rank, before ZeRO packs them.
            if plugin.name in ("zero", "precision") and bundle.sizes is None:
                if plugin.name == "zero":
                    strategy.cast_(model, bundle.optimizer)
                bundle.sizes = strategy.sizes_of(model, bundle.optimizer)
            model = plugin.setup_model(model, bundle.optimizer, strategy)
            if bundle.optimizer is not None:
                bundle.optimizer = plugin.setup_optimizer(bundle.optimizer, model, strategy)
    with together("routers", None):
        pipeline = strategy.groups["pipeline"] if strategy.schedule is not None else None
        travels = pipeline is not None and any(agree(None, adds_losses(model), pipeline).values())
        bundle.factor = LossFactor(model, travels=travels, device=strategy.device)
    bundle.models = list(model) if isinstance(model, nn.ModuleList) and len(bundle.models) > 1 else [model]
    for one in bundle.models:
        # Several models share one engine of par-zero, which sets `no_sync` on the ModuleList around them.
        if hasattr(model, "no_sync"):  # torch.compile returns a wrapper, which lacks the attribute of the module inside
            one.__dict__["no_sync"] = model.no_sync
    # With a loss scale, some steps are skipped, and a schedule must not count them.
    if isinstance(bundle.optimizer, MixedOptimizer) and bundle.optimizer.scaling.scale is not None:
        bundle.schedulers = [bundle.optimizer.schedule(scheduler) for scheduler in bundle.schedulers]
    handle = None
    with together("gradient handlers", None):
        if bundle.optimizer is not None:
            kinds = kinds_of(strategy.options.handlers)
            _complete_before_step(bundle.optimizer, make_handlers(kinds, model, bundle.optimizer, strategy.groups))
            handle = bundle.optimizer.register_step_post_hook(after_step)
    # The mark is on old and new objects: passing either of them to initialize() again is a mistake.
    after = [*bundle.models, bundle.optimizer, *bundle.schedulers]
    for one in (*before, *after):
        if one is not None:
            one.__dict__[MARK] = True
    return {id(old): new for old, new in zip(before, after, strict=True)}, handle


def _complete_before_step(optimizer: Optimizer, handlers: Sequence[GradientHandler]) -> None:
    """Let gradient handlers complete the gradients before each step of an optimizer."""

    def complete(_: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # The first argument is the optimizer itself.
        if any(given is not None for given in (*args[1:], *keywords.values())):
            raise ValueError(
                "step() received a closure, which it would run before the gradients are complete; call "
                "Strategy.backward() first, then step() without arguments"
            )
        for handler in handlers:
            handler.handle_gradient()

    optimizer.register_step_pre_hook(complete)
