"""What a tensor is a part of, `sharding_of` for one name and `segments_of` for a flat buffer; where its state goes."""

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
    """How a local tensor is cut out of its global one.

    Reads our record; understands DTensor (its boxes point into the local tensor); else the tensor is whole, and this
    rank's own.

    Raises:
        ValueError: A DTensor with a Partial placement, or a flat tensor that packs several names.
    """
    record = recorded_sharding(tensor)
    if record is not None:
        return record
    segments = SEGMENTS.of(tensor)
    if segments is not None:
        raise ValueError(f"this flat tensor packs {segments.names}; use segments_of(tensor)")
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - only those who have one pay for the import

        from .dtensor import sharding_of_dtensor  # noqa: PLC0415

        if isinstance(tensor, DTensor):
            return sharding_of_dtensor(tensor)
    return whole(tensor.shape, (dist.get_rank() if dist.is_initialized() else 0,))


@dataclass(frozen=True)
class Segment:
    """One named tensor's share of a flat buffer; its boxes point into that buffer.

    Args:
        name: The parameter's name in the whole model.
        sharding: Its global shape, and the boxes that lie in the buffer.
    """

    name: str
    sharding: Sharding


class Segments:
    """Everything that a flat buffer packs, in order.

    Args:
        segments: The segments, each name once.
        derived: Whether the buffer is made anew, before every use, from the parameters with these names, which others
            hold. So it says nothing that they do not, and whoever saves the parameters need not save it.

    Raises:
        ValueError: A name that is given twice.
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
        """The names, in the order of the buffer."""
        return tuple(self._by_name)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Name, box and view of everything in a buffer.

        Args:
            flat: A buffer that is laid out as these segments say.
        """
        for segment in self:
            for box in segment.sharding.boxes:
                yield segment.name, box, box.of(flat)


def set_segments(tensor: torch.Tensor, segments: Segments) -> None:
    """Notes what a flat tensor packs. The record stays with this tensor object: a copy or a view has none.

    Args:
        tensor: The flat tensor.
        segments: What it packs; the boxes point into the tensor.

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
    """What a flat tensor packs; an ordinary tensor packs itself.

    Args:
        tensor: Any tensor.
        name: The name of an ordinary tensor, which does not know its own.
    """
    segments = SEGMENTS.of(tensor)
    return Segments([Segment(name, sharding_of(tensor))]) if segments is None else segments


def set_slots(tensor: torch.Tensor, slots: Mapping[str, torch.Tensor]) -> None:
    """Notes memory that is kept ready for an optimizer's state of a tensor, such as on a disk.

    Args:
        tensor: A tensor of the optimizer.
        slots: By name of a slot, such as "exp_avg", a tensor to put its values into. Whoever makes state in place of
            the optimizer, as a load does, takes it, where shape and dtype fit, instead of fresh memory.
    """
    tensor.par_slots = dict(slots)  # type: ignore[attr-defined]  # a tensor takes attributes


def slots_of(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The memory that is kept ready for an optimizer's state of a tensor, by name of a slot; mostly none."""
    slots: Mapping[str, torch.Tensor] = getattr(tensor, "par_slots", {})
    return slots
