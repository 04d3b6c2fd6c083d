"""Sharding of existing parameters: the sharding metadata along any dim, and this rank's shard of the values."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import Box, Sharding, Topology, packed_scales, set_sharding, whole

from ..layers.parameter import Rows
from ..modes.grid import Axes, Grid, stand_ins


class PlannedGrid(Grid):
    """Coordinates of any rank of a topology, without live groups.

    Args:
        topology: The topology.
        rank: Global rank.
        view: "experts", or None for the topology's own axes.
    """

    def __init__(self, topology: Topology, rank: int, view: str | None = None) -> None:
        super().__init__(None, view)
        self._topology, self._rank = topology, rank
        self._stands_for = stand_ins(topology, view)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._topology, self._rank, self.view)

    def seen_as(self, view: str | None) -> "PlannedGrid":
        """Return the coordinates of the same rank on the axes of a view; None is the topology itself."""
        return type(self)(self._topology, self._rank, view)

    @property
    def topology(self) -> Topology:
        """The topology."""
        return self._topology

    def size(self, axes: Axes) -> int:
        """Return the number of ranks over these axes; 1 for no axis."""
        axes = self.known(axes)
        return self._topology.size(axes) if axes else 1

    def rank_on(self, axis: str) -> int:
        """Return the rank's coordinate on one axis."""
        return self._topology.index(axis, self._rank)

    def _copies(self, cut_by: Axes) -> tuple[int, ...]:
        return self._topology.group(self._same(cut_by), self._rank)


@dataclass(frozen=True)
class ParameterShard:
    """One rank's shard of a parameter.

    Args:
        sharding: Sharding metadata.
        shape: Shape of the local tensor, including padding.
    """

    sharding: Sharding
    shape: tuple[int, ...]


