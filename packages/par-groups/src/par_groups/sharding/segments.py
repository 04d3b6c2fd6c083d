"""Sharding metadata: `sharding_of` for a tensor of one name, `segments_of` for a flat buffer, `slots_of` for state."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..attributes import SEGMENTS
from .sharding import Box, Sharding, recorded_sharding, whole

SCALARS = "par_scalars"
"""The slot of a flat tensor's state in which an optimizer's counts of steps, and the like, are each parameter's own.

It has, by name of a parameter and of a slot, what the optimizer keeps for that parameter as a whole, and is there only
where parameters of the tensor differ in it. One that it does not name has no state yet, though the tensor's slots have
zeros for it. The tensor's own count is that of some of its parameters then.
"""


def sharding_of(tensor: torch.Tensor) -> Sharding:
    """Return the sharding of a local tensor.

    The function reads the metadata of `set_sharding`, or the placements of a DTensor (the boxes index its local
    tensor). Any other tensor is unsharded, and only this rank has it.

    Raises:
        ValueError: A DTensor with a Partial placement, or a flat tensor that packs several names.
    """
    record = recorded_sharding(tensor)
    if record is not None:
        return record
    segments = SEGMENTS.of(tensor)
    if segments is not None:
        raise ValueError(f"this flat tensor packs {segments.names}; use segments_of(tensor)")
    # Asked by attribute first, so that the import is paid by those who have a DTensor.
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - only those who have one pay for the import

        from .dtensor import sharding_of_dtensor  # noqa: PLC0415

        if isinstance(tensor, DTensor):
            return sharding_of_dtensor(tensor)
    return whole(tensor.shape, (dist.get_rank() if dist.is_initialized() else 0,))


@dataclass(frozen=True)
class Segment:
    """Part of a flat buffer that belongs to one named tensor; its boxes index the buffer.

    Args:
        name: Name of the parameter in the full model.
        sharding: Global shape of the parameter, and the boxes stored in the buffer.
    """

    name: str
    sharding: Sharding


class Segments:
    """Segments of a flat buffer, in order.

    Args:
        segments: Segments in buffer order, with distinct names.
        derived: Whether the buffer is computed from the parameters with these names before every use. A checkpoint that
            contains the parameters need not contain a derived buffer. Default: False.
        apart: Whether parameters of the buffer may differ in the scalars of their state, such as a count of steps; then
            the state has a slot `SCALARS`. Default: False.

    Raises:
        ValueError: Two segments have the same name.
    """

    def __init__(self, segments: Iterable[Segment], *, derived: bool = False, apart: bool = False) -> None:
        self.derived, self.apart = derived, apart
        self._by_name: dict[str, Segment] = {}
        for segment in segments:
            if segment.name in self._by_name:
                raise ValueError(f"{segment.name!r} is packed twice; give one Segment with the boxes of both")
            self._by_name[segment.name] = segment

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Sharding:
        return self._by_name[name].sharding

    def __repr__(self) -> str:
        return f"Segments({list(self)!r}{', derived=True' * self.derived}{', apart=True' * self.apart})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segments):
            return False
        return (self.derived, self.apart) == (other.derived, other.apart) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # compared by value, never a key

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of the buffer."""
        return tuple(self._by_name)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield name, box and view of each box in a buffer.

        Args:
            flat: Buffer with the layout of these segments.
        """
        for segment in self:
            for box in segment.sharding.boxes:
                yield segment.name, box, box.of(flat)


def set_segments(tensor: torch.Tensor, segments: Segments) -> None:
    """Set the segments of a flat tensor. The metadata belongs to this tensor object: a copy or a view has none.

    Args:
        tensor: Flat tensor.
        segments: Segments; their boxes index the tensor.

    Raises:
        ValueError: A box reaches beyond the tensor, or the boxes hold more elements than it has.
    """
    for segment in segments:
        for box in segment.sharding.boxes:
            if box.last >= tensor.numel():
                raise ValueError(f"{segment.name!r}: {box} ends at {box.last}, but the tensor has {tensor.numel()}")
    elements = sum(segment.sharding.local_numel for segment in segments)
    if elements > tensor.numel():
        raise ValueError(f"the segments hold {elements} elements, but the tensor has {tensor.numel()}")
    SEGMENTS.set(tensor, segments)


def segments_of(tensor: torch.Tensor, name: str = "") -> Segments:
    """Return the segments of a tensor, or one segment with its sharding if `set_segments` was not called for it.

    Args:
        tensor: Any tensor.
        name: Name of that one segment. Default: "".
    """
    segments = SEGMENTS.of(tensor)
    return Segments([Segment(name, sharding_of(tensor))]) if segments is None else segments


def set_slots(tensor: torch.Tensor, slots: Mapping[str, torch.Tensor]) -> None:
    """Set preallocated memory, such as on a disk, for an optimizer's state of a tensor.

    Args:
        tensor: Tensor of the optimizer.
        slots: Preallocated tensor for each name of a slot, such as "exp_avg". Code that makes state in place of the
            optimizer, such as a load, uses this tensor if its shape and dtype fit.
    """
    tensor.par_slots = dict(slots)  # type: ignore[attr-defined]  # a tensor takes attributes


def slots_of(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the preallocated memory for an optimizer's state of a tensor, by name of a slot; usually empty."""
    slots: Mapping[str, torch.Tensor] = getattr(tensor, "par_slots", {})
    return slots
