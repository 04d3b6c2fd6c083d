"""The built-in plugins in their order: tensor, pipeline, device, recompute, tied, zero, precision."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import agree, attributes, together
from par_layers import initialize, parallelize
from par_layers.pretrained import pretrained_of
from par_pipeline import PipelineStages, build_model_stages, build_stages, remove_foreign_parameters_
from par_plan import Budget, BudgetPlan, MeasuredStep, pipeline_cost, plan_budget, plan_measured, read_budget
from par_precision import mixed
from par_recompute import Keep, checkpoint_layers, choices, choose_layers, set_budget
from par_zero import (
    DataParallelGroup,
    DiskUsage,
    Offload,
    check_partial_sums,
    check_update_scope,
    disk_usage,
    needs_full_tensors,
    reload_state,
    residency,
    shard,
    shard_state_,
    sync_module_states_,
)

from .canonical.plugins import ExactPlugin, GridPlugin
from .experts import share_of_experts
from .handlers import kinds_of
from .options import StrategyOptions
from .plugin import Plugin, check_support, find_plugin, in_order
from .pretrained.files import guard_saves_
from .settings import policy_of
from .setup import Setup


def choose_plugins(options: StrategyOptions, device: str) -> list[Plugin]:
    """Return the built-in plugins that the options need and the user's, in the order in which they are applied.

    Args:
        options: The options of the strategy.
        device: The device type, such as "cuda".

    Raises:
        ValueError, TypeError: A plugin or a gradient handler is unknown, or plugins contradict each other.
    """
    kinds_of(options.gradient_handlers)
    recompute = [RecomputePlugin()] if options.recompute or options.memory is not None else []
    zero = [ZeroPlugin()] if options.shards else []
    # Sharding comes before the device, so that a rank never needs memory for the full model.
    first: list[Plugin] = [TensorPlugin(), PipelinePlugin(), DevicePlugin()]
    last: list[Plugin] = [TiedPlugin(), *zero, PrecisionPlugin()]
    if options.numerics == "canonical":
        grid = GridPlugin()
        last = [grid, *last, ExactPlugin(grid)]
    built_in = [*first, *recompute, *last]
    plugins = in_order(built_in, [find_plugin(each) for each in options.plugins])
    check_support(plugins, device, options.precision_name)
    return plugins


class TensorPlugin(Plugin):
    """Shards transformers models, and models with a plan, over the tensor group, and distributes their experts."""

    name = "tensor"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Shard the model in place. Parameters stay the same objects. A sharded model does not change."""
        if strategy.groups.size("tensor") == 1 and not strategy.deals_experts and strategy.options.lanes is None:
            return model
        for each in model.children() if isinstance(model, nn.ModuleList) else [model]:
            plan = strategy.plans.get(each)
            if plan is None and pretrained_of(each) is None:
                continue
            plan = "auto" if plan is None else plan
            # The code that made stages has sharded their model.
            if not isinstance(each, PipelineStages) and strategy.parallelizes(each, plan):
                parallelize(each, strategy.layers, plan)
        if optimizer is not None:
            shard_state_(optimizer, model)
        if optimizer is not None and not any(isinstance(plugin, ZeroPlugin) for plugin in strategy.plugins):
            update = strategy.options.zero_policy("update")
            # Checked once more, since models have sharding metadata only now.
            check_update_scope(optimizer, [model], strategy.groups, update, is_sharded=False)
        return model


