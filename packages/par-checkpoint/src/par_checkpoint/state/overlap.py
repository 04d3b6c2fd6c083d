"""Memory of tensors, compared to the byte. Interleaved columns of one matrix share none."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from par_groups import Sharding

_Steps = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class MemoryRegion:
    """Bytes in memory that a box of a tensor occupies.

    Args:
        name: Name of the tensor.
        begin: Address of the first byte.
        steps: Bytes from one index to the next, and number of indices, of each dim; the last dim is that of bytes.
        is_source: Whether the region is only read.
    """

    name: str
    begin: int
    steps: tuple[tuple[int, int], ...]
    is_source: bool = False

    @property
    def end(self) -> int:
        """Address of the byte after the last one."""
        return self.begin + _reach(self.steps) + 1

    def overlaps(self, other: "MemoryRegion") -> bool:
        """Return whether two regions have a byte in common."""
        # The indices of `other` count from its last byte down, so that all terms of the sum are positive.
        return _is_sum(_merged([*self.steps, *other.steps]), other.end - 1 - self.begin)

    @property
    def overlaps_itself(self) -> bool:
        """Return whether two of its indices are one byte."""
        steps = sorted(dim for dim in self.steps if dim[1] > 1)
        # A dim that steps over everything within it, as in each contiguous tensor and in each slice of one.
        if all(step > _reach(steps[:number]) for number, (step, _) in enumerate(steps)):
            return False
        # Two such indices differ by a positive number in some dim, and by any number in the other dims.
        for number, (step, count) in enumerate(steps):
            others = [*steps[:number], *steps[number + 1 :]]
            twice = [(other, 2 * length - 1) for other, length in others]
            if step == 0 or _is_sum(_merged([*twice, (step, count - 1)]), _reach(others) - step):
                return True
        return False


def regions_of(
    name: str, sharding: Sharding, local: torch.Tensor, *, is_source: bool = False
) -> Iterator[MemoryRegion]:
    """Yield the memory of each box of a local tensor; a tensor on the meta device has none.

    Raises:
        ValueError: The boxes need a contiguous tensor.
    """
    for box in () if local.is_meta else sharding.boxes:
        try:
            view = box.of(local)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        width = view.element_size()
        dims = [(step * width, size) for step, size in zip(view.stride(), view.shape, strict=True)]
        yield MemoryRegion(name=name, begin=view.data_ptr(), steps=(*dims, (1, width)), is_source=is_source)


def region_of_storage(name: str, local: torch.Tensor) -> MemoryRegion:
    """Return the storage of a tensor of the source as one region."""
    storage = local.untyped_storage()
    return MemoryRegion(name=name, begin=storage.data_ptr(), steps=((1, storage.nbytes()),), is_source=True)


def check_separate(regions: Iterable[MemoryRegion]) -> None:
    """Raise ValueError if a target shares memory with a source, with another target or with itself."""
    open_: list[MemoryRegion] = []  # regions that end behind the current one's first byte
    for region in sorted(regions, key=lambda region: region.begin):
        if not region.is_source and region.overlaps_itself:
            raise ValueError(_shared(region, region))
        open_ = [other for other in open_ if other.end > region.begin]
        for other in open_:
            if not (region.is_source and other.is_source) and region.overlaps(other):
                raise ValueError(_shared(*sorted((region, other), key=lambda one: (one.is_source, one.name))))
        open_.append(region)


def _shared(target: MemoryRegion, other: MemoryRegion) -> str:
    """Return the message about two regions."""
    if other.is_source:
        return (
            f"{target.name!r} in the target shares memory with {other.name!r} in the source; make the "
            "target of its own, such as by copy.deepcopy, or leave out what need not move"
        )
    if other.name == target.name:
        return (
            f"{target.name!r} in the target has elements that share memory and cannot differ, as after expand() or in "
            "boxes that overlap; call .contiguous(), or correct the layout"
        )
    return (
        f"{target.name!r} and {other.name!r} in the target share memory, so one would overwrite the other; pass the "
        "same tensor under both names to tie them, or make one of its own by .clone()"
    )


def _reach(steps: _Steps) -> int:
    """Return the bytes from the first index of some dims to the last one."""
    return sum(step * (count - 1) for step, count in steps)


def _merged(steps: _Steps) -> list[tuple[int, int]]:
    """Return dims with all sums of the indices of some dims, the largest step first; equal steps become one dim."""
    lengths = Counter[int]()
    for step, count in steps:
        lengths[step] += count - 1
    return sorted(((step, length + 1) for step, length in lengths.items() if step), reverse=True)


def _is_sum(steps: _Steps, total: int) -> bool:
    """Return whether some indices of the dims are `total` bytes from the first ones."""
    if not steps:
        return total == 0
    (step, count), rest = steps[0], steps[1:]
    # Smaller steps can make up only a part of the total, which in nested dims leaves one or two indices to try.
    low, high = max(0, -((_reach(rest) - total) // step)), min(count - 1, total // step)
    return any(_is_sum(rest, total - index * step) for index in range(high, low - 1, -1))
