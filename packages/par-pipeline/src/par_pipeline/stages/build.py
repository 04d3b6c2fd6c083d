"""This rank's stages, out of a list of layers, a config, or a model that says how it may be cut."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._torch_private import children_of
from ..schedules.schedule import Schedule
from .lazy import Lazy
from .partition import partition
from .transformers import cut, layers_of

Layer = nn.Module | Lazy | Mapping[str, Any]
"""A layer, a description of one, or a config of one: dict(type="Linear", in_features=512, out_features=512)."""

Method = str | Sequence[float]


def build_stage(
    layers: nn.Module | Sequence[Layer],
    schedule: Schedule,
    rank: int,
    *,
    method: Method = "uniform",
    sample: Any = None,
    seed: int | None = None,
    types: Mapping[str, type[nn.Module]] | None = None,
) -> list[nn.Module]:
    """Makes the stages that a schedule gives a rank, ascending. Parameters keep the names they have in the whole model.

    What is written down as `Lazy` or as a config is built here alone. A layer after the other is called with what the
    one before gave, as in nn.Sequential. Of a transformers model each stage takes and gives the hidden states between
    two of its layers; the first takes `input_ids`, the last gives logits. A parameter that stages of several ranks use
    becomes one on each; `Shared` keeps them alike.

    Args:
        layers: The layers, in order; or an nn.Sequential; or a transformers model with a `_pp_plan`, which may be on
            the meta device.
        schedule: Says how many stages there are, and which this rank has.
        rank: This rank, within the pipeline.
        method: How layers are shared out: "uniform", "parameter", "time", or a weight for each; see `partition`.
        sample: For "time", an input of the first layer.
        seed: Makes random weights depend on the place of their layer alone, not on who builds it. None: torch's
            generator as it is.
        types: Further names for the "type" in a config, beside those of torch.nn.

    Raises:
        ValueError: There are more stages than layers, or a config names no known type.
        TypeError: Something is no layer, or cannot be built.
    """
    own = schedule.stage_of(rank)
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
        cuts = partition(layers_of(layers), schedule.stages, method, sample=sample)
        return cut(layers, [cuts[stage] for stage in own])
    if isinstance(layers, nn.Module):
        named = list(children_of(layers).items())  # `named_children` passes over a module that comes again
    else:
        named = [(str(position), layer) for position, layer in enumerate(layers)]
    described = [(name, _described(layer, name, types or {})) for name, layer in named]
    cuts = partition([layer for _, layer in described], schedule.stages, method, sample=sample)
    return [_stage(described, cuts[stage], seed) for stage in own]


def _described(layer: Any, name: str, types: Mapping[str, type[nn.Module]]) -> nn.Module | Lazy:
    """A layer as a module or as something that builds one, whatever way it is written down."""
    if isinstance(layer, nn.Module | Lazy):
        return layer
    if not isinstance(layer, Mapping):
        raise TypeError(f"layer {name} is a {type(layer).__name__}; give a module, a Lazy, or dict(type=..., ...)")
    config = dict(layer)
    kind = config.pop("type", None)
    if isinstance(kind, type):
        return Lazy(kind, **config)
    layer_type = types.get(str(kind)) or getattr(nn, str(kind), None)
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise ValueError(
            f"layer {name} has type {kind!r}, which is none of torch.nn's"
            + (f", and none of {', '.join(types)}" if types else "")
            + "; give the class itself, or its name in types="
        )
    return Lazy(layer_type, **config)


def _stage(named: Sequence[tuple[str, nn.Module | Lazy]], run: range, seed: int | None) -> nn.Sequential:
    """The layers of one stage; a Sequential calls its children by whatever names they have."""
    built: OrderedDict[str, nn.Module] = OrderedDict()
    for position in run:
        name, layer = named[position]
        if isinstance(layer, Lazy):
            with _seeded(seed, position):
                layer = layer.build()
        built[name] = layer
    return nn.Sequential(built)


@contextmanager
def _seeded(seed: int | None, position: int) -> Iterator[None]:
    """A context with random numbers of a layer's own; the generators of CPU and this rank's device are put back."""
    if seed is None:
        yield
        return
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    with torch.random.fork_rng(devices):  # the default wakes up every device of the machine, and warns
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        yield