def part_along(shape: Sequence[int], dim: int, rows: Sequence[Rows], grid: Grid, sum_over: Axes = ()) -> ParameterShard:
    """Return this rank's shard of a parameter along one dim, whose runs of rows are sharded separately.

    Args:
        shape: Shape of the full parameter.
        dim: Sharded dim.
        rows: Consecutive runs of that dim.
        grid: This rank's coordinates.
        sum_over: Axes over which the gradient is partial after backward. Axes of size 1 are ignored.
    """
    dim %= len(shape)
    # Each run is split by itself, so that a rank has a part of every block of a fused weight.
    counts = [(run.padded or run.length) // grid.size(run.axes) for run in rows]
    local_shape = (*shape[:dim], sum(counts), *shape[dim + 1 :])
    stride = tuple(math.prod(local_shape[after + 1 :]) for after in range(len(shape)))
    boxes, first, local = [], 0, 0  # where the run begins in the whole and in the local tensor
    for run, count in zip(rows, counts, strict=True):
        start = grid.index(run.axes) * count
        real = min(count, run.length - start)  # less than count where the rest is padding
        if real > 0:
            corner = tuple(first + start if axis == dim else 0 for axis in range(len(shape)))
            size = (*shape[:dim], real, *shape[dim + 1 :])
            over = grid.larger(sum_over + run.sum_over)
            boxes.append(Box(corner, size, local * stride[dim], stride, grid.copies(run.axes), over))
        first, local = first + run.length, local + count
    return ParameterShard(Sharding(tuple(shape), tuple(boxes)), local_shape)


def part_whole(shape: Sequence[int], grid: Grid, sum_over: Axes = ()) -> ParameterShard:
    """Return the shard of a replicated parameter, which is the full parameter.

    Args:
        shape: Shape of the parameter.
        grid: This rank's coordinates.
        sum_over: Axes over which the gradient is partial after backward. Axes of size 1 are ignored.
    """
    record = whole(shape, grid.copies(()))
    boxes = tuple(replace(box, sum_over=grid.larger(sum_over)) for box in record.boxes)
    return ParameterShard(Sharding(record.shape, boxes), tuple(shape))


@torch.no_grad()
def make_alike_(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast the weights and saved buffers of a group's first rank, before the model is sharded.

    Args:
        model: The unsharded model, with the same shapes on every rank. Tensors on the meta device are skipped.
        group: The tensor-parallel ranks. Each tensor is one broadcast.
        device: Device that the group's backend sends from.
    """
    # Ranks may hold different values, because each process initialized its own model or only one rank read a file.
    # The shards would then belong to different models, and replicated parameters would differ between ranks.
    tensors: dict[int, Tensor] = {id(each): each for each in model.parameters()}
    for module in model.modules():
        # Sorted below, because a set has another order in each process, and the ranks' broadcasts must match.
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        tensors.update({id(each): each for name in sorted(saved) if (each := module._buffers[name]) is not None})
    tensors.update({id(each): each for each in packed_scales(model.named_parameters()).values()})
    source = dist.get_global_rank(group, 0)
    for tensor in tensors.values():
        if tensor.is_meta:
            continue
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, source, group=group)
        # If `sent` is the tensor's own memory, the broadcast has already written it.
        if dist.get_rank() != source and sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


@torch.no_grad()
def keep_part_(parameter: nn.Parameter, part: ParameterShard) -> None:
    """Replace a parameter's data by this rank's shard, and attach the sharding metadata. The parameter object stays.

    Args:
        parameter: The full parameter. A parameter on the meta device stays there and gets the shard's shape.
        part: This rank's shard.
    """
    if is_packed_4bit(parameter) and part.sharding.shape != tuple(parameter.shape):
        _keep_blocks_(parameter, part)
    elif part.shape != tuple(parameter.shape):
        parameter.data = _taken(parameter.data, part)
    set_sharding(parameter, part.sharding)


def _taken(tensor: Tensor, part: ParameterShard) -> Tensor:
    """Return this rank's shard of a tensor in its own memory, so that the full tensor is freed; padding is zero."""
    if tensor.is_meta:
        return tensor.new_empty(part.shape)
    boxes = part.sharding.boxes
    if len(boxes) == 1 and boxes[0].size == part.shape:
        return tensor[boxes[0].slices].clone(memory_format=torch.contiguous_format)
    local = tensor.new_zeros(part.shape)
    for box in boxes:
        box.of(local).copy_(tensor[box.slices])
    return local


def is_packed_4bit(weight: Any) -> bool:
    """Return whether bitsandbytes has packed a weight into codes of 4 bits, with a scale for each block of them."""
    state = getattr(weight, "quant_state", None)
    return state is not None and getattr(state, "quant_type", None) in ("nf4", "fp4")


def shape_of_codes(weight: Any, block: int, name: str) -> tuple[int, int]:
    """Return [out, in / n], the shape of packed codes as a matrix whose elements each hold n weights of one row.

    Args:
        weight: Packed weight [elements, 1]. bitsandbytes packs a matrix [out, in] row by row.
        block: Consecutive weights of a row that stay on one rank: all of them, or those of a tensor rank.
        name: Name of the parameter, for the message.

    Raises:
        TypeError: bitsandbytes has packed the weight again, for inference on a CPU.
        ValueError: The weights are not a whole number of blocks.
    """
    state = weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        raise TypeError(
            f"{name!r} has the layout that bitsandbytes uses for inference on a CPU, whose scales are rounded; load "
            "the model again, and shard it before its first forward in eval mode"
        )
    out, inner = state.shape
    if block % state.blocksize:
        raise ValueError(
            f"a rank would have {block} of the {inner} weights in a row, and bitsandbytes packs them in blocks of "
            f"{state.blocksize}, which must stay whole; use fewer tensor ranks, or do not quantize this layer "
            "(llm_int8_skip_modules)"
        )
    return out, inner * weight.numel() // (out * inner)


def _keep_blocks_(weight: Any, part: ParameterShard) -> None:
    """Replace packed codes by this rank's blocks [rows, columns], and the scales by those of the blocks.

    Scales that are packed again (double quantization) become fp32 first, by the arithmetic that bitsandbytes does in
    each forward. Their own blocks cover several rows of the weight, and a shard's rows need not begin with one.
    """
    state = copy.copy(weight.quant_state)
    if state.state2 is not None:
        functional = import_module("bitsandbytes.functional")
        state.absmax = functional.dequantize_blockwise(state.absmax, state.state2).add_(state.offset).float()
        state.offset, state.state2, state.nested = None, None, False
    out, columns = part.sharding.shape
    scales = state.absmax.view(out, -1)
    each = columns // scales.shape[1]  # elements of codes with one scale
    boxes = tuple(
        replace(
            box,
            start=(box.start[0], box.start[1] // each),
            size=(box.size[0], box.size[1] // each),
            offset=box.offset // each,
            stride=(box.stride[0] // each, 1),
        )
        for box in part.sharding.boxes
    )
    rows, width = part.shape
    state.absmax = _taken(scales, ParameterShard(Sharding(tuple(scales.shape), boxes), (rows, width // each))).view(-1)
    state.shape = torch.Size((rows, width * state.shape[1] // columns))
    weight.data = _taken(weight.data.view(out, columns), part)
    weight.quant_state = state


class ShardingRecords:
    """Sharding metadata of a module's parameters, for deep copies of the module.

    torch copies a parameter without its attributes, but it calls `__deepcopy__` of each object in the module's
    `__dict__`. This object is such an attribute: its copy attaches the metadata to the copied parameters.

    Args:
        parameters: The module's own dict of parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        self.parameters = parameters
        self.shardings: dict[str, Sharding] = {
            name: parameter.par_sharding  # type: ignore[attr-defined]  # which was attached before
            for name, parameter in parameters.items()
            if parameter is not None
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = self.__class__.__new__(self.__class__)
        made.parameters = copy.deepcopy(self.parameters, memo)  # the dict that the copied module has
        made.shardings = dict(self.shardings)
        for name, sharding in made.shardings.items():
            parameter = made.parameters.get(name)
            if parameter is not None:
                set_sharding(parameter, sharding)
        return made
