"""Cutting parameters that exist: the record of one that is cut along any dim, and this rank's part of its numbers."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import Box, Sharding, Topology, set_sharding, whole

from ..layers.parameter import Rows
from ..modes.grid import Axes, Grid, stand_ins


class PlannedGrid(Grid):
    """The place of any rank of a topology, without live groups.

    Args:
        topology: The topology.
        rank: The global rank.
        view: "experts", or None for the topology's own axes.
    """

    def __init__(self, topology: Topology, rank: int, view: str | None = None) -> None:
        super().__init__(None, view)
        self._topology, self._rank = topology, rank
        self._stands_for = stand_ins(topology, view)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._topology, self._rank, self.view)

    def seen_as(self, view: str | None) -> "PlannedGrid":
        """The place of the same rank on the axes of a view, or of the topology itself."""
        return type(self)(self._topology, self._rank, view)

    @property
    def topology(self) -> Topology:
        """The topology."""
        return self._topology

    def size(self, axes: Axes) -> int:
        """The number of ranks over these axes; 1 for none."""
        axes = self.known(axes)
        return self._topology.size(axes) if axes else 1

    def rank_on(self, axis: str) -> int:
        """The rank's coordinate on one axis."""
        return self._topology.index(axis, self._rank)

    def _copies(self, cut_by: Axes) -> tuple[int, ...]:
        return self._topology.group(self._same(cut_by), self._rank)


@dataclass(frozen=True)
class ParameterShard:
    """What a rank has of a parameter.

    Args:
        sharding: The record.
        shape: The shape of the local tensor, its padding included.
    """

    sharding: Sharding
    shape: tuple[int, ...]


def part_along(shape: Sequence[int], dim: int, rows: Sequence[Rows], grid: Grid, sum_over: Axes = ()) -> ParameterShard:
    """The part of a parameter that is cut along one dim, in runs that are each cut by themselves.

    Args:
        shape: The shape of the whole parameter.
        dim: The dim that is cut.
        rows: The runs of that dim, in order.
        grid: This rank's place.
        sum_over: The axes over which the gradient is partial after backward; those of size 1 are left out.
    """
    dim %= len(shape)
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
    """The part of a parameter that is whole on every rank.

    Args:
        shape: The shape of the parameter.
        grid: This rank's place.
        sum_over: The axes over which the gradient is partial after backward; those of size 1 are left out.
    """
    record = whole(shape, grid.copies(()))
    boxes = tuple(replace(box, sum_over=grid.larger(sum_over)) for box in record.boxes)
    return ParameterShard(Sharding(record.shape, boxes), tuple(shape))


@torch.no_grad()
def make_alike_(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Gives every rank of a group the weights and saved buffers of the first one, before the model is cut.

    Models that were drawn in each process, or in which one rank alone has read a file, would otherwise be put together
    of parts of different models, and parameters that stay whole would be different copies. One broadcast a tensor.

    Args:
        model: The whole model, of the same shapes on every rank; tensors on the meta device are left out.
        group: The ranks.
        device: Where the group's backend sends from.
    """
    tensors: dict[int, Tensor] = {id(each): each for each in model.parameters()}
    for module in model.modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        tensors.update({id(each): each for name in sorted(saved) if (each := module._buffers[name]) is not None})
    source = dist.get_global_rank(group, 0)
    for tensor in tensors.values():
        if tensor.is_meta:
            continue
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, source, group=group)
        if dist.get_rank() != source and sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


@torch.no_grad()
def keep_part_(parameter: nn.Parameter, part: ParameterShard) -> None:
    """Leaves this rank's part in a parameter, which stays the same object, and attaches the record.

    Args:
        parameter: The whole parameter; on the meta device it becomes one of the part's shape there.
        part: What this rank has of it.
    """
    if part.shape != tuple(parameter.shape):
        parameter.data = _taken(parameter.data, part)
    set_sharding(parameter, part.sharding)


def _taken(tensor: Tensor, part: ParameterShard) -> Tensor:
    """This rank's part of a tensor, in memory of its own; padding is zero."""
    if tensor.is_meta:
        return tensor.new_empty(part.shape)
    boxes = part.sharding.boxes
    if len(boxes) == 1 and boxes[0].size == part.shape:
        return tensor[boxes[0].slices].clone(memory_format=torch.contiguous_format)
    local = tensor.new_zeros(part.shape)
    for box in boxes:
        box.of(local).copy_(tensor[box.slices])
    return local


class ShardingRecords:
    """The records of a module's parameters, which a deep copy of the module gives to the copies of its parameters.

    torch copies a parameter without its attributes. Of an object in the module's `__dict__` it calls `__deepcopy__`.

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
