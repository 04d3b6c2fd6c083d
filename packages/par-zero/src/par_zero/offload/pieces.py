"""Which part of an optimizer's state lies in which tier, in which pieces, and where in a file. Pure arithmetic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .._tiers import TIERS
from ..layout.packing import ALIGNMENT, SliceRange

PAGE = 4096
"""Bytes of which the beginning of every slot in a file is a multiple: what reads past the cache asks for."""

COPY = ""
"""The name of the slot that has the optimizer's own copy of parameters which are used in another dtype."""


def pages(size: int) -> int:
    """Bytes of the whole pages that so many bytes take."""
    return -(-size // PAGE) * PAGE


Slots = Mapping[str, torch.dtype]
"""What an optimizer keeps for each element of a tensor: dtypes by name, COPY first."""


def cut(
    chunks: Sequence[Sequence[SliceRange]], parts: Mapping[str, float], limit: int, on_disk: Sequence[bool] = ()
) -> list[list[SliceRange]]:
    """Cuts what an optimizer holds into pieces, each with its state in one tier.

    Args:
        chunks: What is held of each chunk, in the order in which chunks run forward. What comes first stays nearest.
        parts: Which part of all elements lies in each tier; 1 in all.
        limit: Number of elements of a piece of which anything is on the disk, at most, but 16 or more.
        on_disk: For each chunk, whether its parameters or its gradients are on the disk; none by default.

    Returns:
        The pieces of each chunk; those of one tier and chunk lie together.
    """
    total = sum(each.stop - each.start for ranges in chunks for each in ranges)
    ends = []  # of each tier, in elements from the first
    share = 0.0
    for number, tier in enumerate(TIERS):
        share += parts[tier]
        is_last = not any(parts[other] for other in TIERS[number + 1 :])
        ends.append(total if is_last else round(total * share) // ALIGNMENT * ALIGNMENT)
    limit = max(limit // ALIGNMENT, 1) * ALIGNMENT
    pieces: list[list[SliceRange]] = []
    done = 0
    for ranges, in_pieces in zip(chunks, on_disk or [False] * len(chunks), strict=True):
        pieces.append([])
        for whole in ranges:
            start = whole.start
            while start < whole.stop:
                number = next(number for number, end in enumerate(ends) if done < end)
                stop = min(whole.stop, start + ends[number] - done)
                tier = TIERS[number]
                small = in_pieces or tier == "disk"
                if small:
                    stop = min(stop, start + limit)
                pieces[-1].append(replace(whole, start=start, stop=stop, tier=tier, in_pieces=small))
                done += stop - start
                start = stop
    return pieces


def spread(sizes: Sequence[int], parts: Mapping[str, float]) -> list[str]:
    """Says in which tier each of some things lies that cannot be cut: the one in which its middle falls.

    Args:
        sizes: Their sizes, in the order in which they are needed. What comes first stays nearest.
        parts: Which part of all lies in each tier; 1 in all.
    """
    total, done = sum(sizes), 0
    found = []
    for size in sizes:
        place = (done + size / 2) / total if total else 0
        share = 0.0
        for tier in TIERS:
            share += parts[tier]
            if place < share or not any(parts[other] for other in TIERS[TIERS.index(tier) + 1 :]):
                found.append(tier)
                break
        done += size
    return found


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One slot of a piece in the file.

    Args:
        name: Its name, such as "exp_avg".
        dtype: Dtype of its elements.
        start: Its first byte within the block.
        count: Number of its elements.
    """

    name: str
    dtype: torch.dtype
    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class StateBlock:
    """What a piece has in the file: its slots side by side, so that they are read as one.

    Args:
        start: Its first byte in the file.
        size: Number of the bytes of its slots, padding included.
        slots: Its slots.
        gradient: The place of its gradient, behind the slots, as it is written at another time; None: it is elsewhere.
    """

    start: int
    size: int
    slots: tuple[Slot, ...]
    gradient: Slot | None = None

    @property
    def stop(self) -> int:
        """One past its last byte in the file."""
        return self.start + self.size + self.gradient_size

    @property
    def gradient_size(self) -> int:
        """Number of the bytes, padding included, that its gradient has of it."""
        return 0 if self.gradient is None else pages(self.gradient.count * self.gradient.dtype.itemsize)

    @property
    def copy_size(self) -> int:
        """Number of the bytes, padding included, that the optimizer's own copy of parameters has of it."""
        if not self.slots or self.slots[0].name != COPY:
            return 0
        return self.slots[1].start if len(self.slots) > 1 else self.size


def blocks(pieces: Iterable[tuple[int, Slots, torch.dtype | None]]) -> list[StateBlock]:
    """Where pieces lie in a file, one behind the other.

    Args:
        pieces: For each piece, the number of its elements, its slots, and the dtype of its gradient; None: that lies
            elsewhere.
    """
    found: list[StateBlock] = []
    start = 0
    for count, slots, gradient in pieces:
        size = 0
        made = []
        for name, dtype in slots.items():
            made.append(Slot(name=name, dtype=dtype, start=size, count=count))
            size += pages(count * dtype.itemsize)
        behind = None if gradient is None else Slot(name="gradient", dtype=gradient, start=size, count=count)
        found.append(StateBlock(start=start, size=size, slots=tuple(made), gradient=behind))
        start = found[-1].stop
    return found