class PipelinePlugin(Plugin):
    """Keeps this rank's stages of a model, and removes the parameters of other stages from its optimizer."""

    name = "pipeline"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Split an nn.Sequential or a transformers model; `PipelineStages` are split already."""
        if strategy.schedule is None:
            return model
        several = isinstance(model, nn.ModuleList)
        rank = strategy.groups.rank("pipeline")
        # Several models that share an optimizer are split one by one, and keep their order.
        cut: list[nn.Module] = []
        for whole in model.children() if several else [model]:
            if isinstance(whole, PipelineStages):
                cut.append(whole)
            elif pretrained_of(whole) is whole:
                cut.append(build_model_stages(whole, strategy.schedule, rank, strategy.sequence_ranks))
            elif isinstance(whole, nn.Sequential):
                cut.append(build_stages(whole, strategy.schedule, rank))
            else:
                raise ValueError(
                    f"a {type(whole).__name__} cannot be split into pipeline stages; pass a transformers model, an "
                    "nn.Sequential, the result of Strategy.build(layers), or par_pipeline.PipelineStages of your own; "
                    "for a model with adapters, use Strategy.from_pretrained(adapter=...)"
                )
        model = nn.ModuleList(cut) if several else cut[0]
        if optimizer is not None:
            remove_foreign_parameters_(optimizer, model)
        return model


class DevicePlugin(Plugin):
    """Moves this rank's part of a model and its batches to the device. Layers of par-layers are initialized there.

    At stage 3 `ZeroPlugin` initializes one unit after another, so that the full model never needs memory.
    """

    name = "device"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Move or initialize the model. Parameters stay the same objects."""
        del optimizer
        # At stage 3 even this rank's part of the model may not fit, so units are initialized when they are sharded.
        later = _is_abstract(model) and _zero_fills(strategy)
        if _is_abstract(model) and not later:
            initialize(model, strategy.options.seed, device=strategy.device)
        ranks = strategy.groups.size("tensor")
        # A parameter without sharding metadata may be a replica or a shard: norms and checkpoints would guess.
        for name, parameter in model.named_parameters():
            if ranks > 1 and not attributes.SHARDING.is_on(parameter):
                raise ValueError(
                    f"{name!r} has no sharding metadata for the {ranks} ranks of its tensor group; make its layer with "
                    "Strategy.layers, or set the metadata with par_groups.set_sharding"
                )
        return model if later else model.to(strategy.device)

    def setup_dataloader(self, dataloader: Any, strategy: Setup) -> Any:
        """Let the data loader return batches on the device."""
        dataloader.device = strategy.device
        return dataloader


