"""The built-in plugins, in the order in which they are applied: pipeline, device, tied, zero, precision."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_layers import initialize
from par_precision import mixed, precision_of
from par_zero import shard

from .plugin import Plugin
from .setup import Setup
from .stages import Stages, build_stages, leave_foreign_


class Pipelined(Plugin):
    """Keeps this rank's stages of a model, and takes the others' parameters out of its optimizer."""

    name = "pipeline"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """An nn.Sequential is cut; `Stages` are cut already."""
        if strategy.schedule is None:
            return model
        several = isinstance(model, nn.ModuleList)
        cut = [_cut(each, strategy) for each in (model.children() if several else [model])]
        model = nn.ModuleList(cut) if several else cut[0]
        if optimizer is not None:
            leave_foreign_(optimizer, model)
        return model


class Device(Plugin):
    """Brings what this rank has to the device, and batches. par-layers' layers get their memory and values there."""

    name = "device"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Parameters stay the objects that they are."""
        del optimizer
        if any(parameter.is_meta for parameter in model.parameters()):
            initialize(model, strategy.options.seed, device=strategy.device)
        _check_cut(model, strategy)
        return model.to(strategy.device)

    def setup_dataloader(self, dataloader: Any, strategy: Setup) -> Any:
        """It gives batches on the device."""
        dataloader.device = strategy.device
        return dataloader


class Tied(Plugin):
    """Makes alike, and keeps so, the parameters that stages of several ranks use, once they lie where they stay."""

    name = "tied"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Modules that are not `Stages` have none."""
        several = isinstance(model, nn.ModuleList)
        for number, each in enumerate(model.children() if several else [model]):
            if isinstance(each, Stages):
                each.tie_(strategy.groups, optimizer, f"{number}." if several else "")
        return model


class Zero(Plugin):
    """Data parallelism: gradients are averaged during backward, and nothing is kept twice that need not be."""

    name = "zero"

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """The parameters come to lie in flat buffers."""
        options = strategy.options
        packed = _trained(model, optimizer)
        if not packed and (options.stage < 3 or not any(True for _ in model.parameters())):
            return model
        precision = precision_of(options.precision)
        dtype = None if optimizer is None else precision.weights
        if dtype is not None:
            _cast_(model, dtype, set() if precision.rounded else packed)
            dtype = None if precision.rounded else dtype
        group = strategy.groups["data"]
        return shard(model, optimizer, group=group, **{"param_dtype": dtype, **options.zero_keywords})[0]


class Precision(Plugin):
    """Casts, loss scale, clipping and skipped steps."""

    name = "precision"

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module, strategy: Setup) -> Optimizer:
        """The one that goes on wraps the user's."""
        options = strategy.options
        given, found = mixed(
            model,
            optimizer,
            options.precision,
            group=dist.group.WORLD,
            **{"replicas": strategy.groups["data"], "clip_norm": options.clip_norm, **options.mixed},
        )
        if given is not model:
            raise ValueError(f"under {options.precision!r} an nn.Linear alone is replaced; put it in an nn.Sequential")
        return found


def _cut(model: nn.Module, strategy: Setup) -> Stages:
    if isinstance(model, Stages):
        return model
    if not isinstance(model, nn.Sequential) or strategy.schedule is None:
        raise ValueError(
            f"a {type(model).__name__} cannot be cut into pipeline stages; give an nn.Sequential, what "
            "Strategy.build(layers) makes of a list of layers, or par_train.Stages of your own"
        )
    return build_stages(model, strategy.schedule, strategy.groups.rank("pipeline"))


def _trained(model: nn.Module, optimizer: Optimizer | None) -> set[nn.Parameter]:
    """The parameters that are packed below stage 3."""
    if optimizer is None:
        return {parameter for parameter in model.parameters() if parameter.requires_grad}
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _cast_(model: nn.Module, dtype: torch.dtype, trained: set[nn.Parameter]) -> None:
    """Casts what par-zero does not, which is what is not trained, and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor not in trained and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _check_cut(model: nn.Module, strategy: Setup) -> None:
    """Ranks of a tensor group must not each count a parameter that nobody has told them is cut, or a copy."""
    ranks = strategy.groups.size("tensor")
    for name, parameter in model.named_parameters():
        if ranks > 1 and not hasattr(parameter, "par_sharding"):
            raise ValueError(
                f"{name!r} says nothing of the {ranks} ranks of its tensor group; make its layer with Strategy.layers, "
                "or say how it is cut with par_groups.set_sharding"
            )
