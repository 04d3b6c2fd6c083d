"""Arithmetic of offload: how an optimizer's tensors are split into pieces, and their places in tiers and in a file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .._tiers import TIERS
from ..layout.packing import ALIGNMENT, SliceRange

PAGE = 4096
"""Alignment in bytes of every slot in a file, which reads and writes without the kernel's page cache require."""

COPY = ""
"""Name of the slot that holds the optimizer's master copy of parameters in another dtype."""


def pages(size: int) -> int:
    """Return `size` bytes rounded up to full pages."""
    return -(-size // PAGE) * PAGE


Slots = Mapping[str, torch.dtype]
"""Dtypes, by name, of what an optimizer stores per element of a tensor; COPY is the first."""


def split_into_pieces(
    chunks: Sequence[Sequence[SliceRange]],
    parts: Mapping[str, float],
    limit: int,
    on_disk: Sequence[bool] = (),
    in_pieces: Sequence[str] = ("disk",),
) -> list[list[SliceRange]]:
    """Split an optimizer's slices of chunks into pieces, each with its state in one tier.

    Args:
        chunks: Slices of each chunk, in forward order. State of the first stays nearest to the device.
        parts: Fraction of all elements in each tier; the sum is 1.
        limit: Maximum number of elements of a piece that is stepped separately. At least ALIGNMENT elements are used.
        on_disk: For each chunk, whether its parameters or gradients are on the disk. Default: none are.
        in_pieces: Tiers whose state is stepped piece by piece. On an accelerator, the host is one, too.

    Returns:
        The pieces of each chunk, in the order of their elements.
    """
    total = sum(each.stop - each.start for slices in chunks for each in slices)
    ends = []  # for each tier, one past its last element
    fraction = 0.0
    for number, tier in enumerate(TIERS):
        fraction += parts[tier]
        # The last tier ends with the elements: a sum of fractions may be a bit below 1.
        is_last = not any(parts[other] for other in TIERS[number + 1 :])
        ends.append(total if is_last else round(total * fraction) // ALIGNMENT * ALIGNMENT)
    limit = max(limit // ALIGNMENT, 1) * ALIGNMENT
    pieces: list[list[SliceRange]] = []
    done = 0
    for slices, any_on_disk in zip(chunks, on_disk or [False] * len(chunks), strict=True):
        pieces.append([])
        for one in slices:
            start = one.start
            while start < one.stop:
                number = next(number for number, end in enumerate(ends) if done < end)
                stop = min(one.stop, start + ends[number] - done)
                tier = TIERS[number]
                small = any_on_disk or tier in in_pieces
                if small:
                    stop = min(stop, start + limit)
                pieces[-1].append(replace(one, start=start, stop=stop, tier=tier, in_pieces=small))
                done += stop - start
                start = stop
    return pieces


def tiers_of(sizes: Sequence[int], parts: Mapping[str, float]) -> list[str]:
    """Return the tier of each of several items that cannot be split: the one that contains the item's middle.

    Args:
        sizes: Bytes of the items, in the order of their use. The first stay nearest to the device.
        parts: Fraction of all bytes in each tier; the sum is 1.
    """
    total, done = sum(sizes), 0
    found = []
    for size in sizes:
        # By the middle, each tier holds its fraction up to half an item.
        middle = (done + size / 2) / total if total else 0
        fraction = 0.0
        for number, tier in enumerate(TIERS):
            fraction += parts[tier]
            if middle < fraction or not any(parts[other] for other in TIERS[number + 1 :]):
                found.append(tier)
                break
        done += size
    return found


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One slot of a piece in the file.

    Args:
        name: Name, such as "exp_avg".
        dtype: Dtype of the elements.
        start: First byte within the piece's block.
        count: Number of elements.
    """

    name: str
    dtype: torch.dtype
    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class StateBlock:
    """The place of a piece in the file: its slots one after the other, so that one read fetches all of them.

    Args:
        start: First byte in the file.
        size: Bytes of the slots with padding.
        slots: The slots.
        gradient: Its gradient, behind the slots because it is written at another time. None: it is not in the file.
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
        """Bytes of the gradient with padding."""
        return 0 if self.gradient is None else pages(self.gradient.count * self.gradient.dtype.itemsize)

    @property
    def copy_size(self) -> int:
        """Bytes of the master copy with padding."""
        if not self.slots or self.slots[0].name != COPY:
            return 0
        return self.slots[1].start if len(self.slots) > 1 else self.size


def lay_out_blocks(pieces: Iterable[tuple[int, Slots, torch.dtype | None]]) -> list[StateBlock]:
    """Return places of pieces in a file, one behind the other.

    Args:
        pieces: For each piece, its number of elements, its slots, and the dtype of its gradient in the file or None.
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
