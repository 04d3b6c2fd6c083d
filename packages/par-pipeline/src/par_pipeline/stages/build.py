"""Construction of this rank's stages from a list of layers, a config, or a model with a pipeline plan."""

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
    """Make the stages of a rank in a schedule, ascending. Parameters keep their names of the full model.

    This rank builds only its own `Lazy` layers and configs. Each layer is called with the output of the layer before,
    as in nn.Sequential. A stage of a Hugging Face Transformers model takes and returns the hidden states between two
    layers; the first stage takes `input_ids`, the last returns logits. If stages of several ranks use a parameter, each
    rank has a replica; `Shared` keeps the replicas identical.

    Args:
        layers: Layers in order, an nn.Sequential, or a Hugging Face Transformers model, which may be on the meta
            device.
        schedule: Schedule with the stages of each rank.
        rank: This rank, within the pipeline.
        method: Method to partition layers: "uniform", "parameter", "time", or a weight for each; see `partition`.
            Default: "uniform".
        sample: Input of the first layer, for "time".
        seed: Seed for random weights, which then depend only on the index of their layer and not on the rank. None:
            torch's generator in its present state.
        types: Names for the "type" in a config, in addition to the names in torch.nn.

    Raises:
        ValueError: There are more stages than layers, or the type in a config is unknown.
        TypeError: An item is not a layer, or cannot be built.
    """
    own = schedule.stage_of(rank)
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
        cuts = partition(layers_of(layers), schedule.stages, method, sample=sample)
        return cut(layers, [cuts[stage] for stage in own], len(cuts[0]))
    if isinstance(layers, nn.Module):
        # `named_children` skips a module that occurs a second time.
        named = list(children_of(layers).items())
    else:
        named = [(str(position), layer) for position, layer in enumerate(layers)]
    described = [(name, _described(layer, name, types or {})) for name, layer in named]
    cuts = partition([layer for _, layer in described], schedule.stages, method, sample=sample)
    return [_stage(described, cuts[stage], seed) for stage in own]


def _described(layer: Any, name: str, types: Mapping[str, type[nn.Module]]) -> nn.Module | Lazy:
    """Return a layer, in any of its accepted forms, as a module or as a `Lazy`."""
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
    """Build the layers of one stage, in an nn.Sequential with the layers' own names."""
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
    """Seed the random numbers for one layer inside the context; restore the generators of CPU and device after it."""
    if seed is None:
        yield
        return
    # A hash makes the seeds of neighbouring layers independent; a sum of seed and position would repeat them.
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    # By default this would initialize every device of the machine, and warn.
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        yield
