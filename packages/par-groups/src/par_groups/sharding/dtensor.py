"""DTensor at the edge: reading its placements as boxes, and making one from boxes."""

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch_private import split_factor
from .sharding import Box, Shape, Sharding, recorded_sharding, row_major

Span = tuple[int, int]
"""First global index and length of a run of indices on one dim."""


def sharding_of_dtensor(tensor: DTensor) -> Sharding:
    """Return the boxes of a DTensor's local tensor.

    Raises:
        ValueError: A Partial placement: the local values are terms of a sum, no part of the tensor.
    """
    return sharding_of_placements(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def sharding_of_placements(shape: Shape, mesh: DeviceMesh, placements: Sequence[Placement]) -> Sharding:
    """Return this rank's boxes of a tensor of that shape over a mesh; no boxes if the rank is not in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Sharding(shape, ())
    spans = _spans(shape, mesh, placements)
    return Sharding(shape, tuple(_boxes(spans, _copies(mesh, placements, coordinate))))


def to_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> DTensor:
    """Return a DTensor that shares memory with a local tensor. Communication: one small all-reduce per mesh dim.

    Args:
        tensor: Local tensor with sharding metadata from `set_sharding`.
        mesh: Mesh, such as `groups.mesh(("data", "tensor"))`.
        placements: Placement on each mesh dim. Default: the first placements that match the sharding metadata of every
            rank of the mesh.

    Raises:
        ValueError: The tensor has no record, or no placements on this mesh describe it (a fused q|k|v is three boxes,
            which no DTensor can say). Every rank raises.
    """
    record = recorded_sharding(tensor)
    candidates = list(_candidates(mesh, tensor.dim())) if placements is None else [tuple(placements)]
    # Errors come after this collective call: a rank without metadata that raised before would leave the others waiting.
    chosen = _common_placements(tensor, record, mesh, candidates)
    if record is None:
        shape = tuple(tensor.shape)
        raise ValueError(
            f"a tensor of shape {shape} has no Sharding on it; call set_sharding first, or DTensor.from_local yourself"
        )
    if chosen is None:
        which = "no placements give" if placements is None else f"placements {tuple(placements)} do not give"
        raise ValueError(
            f"{which} every rank of mesh {mesh.mesh_dim_names} {tuple(mesh.shape)} its boxes of a tensor of shape "
            f"{record.shape}, here {record.boxes}; use the record itself, or gather the tensor"
        )
    size, stride = torch.Size(record.shape), row_major(record.shape)
    return DTensor.from_local(tensor, mesh, chosen, run_check=False, shape=size, stride=stride)


def _common_placements(
    tensor: torch.Tensor, record: Sharding | None, mesh: DeviceMesh, candidates: Sequence[tuple[Placement, ...]]
) -> tuple[Placement, ...] | None:
    """Return the first placements that describe the tensor on every rank of the mesh. Collective over the mesh."""
    fits_here = [record is not None and _fits(tensor, record, mesh, placements) for placements in candidates]
    # All candidates are compared at once: one all-reduce for each mesh dim, however many candidates there are.
    fits = torch.tensor(fits_here, dtype=torch.int32, device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=mesh.get_group(dim))  # dim by dim, so over all of the mesh
    return next((placements for placements, fit in zip(candidates, fits.tolist(), strict=True) if fit), None)


def _fits(tensor: torch.Tensor, record: Sharding, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Return whether these placements give this rank exactly the boxes of the record, in a tensor of this shape."""
    spans = _spans(record.shape, mesh, placements)
    if tuple(sum(length for _, length in along_dim) for along_dim in spans) != tuple(tensor.shape):
        return False
    return _geometry(sharding_of_placements(record.shape, mesh, placements)) == _geometry(record)


def _spans(shape: Shape, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[list[Span]]:
    """Return the global indices on each dim that this rank holds.

    Shards are applied mesh dim by mesh dim, left to right, each with torch.chunk's sizes.
    """
    coordinate = mesh.get_coordinate() or ()
    spans: list[list[Span]] = [[(0, length)] for length in shape]
    for mesh_dim, (placement, index) in enumerate(zip(placements, coordinate, strict=True)):
        parts, pieces = mesh.size(mesh_dim), split_factor(placement)
        if pieces is not None:
            dim = placement.dim % len(shape)  # type: ignore[attr-defined]  # a strided shard has one
            # FSDP over a dim that tensor parallelism shards later: the same chunk of each of the later shards.
            later = [_chunk(spans[dim], pieces, piece) for piece in range(pieces)]
            spans[dim] = _joined(span for piece in later for span in _chunk(piece, parts, index))
        elif isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            spans[dim] = _chunk(spans[dim], parts, index)
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"placement {placement} on mesh dim {mesh_dim} holds terms of a sum, not a part of the tensor; "
                "redistribute the DTensor to Shard or Replicate first"
            )
    return spans


def _chunk(spans: list[Span], parts: int, index: int) -> list[Span]:
    """Return the index-th of `parts` chunks of a list of spans, with the sizes of torch.chunk."""
    total = sum(length for _, length in spans)
    # torch.chunk rounds the size up, so the last chunks may be smaller, or empty.
    share = -(-total // parts)
    return _take(spans, min(index * share, total), min((index + 1) * share, total))


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
        # Spans that meet become one, because `_fits` compares boxes: equal indices must have equal boxes.
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((first, length))
    return joined


def _boxes(spans: list[list[Span]], copies: tuple[int, ...]) -> Iterator[Box]:
    """Yield the products of the spans, each with its offset in the contiguous local tensor."""
    stride = row_major([sum(length for _, length in along_dim) for along_dim in spans])
    placed = [_with_positions(along_dim) for along_dim in spans]
    for corner in itertools.product(*placed):
        start = tuple(first for _, first, _ in corner)
        size = tuple(length for _, _, length in corner)
        offset = sum(position * step for (position, _, _), step in zip(corner, stride, strict=True))
        # A chunk may be empty, and a box may not.
        if all(size):
            yield Box(start, size, offset, stride, copies)


def _with_positions(spans: list[Span]) -> list[tuple[int, int, int]]:
    positions = itertools.accumulate((length for _, length in spans), initial=0)
    return [(position, first, length) for position, (first, length) in zip(positions, spans, strict=False)]


def _copies(mesh: DeviceMesh, placements: Sequence[Placement], coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that differ from this rank only in replicated mesh dims."""
    # `mesh.mesh` takes half a millisecond, and a model has hundreds of DTensors.
    if not any(isinstance(placement, Replicate) for placement in placements):
        return (mesh.get_rank(),)
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else position
        for placement, position in zip(placements, coordinate, strict=True)
    )
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def _candidates(mesh: DeviceMesh, dims: int) -> Iterator[tuple[Placement, ...]]:
    """Yield every combination of placements, with `Replicate` on mesh dims of size 1."""
    # On a mesh dim of size 1 all placements mean the same. Elsewhere the number of candidates grows exponentially with
    # the mesh dims.
    every: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    yield from itertools.product(*(every if mesh.size(dim) > 1 else every[:1] for dim in range(mesh.ndim)))


def _geometry(sharding: Sharding) -> tuple[object, ...]:
    """Return what a DTensor can express of a sharding: shape, boxes and their positions in memory."""
    # No element depends on the stride of a dim of size 1, so records may have different ones.
    steps = [tuple(step for step, size in zip(box.stride, box.size, strict=True) if size > 1) for box in sharding.boxes]
    boxes = zip(sharding.boxes, steps, strict=True)
    return sharding.shape, *((box.start, box.size, box.offset, step, tuple(box.copies)) for box, step in boxes)
