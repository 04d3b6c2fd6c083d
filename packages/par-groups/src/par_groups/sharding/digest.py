"""Digests of sharded tensors that do not depend on how they are sharded: equal weights have equal digests."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .segments import segments_of
from .sharding import Box

_WORDS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Odd factors, one for each of the two words of a digest."""


@dataclass(frozen=True)
class Digest:
    """The digest of named tensors.

    Args:
        tensors: A digest of each tensor, 32 hexadecimal digits, by its name in the full model.
    """

    tensors: Mapping[str, str]

    def __str__(self) -> str:
        """Return one sha256 of all names and digests."""
        lines = "\n".join(f"{name} {self.tensors[name]}" for name in sorted(self.tensors))
        return hashlib.sha256(lines.encode()).hexdigest()

    def differing(self, other: "Digest") -> list[str]:
        """Return the names of the tensors that differ from another digest's, or that only one of them has."""
        names = self.tensors.keys() | other.tensors.keys()
        return sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name))


@torch.no_grad()
def digest_of(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> Digest:
    """Return the digest of tensors, identical on all ranks. Collective: one all-gather of the names and digests.

    Each element is hashed with its index in the full tensor, and the hashes are added up modulo 2**64. The sum depends
    on no order, so every sharding of the same tensors has the same digest. It is no defence against somebody who
    constructs two tensors with one digest.

    Args:
        named: Tensors and their names. A flat tensor with segments stands for the parameters that it packs, whose names
            its segments have.
        group: The ranks over which the tensors are sharded. None: only this rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = frozenset([rank] if group is None else dist.get_process_group_ranks(group))
    sums: dict[str, tuple[int, ...]] = {}
    for name, tensor in named:
        for segment in segments_of(tensor, name):
            for box in segment.sharding.boxes:
                # Of several ranks with the same box, only the lowest one hashes it.
                if box.owns(rank, ranks):
                    found = _hashed(box, box.of(tensor.detach()), segment.sharding.shape)
                    sums[segment.name] = _added(sums.get(segment.name), found)
    everywhere = [sums]
    if group is not None and dist.get_world_size(group) > 1:
        everywhere = [{} for _ in ranks]
        dist.all_gather_object(everywhere, sums, group=group)
    total: dict[str, tuple[int, ...]] = {}
    for each in everywhere:
        for name, found in each.items():
            total[name] = _added(total.get(name), found)
    return Digest({name: "".join(f"{word:016x}" for word in total[name]) for name in sorted(total)})


def _added(one: tuple[int, ...] | None, other: tuple[int, ...]) -> tuple[int, ...]:
    return other if one is None else tuple((a + b) % 2**64 for a, b in zip(one, other, strict=True))


def _hashed(box: Box, values: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sums of the hashes of a box's elements, one for each word."""
    start, size = box.start, box.size
    if values.is_complex():  # two real numbers each, on one more dim: integers have at most 8 bytes
        values, shape = torch.view_as_real(values.resolve_conj()), (*shape, 2)
        start, size = (*start, 0), (*size, 2)
    bits = values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
    # The row-major index in the full tensor of each element. Each dim multiplies what is there and adds its own index.
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        places = torch.arange(first, first + count, device=values.device)
        index = (index * shape[dim])[..., None] + places
    return tuple(int(_mixed(index, bits.long(), factor).sum()) % 2**64 for factor in _WORDS)


def _mixed(index: Tensor, bits: Tensor, factor: int) -> Tensor:
    """Return a hash of each pair of numbers, int64: multiplications that wrap around, and shifts between them."""
    factor = factor - 2**64 if factor >= 2**63 else factor
    # torch shifts int64 with its sign, so each shift is masked to the bits that an unsigned shift would leave.
    mixed = (index + 1) * factor
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) + bits
    for shift in (32, 29):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
