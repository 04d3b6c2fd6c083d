"""Parameters and traffic of one tensor rank of a Hugging Face Transformers model, as par-layers plans them."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from torch import nn

from par_groups import Sharding, Topology
from par_layers import CommunicationVolume, communication_volumes, plan_shardings

from ...shape import ModelSlice, TensorSplit
from .structure import Structure, alone


@dataclass(frozen=True)
class LayerShard:
    """Shard of some modules on one tensor rank.

    Args:
        elements: Number of elements in their parameters.
        matrices: Number of those in matrices.
        largest: Number of elements in the largest parameter.
        tensors: Number of parameters.
        partial: Elements that are received once a step to sum partial gradients.
        axes: The sets of axes over which these are summed.
        traffic: Traffic of linear layers per token in forward and backward, in the width of matmul operands.
        stream: Traffic of the other modules, such as embeddings, in the width of activations.
        experts: Elements of each tensor of distributed experts, as if one rank had all experts.
        items: Trained and frozen elements of each module in a container outside the layers.
        frozen: Number of frozen elements.
    """

    elements: int = 0
    matrices: int = 0
    largest: int = 0
    tensors: int = 0
    partial: float = 0.0
    axes: frozenset[tuple[str, ...]] = frozenset()
    traffic: CommunicationVolume = field(default_factory=CommunicationVolume)
    stream: CommunicationVolume = field(default_factory=CommunicationVolume)
    experts: tuple[int, ...] = ()
    items: tuple[tuple[int, int], ...] = ()
    frozen: int = 0


@dataclass(frozen=True)
class RankShard:
    """Shard of a model on one tensor rank.

    Args:
        kinds: Shard of one layer, by kind of layer.
        ends: Shard of the modules outside the layers, by (has first stage, has last stage).
        table: Number of elements in its part of the embedding's table.
        loss: Traffic of the loss over sharded logits per token, in fp32.
    """

    kinds: tuple[LayerShard, ...]
    ends: Mapping[tuple[bool, bool], LayerShard]
    table: int
    loss: CommunicationVolume


def look(structure: Structure, split: TensorSplit) -> RankShard | str:
    """Return the shard of a tensor rank under a split, or why the split is impossible.

    Args:
        structure: The model.
        split: Tensor split, and placement of experts.
    """
    dealt = structure.experts if split.experts.is_dealt else frozenset()
    records: Mapping[str, Sharding] = {}
    traffic: Mapping[str, CommunicationVolume] = {}
    topology = Topology({})
    if split.ranks > 1:
        keys = {"kv_heads": dict(split.axes)["kv_head"]} if "kv_head" in dict(split.axes) else {}
        topology = alone({"mode": "1d", "sequence_parallel": split.sequence, **keys}, split.ranks, split.experts)
        try:
            records, traffic = (
                plan_shardings(structure.sampled, topology),
                communication_volumes(structure.sampled, topology, 1),
            )
        except (TypeError, ValueError) as error:
            return str(error)
    # Those of the first rank, which has no padding and so the largest shard.
    shapes = {name: [box.size for box in record.boxes] for name, record in records.items()}
    shapes = shapes or {name: [tuple(parameter.shape)] for name, parameter in structure.parameters.items()}

    kinds = (nn.Linear, import_module("transformers.pytorch_utils").Conv1D)
    linears = {name for name, module in structure.sampled.named_modules() if isinstance(module, kinds)}

    def share(names: Collection[str], modules: tuple[str, ...]) -> LayerShard:
        every = {name: sum(map(math.prod, shapes[name])) for name in names}
        sizes = {name: size for name, size in every.items() if name not in dealt}
        own = [name for name in traffic if any(name == each or name.startswith(f"{each}.") for each in modules)]
        partial = [
            (box.sum_over, 2 * (1 - 1 / topology.size(box.sum_over)) * math.prod(box.size))
            for name in names
            if name in records
            for box in records[name].boxes
            if box.sum_over
        ]
        frozen = {name: size for name, size in sizes.items() if not structure.parameters[name].requires_grad}
        items: dict[str, tuple[int, int]] = {}
        for name, item in structure.items.items():  # in the model's order
            if name in sizes:
                trained, fixed = items.get(item, (0, 0))
                own_frozen = frozen.get(name, 0)
                items[item] = (trained + sizes[name] - own_frozen, fixed + own_frozen)
        return LayerShard(
            elements=sum(sizes.values()),
            matrices=sum(size for name, size in sizes.items() if structure.parameters[name].dim() > 1),
            largest=max(sizes.values(), default=0),
            tensors=len(sizes),
            partial=sum(elements for _, elements in partial),
            axes=frozenset(axes for axes, _ in partial),
            traffic=sum((traffic[name] for name in own if name in linears), CommunicationVolume()),
            stream=sum((traffic[name] for name in own if name not in linears), CommunicationVolume()),
            experts=tuple(size for name, size in every.items() if name in dealt),
            items=tuple(items.values()),
            frozen=sum(frozen.values()),
        )

    outside = frozenset(name for name in structure.parameters if not name.startswith(f"{structure.layers}."))
    of_stages = (
        structure.ends if isinstance(structure.ends, dict) else dict.fromkeys(("first", "middle", "last"), outside)
    )
    embedding, head = structure.table.rpartition(".")[0], (() if structure.head is None else (structure.head,))
    return RankShard(
        kinds=tuple(
            share(names, (f"{structure.layers}.{number}",))
            for number, names in zip(structure.samples, structure.of_samples, strict=True)
        ),
        ends={
            (False, False): share(of_stages["middle"], ()),
            (True, False): share(of_stages["first"], (embedding,)),
            (False, True): share(of_stages["last"], head),
            (True, True): share(outside, (embedding, *head)),
        },
        table=sum(map(math.prod, shapes[structure.table])),
        loss=traffic.get("", CommunicationVolume()),
    )


def in_runs(part: ModelSlice, shares: tuple[LayerShard, ...]) -> list[tuple[LayerShard, int]]:
    """Return the shards of all layers of a rank, with the number of layers of each."""
    return [(shares[kind], times) for run in part.runs for kind, times in run]