class RecomputePlugin(Plugin):
    """Activation checkpointing of models that are trained, and the use of a memory budget.

    The budget is used here because this rank's part of the model is known here. The plugin comes after plugins that
    replace modules, because it registers hooks on the modules.
    """

    name = "recompute"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Register the hooks; modules, parameters and names do not change. Collective if there is a budget."""
        policy = policy_of(strategy.options.recompute)
        budget = read_budget(strategy.options.memory)
        if optimizer is not None and budget is not None:
            parts = model.children() if isinstance(model, nn.ModuleList) else [model]
            has_layers = agree(None, any(_layers_of(part) for part in parts), None)
            # A rank whose stage has no layers must still agree that the first step is measured.
            measures = policy is None and any(has_layers.values())
            strategy.spent = _spent(model, optimizer, strategy, budget, measures=measures)
            if measures and has_layers[dist.get_rank()]:
                policy = Keep(None)  # everything is recomputed until the first step is measured
        if optimizer is None or policy is None:
            return model
        for each in model.children() if isinstance(model, nn.ModuleList) else [model]:
            if isinstance(each, PipelineStages):
                layers = _layers_of(each)
                # A stage without layers is fine unless no stage has any: then `checkpoint_layers` raises.
                has_some = agree(None, bool(layers), strategy.groups["pipeline"])
                if layers or not any(has_some.values()):
                    checkpoint_layers(each, policy, layers=layers or "auto")
            else:
                checkpoint_layers(each, policy)
        return model


def _spent(model: nn.Module, optimizer: Optimizer, strategy: Setup, budget: Budget, *, measures: bool) -> BudgetPlan:
    """Return the use of a memory budget for this rank's part of a model, identical on all ranks that share it.

    Raises:
        ValueError: A tier is too small, or the budget was used for another model.
    """
    if strategy.spent is not None:
        raise ValueError(
            "memory: the budget was used for another optimizer; use a Strategy for each optimizer, or place tensors "
            "with zero=dict(stage=..., offload=...)"
        )
    strategy.cast_(model, optimizer)
    return plan_budget(
        strategy.sizes_of(model, optimizer),
        budget,
        job=strategy.job(),
        gloo=strategy.device.type == "cpu",
        measures=measures,
    )


def spend_measured(models: Sequence[nn.Module], strategy: Setup) -> None:
    """Use the rest of a memory budget after the first step was measured. Collective over the world.

    Args:
        models: The models that share the budget.
        strategy: The strategy with the budget.

    Raises:
        ValueError: The budget is too small for the activations that layers must save; on all ranks.
    """
    spent, both = strategy.spent, nn.ModuleList(models)
    assert spent is not None  # noqa: S101 - the caller has checked
    with together("memory", None):
        # One engine serves all models of the optimizer, so the first model answers for all of them.
        # State that an accelerator's host loads from the disk would not fit there: the disk has what the host has not.
        on_accelerator = strategy.device.type != "cpu"
        uses_disk = spent.shares.parts.get("optimizer", {}).get("disk") and not on_accelerator
        disk = disk_usage(models[0]) if uses_disk else DiskUsage(pieces=())
        found = choices(both) if any(_layers_of(model) for model in models) else ()
        # Only an accelerator's allocator counts. Its peak is that of the step, as `initialize` has reset it.
        peak = other = 0
        if on_accelerator:
            counted = torch.accelerator.memory_allocated(strategy.device) - residency(models[0]).total()
            peaks = agree(None, (torch.accelerator.max_memory_allocated(strategy.device), counted), None).values()
            peak, other = (max(each) for each in zip(*peaks, strict=True))
        measured = MeasuredStep(models=found, held=_at_a_time(strategy), disk=disk, other=other, peak=peak)
        rest = plan_measured(spent, measured)
        recalled = reload_state(models[0], rest.recall) if rest.recall else 0
        if found:
            set_budget(both, *rest.budgets)
    strategy.spent = replace(rest.spent, recalled=recalled)


def _at_a_time(strategy: Setup) -> float:
    """Return the number of microbatches whose activations this rank saves at a time."""
    schedule = strategy.schedule
    if schedule is None:
        return 1.0
    name = strategy.options.pipeline_keywords.get("schedule", "1f1b")
    place = pipeline_cost(name, len(schedule.ranks), schedule.microbatches).places[strategy.groups.rank("pipeline")]
    # What is kept counts the activations of one stage each, and a microbatch has some in each stage of the rank.
    return max(1.0, place.kept / len(place.stages))


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model; for stages, the layers of the parts that the rank runs, which may have none."""
    layers: list[nn.Module] = []
    for part in model.__dict__["parts"].values() if isinstance(model, PipelineStages) else [model]:
        try:
            layers += choose_layers(part).values()
        except ValueError:  # it has no layers
            continue
    return layers


