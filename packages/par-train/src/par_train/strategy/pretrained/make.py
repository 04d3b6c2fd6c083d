"""This rank's part of a model, from a folder that transformers writes."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from par_checkpoint import Format, load
from par_groups import together
from par_layers import Style, initialize_transformers_, parallelize
from par_layers.pretrained import (
    attend_over_,
    base_name,
    check_floating,
    check_pretrained,
    draw_adapters_,
    inject_adapters_,
    make_on_meta,
    measure_magnitudes_,
)
from par_pipeline import build_model_stages

from ..setup import Setup
from .files import PathLike, load_adapters

Plan = str | Mapping[str, str | Style]
"""The sharding plan of an existing model over tensor ranks, as `par_layers.parallelize` takes it."""


def make_part(
    strategy: Setup,
    path: PathLike,
    *,
    plan: Plan,
    dtype: str | torch.dtype,
    adapter: Any,
    attention: str | None,
    weights: bool,
) -> nn.Module:
    """Make this rank's part of a causal language model; see `Strategy.from_pretrained`. Collective."""
    groups, schedule = strategy.groups, strategy.schedule
    context, tensor_ranks = strategy.context, groups.size("tensor")
    with together("the model", None):
        if attention is not None and context.is_split:
            raise ValueError(
                f"attention is {attention!r}, but over sequence={context.ranks} the attention is that of "
                "Strategy.context; leave attention out"
            )
        if weights:
            check_floating(os.fspath(path))
        model = make_on_meta(os.fspath(path), dtype, attention)
        # The twin is never sharded: transformers draws weights module by module on full shapes.
        twin = None if weights else make_on_meta(os.fspath(path), dtype, attention)
        if adapter is not None:
            # Adapters come before sharding, so that `parallelize` shards them with their linears.
            inject_adapters_(model, adapter)
        check_pretrained(model, context, tensor_ranks=tensor_ranks, trained=False)
        attend_over_(model, context)
        if schedule is not None:  # a sharded model could not run on one rank, as finding its layers may need
            build_model_stages(model, schedule, groups.rank("pipeline"))
    if strategy.parallelizes(model, plan):
        parallelize(model, strategy.layers, plan)
    part: nn.Module = model
    if schedule is not None:
        with together("the stages", None):
            part = build_model_stages(model, schedule, groups.rank("pipeline"), strategy.sequence_ranks)
    seed, device = strategy.options.seed, strategy.device
    if adapter is not None:
        draw_adapters_(part, seed, device)
        if isinstance(adapter, str | os.PathLike):
            load_adapters(part, adapter)
    if twin is not None:
        with together("drawing weights", None):
            initialize_transformers_(part, twin, seed, device)
    elif adapter is None:
        load(path, model=part, device=device, dtype=(model.dtype, torch.float32))
    else:
        _load_base(path, part, device, (model.dtype, torch.float32))
    if adapter is not None and not isinstance(adapter, str | os.PathLike):
        with together("magnitudes of adapters", None):
            measure_magnitudes_(part)
    return part.to(device)


def _load_base(path: PathLike, part: nn.Module, device: torch.device, dtype: tuple[torch.dtype, ...]) -> None:
    """Load the weights of a model with adapters from files of the model without them.

    Raises:
        ValueError: The files lack a tensor, or have a tensor that the model lacks; on every rank.
    """
    report = load(path, model=part, strict=False, device=device, dtype=dtype, format=Format(names=base_name))
    missing = [name for name in report.missing if ".lora_" not in name]
    if missing or report.unexpected or report.mismatched:
        problems = [
            *(f"missing: {name}" for name in missing),
            *(f"not in the model: {name}" for name in report.unexpected),
            *report.mismatched,
        ]
        raise ValueError(f"{os.fspath(path)!r} does not fit its config: {'; '.join(problems[:5])}; give a whole folder")
