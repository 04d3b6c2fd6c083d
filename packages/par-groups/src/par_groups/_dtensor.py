"""DTensor at the edge: reading its placements as boxes, and making one from boxes."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ._sharding import Box, Sharding, recorded_sharding, row_major

Span = tuple[int, int]
"""First global index and length of a run of indices on one dim."""


def sharding_of_dtensor(tensor: DTensor) -> Sharding:
    """The boxes of a DTensor's local tensor.

    Raises:
        ValueError: A Partial placement: the local values are terms of a sum, no part of the tensor.
    """
    return sharding_of_placements(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def sharding_of_placements(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> Sharding:
    """This rank's boxes of a tensor of that shape, laid out over a mesh.

    Shards are applied mesh dim by mesh dim, left to right, each with torch.chunk's sizes; on every tensor dim a list of
    index spans is left, and the boxes are their products.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Sharding(shape, ())
    spans: list[list[Span]] = [[(0, length)] for length in shape]
    for mesh_dim, placement in enumerate(placements):
        parts, index = mesh.size(mesh_dim), coordinate[mesh_dim]
        if isinstance(placement, _StridedShard):
            dim = placement.dim % len(shape)
            spans[dim] = _strided_chunk(spans[dim], int(placement.split_factor), parts, index)
        elif isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            spans[dim] = _chunk(spans[dim], parts, index)
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"placement {placement} on mesh dim {mesh_dim} holds terms of a sum, not a part of the tensor; "
                "redistribute the DTensor to Shard or Replicate first"
            )
    return Sharding(shape, tuple(_boxes(spans, _copies(mesh, placements, coordinate))))


def to_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> DTensor:
    """A DTensor that shares memory with a local tensor of ours.

    Args:
        tensor: A local tensor with a `Sharding` on it.
        mesh: The mesh, such as `groups.mesh(("data", "tensor"))`.
        placements: One a mesh dim. None finds those that put the same boxes on this rank; size-1 mesh dims count as
            replicated, so every rank finds the same.

    Raises:
        ValueError: The tensor has no record, or no placements on this mesh describe it (a fused q|k|v is three boxes,
            which no DTensor can say).
    """
    record = recorded_sharding(tensor)
    if record is None:
        raise ValueError("the tensor has no Sharding on it; call set_sharding first, or DTensor.from_local yourself")
    wanted = _geometry(record)
    candidates = [tuple(placements)] if placements is not None else _candidates(mesh, len(record.shape))
    for candidate in candidates:
        if _geometry(sharding_of_placements(record.shape, mesh, candidate)) != wanted:
            continue
        if math.prod(tensor.shape) == 0 and not _empty_fits(tensor, mesh, candidate):
            continue
        stride = row_major(record.shape)
        size = torch.Size(record.shape)
        return DTensor.from_local(tensor, mesh, candidate, run_check=False, shape=size, stride=stride)
    raise ValueError(
        f"no placements over mesh {mesh.mesh_dim_names} {tuple(mesh.shape)} put the boxes {record.boxes} of shape "
        f"{record.shape} on this rank; use the record itself, or gather the tensor"
    )


def _chunk(spans: list[Span], parts: int, index: int) -> list[Span]:
    """The index-th of `parts` chunks of a list of spans, as torch.chunk cuts: equal but for the last ones."""
    total = sum(length for _, length in spans)
    each = -(-total // parts)
    return _take(spans, min(index * each, total), min((index + 1) * each, total))


def _strided_chunk(spans: list[Span], split_factor: int, parts: int, index: int) -> list[Span]:
    """FSDP over a dim that tensor parallelism cuts later: the same chunk of each of `split_factor` pieces."""
    pieces = (_chunk(spans, split_factor, piece) for piece in range(split_factor))
    return _joined(span for piece in pieces for span in _chunk(piece, parts, index))


def _take(spans: list[Span], start: int, stop: int) -> list[Span]:
    """Positions start .. stop - 1 of the indices that the spans list."""
    taken, position = [], 0
    for first, length in spans:
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            taken.append((first + low, high - low))
        position += length
    return taken


def _joined(spans: Iterator[Span]) -> list[Span]:
    joined: list[Span] = []
    for first, length in spans:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((first, length))
    return joined


def _boxes(spans: list[list[Span]], copies: tuple[int, ...]) -> Iterator[Box]:
    """The products of the spans, each with its place in the contiguous local tensor."""
    stride = row_major([sum(length for _, length in each) for each in spans])
    placed = [_with_positions(each) for each in spans]
    for corner in itertools.product(*placed):
        start = tuple(first for _, first, _ in corner)
        size = tuple(length for _, _, length in corner)
        offset = sum(position * step for (position, _, _), step in zip(corner, stride, strict=True))
        if all(size):
            yield Box(start, size, offset, stride, copies)


def _with_positions(spans: list[Span]) -> list[tuple[int, int, int]]:
    positions = itertools.accumulate((length for _, length in spans), initial=0)
    return [(position, first, length) for position, (first, length) in zip(positions, spans, strict=False)]


def _copies(mesh: DeviceMesh, placements: Sequence[Placement], coordinate: Sequence[int]) -> tuple[int, ...]:
    """The ranks that differ from this one in replicated mesh dims alone."""
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else position
        for placement, position in zip(placements, coordinate, strict=True)
    )
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def _candidates(mesh: DeviceMesh, dims: int) -> Iterator[tuple[Placement, ...]]:
    """Every way to place a tensor, replicated where a mesh dim has size 1."""
    every: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    yield from itertools.product(*(every if mesh.size(dim) > 1 else every[:1] for dim in range(mesh.ndim)))


def _geometry(sharding: Sharding) -> tuple[object, ...]:
    """What makes two shardings the same for a DTensor: boxes and where they lie, whatever is summed later."""
    return sharding.shape, *(
        (box.start, box.size, box.offset, _steps(box), tuple(box.copies)) for box in sharding.boxes
    )


def _steps(box: Box) -> tuple[int, ...]:
    return tuple(step for step, size in zip(box.stride, box.size, strict=True) if size > 1)


def _empty_fits(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Whether an empty local tensor is empty on the dims on which these placements leave nothing."""
    sizes = list(tensor.shape)
    return any(
        isinstance(each, Shard) and mesh.size(dim) > 1 and sizes[each.dim] == 0 for dim, each in enumerate(placements)
    )