class TiedPlugin(Plugin):
    """Makes parameters that stages of several ranks use identical, and keeps them so, once they are on the device."""

    name = "tied"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Tie the parameters of `PipelineStages`; other models have none to tie."""
        several, groups = isinstance(model, nn.ModuleList), strategy.groups
        pipeline, replicas = groups["pipeline"], groups[strategy.averaged_over]
        for number, each in enumerate(model.children() if several else [model]):
            if isinstance(each, PipelineStages):
                prefix = f"{number}." if several else ""
                each.tie_(pipeline, replicas=replicas, optimizer=optimizer, prefix=prefix)
        return model


class ZeroPlugin(Plugin):
    """Data parallelism by par-zero: gradients are averaged during backward, and state is sharded by the ZeRO stage."""

    name = "zero"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Move the parameters into flat buffers."""
        options, averaged = strategy.options, strategy.averaged_over
        # All-gathers on the communicator of the reductions would wait behind them.
        gathers = strategy.private_group(averaged) if options.stage == 3 else None
        if optimizer is None:
            packed = {parameter for parameter in model.parameters() if parameter.requires_grad}
        else:
            packed = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        # A model without trained parameters needs no ZeRO below stage 3, but the same values on all ranks.
        if not packed and (options.stage < 3 or not any(True for _ in model.parameters())):
            experts = share_of_experts(model, strategy.groups)
            return sync_module_states_(model, group=strategy.groups[averaged], expert_groups=experts)
        # A rank can compute the index of any other in its data-parallel group, so `shard` need not ask the other ranks.
        index_of = partial(strategy.groups.topology.index, averaged)
        group = DataParallelGroup(strategy.groups[averaged], index_of=index_of)
        keywords = {**options.zero_keywords, "precision": strategy.zero_precision(optimizer)}
        if strategy.spent is not None and optimizer is not None:
            parts, path = strategy.spent.shares.parts, strategy.spent.budget.path
            if any(parts.values()):
                optimizer_parts, parameter_parts = (parts.get(name, 0.0) for name in ("optimizer", "parameters"))
                keywords["offload"] = Offload(optimizer=optimizer_parts, parameters=parameter_parts, path=path)
        experts = share_of_experts(model, strategy.groups)
        if experts:
            keywords = {"expert_groups": experts, **keywords}
        overlap = {"gather_group": gathers, **options.zero_policy("overlap")}
        keywords["overlap"] = {**overlap, "inflight": strategy.inflight_of(experts)}
        if _is_abstract(model):
            keywords = {"init": {"init_fn": partial(_fill, strategy), "device": strategy.device}, **keywords}
        # An optimizer such as Muon reads full matrices, which are assembled over the tensor ranks for its step.
        if strategy.groups.size("tensor") > 1 and needs_full_tensors(optimizer, options.zero_policy("update")):
            check_partial_sums(model, strategy.groups)
            keywords["update"] = {"tensor_group": strategy.groups["tensor"], **options.zero_policy("update")}
        model = shard(model, optimizer, group=group, **keywords)[0]
        if options.stage == 3:
            guard_saves_(model)
        return model


def _is_abstract(model: nn.Module) -> bool:
    """Return whether parameters of a model are on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def _zero_fills(strategy: Setup) -> bool:
    """Return whether parameters can stay on the meta device until ZeRO shards them: no plugin before needs values."""
    kinds = [type(plugin) for plugin in strategy.plugins if type(plugin) is not RecomputePlugin]  # it adds hooks only
    # Any other plugin may read or replace weights, which would have no values yet.
    follows = kinds[kinds.index(DevicePlugin) + 1 :][:2] == [TiedPlugin, ZeroPlugin]
    return follows and strategy.options.stage == 3 and strategy.schedule is None


def _fill(strategy: Setup, unit: nn.Module, prefix: str) -> None:
    """Initialize the parameters of a unit, in their final dtypes."""
    dtypes = [(parameter, parameter.dtype) for parameter in unit.parameters()]
    initialize(unit, strategy.options.seed, prefix, device=strategy.device)
    # `initialize` draws in fp32, so that values do not depend on the dtype.
    for parameter, dtype in dtypes:
        parameter.data = parameter.data.to(dtype)


class PrecisionPlugin(Plugin):
    """The precision of par-precision: casts, loss scale, clipping and skipped steps."""

    name = "precision"

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module, strategy: Setup) -> Optimizer:
        """Wrap the user's optimizer."""
        options = strategy.options
        keywords = {"replicas": strategy.groups[strategy.averaged_over], **options.precision_keywords}
        # The norm and the check for finite gradients cover all ranks: they take or skip a step together.
        given, found = mixed(model, optimizer, group=dist.group.WORLD, **keywords)
        if given is not model:
            raise ValueError(
                f"precision={options.precision_name!r}: it replaces an nn.Linear, which is this whole model; put the "
                "layer in an nn.Sequential"
            )
        return found
