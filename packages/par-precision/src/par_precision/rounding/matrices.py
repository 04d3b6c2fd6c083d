"""Matrices that are rounded in one operation: their elements have evenly spaced indices in the unsharded tensor.

The random number of an element is a hash of a state, `index * SPREAD + first key`, and of the second key. The two ways
to round, `tiles` and `triton`, have that arithmetic in common. Nothing here is rounded.
"""

import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from par_groups import Box, Segments

Keys = tuple[int, int]
"""Two numbers below 2**32, of one tensor at one step: the first shifts the sequence of its random numbers, the second
makes it another sequence."""

DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""Low bits of an fp32 number that a normal number of the target lacks."""
SPREAD = 0x9E3779B1
"""What the hash's state grows by from one index to the next: 2**32 over the golden ratio."""


class Matrix(NamedTuple):
    """Matrix of elements that are rounded in one call.

    Args:
        target: Result, (rows, columns), bf16 or fp16; contiguous and of any shape if `steps` is None.
        source: fp32 values of the same shape and the same contiguity.
        first: Row-major index of the matrix's first element in the unsharded tensor.
        steps: Distances in that index between neighbouring rows and between neighbouring columns. None: the index grows
            by one from each element to the next in memory.
        keys: Keys of the unsharded tensor at this step.
    """

    target: Tensor
    source: Tensor
    first: int
    steps: tuple[int, int] | None
    keys: Keys


def keys_of(seed: int, step: int, name: str) -> Keys:
    """Return the keys of a tensor's random numbers at a step."""
    # Not Python's own hash, which every process salts: all ranks must draw the same bits for an element.
    digest = hashlib.blake2b(f"{int(seed)} {int(step)} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def signed(value: int) -> int:
    """Return the int32 with the same low 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


def matrices_of(
    target: Tensor, source: Tensor, segments: Segments, suffix: str, seed: int, step: int
) -> Iterator[Matrix]:
    """Yield the non-empty matrices of a local tensor.

    Args:
        target: bf16 or fp16.
        source: fp32, of the same shape.
        segments: Segments of the local target.
        suffix: Added to the names of segments.
        seed: Seed of the run.
        step: Number of the training step.
    """
    # The keys are those of the parameter, not of the buffer: so an element is rounded alike under every sharding.
    for segment in segments:
        keys = keys_of(seed, step, segment.name + suffix)
        for box in segment.sharding.boxes:
            yield from _of_box(box, segment.sharding.shape, target, source, keys)


class _Dim(NamedTuple):
    """Dim of a box.

    Args:
        size: Number of indices.
        uncut: Distance between neighbouring indices in the unsharded tensor, row-major, in elements.
        target: Distance between them in the target's memory, in elements.
        source: Distance between them in the source's memory, in elements.
    """

    size: int
    uncut: int
    target: int
    source: int


def _of_box(box: Box, shape: tuple[int, ...], target: Tensor, source: Tensor, keys: Keys) -> Iterator[Matrix]:
    """Yield a box as matrices. Most boxes are one matrix, because dims are merged if possible.

    Args:
        box: Box in the unsharded tensor and in the local target.
        shape: Shape of the unsharded tensor.
        target: The local target.
        source: The local source.
        keys: The keys of the uncut tensor.
    """
    # An unsharded contiguous tensor needs no strides: its index grows by one from element to element.
    covers = box.size == shape == target.shape and box.stride == target.stride()
    if covers and target.is_contiguous() and source.is_contiguous():
        yield Matrix(target, source, 0, None, keys)
        return
    target, source = box.of(target), box.of(source)
    row_major = tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1][: len(shape)]
    dims = [_Dim(*dim) for dim in zip(box.size, row_major, target.stride(), source.stride(), strict=True)]
    *outer, rows, columns = _merged(dims)
    begin = sum(start * step for start, step in zip(box.start, row_major, strict=True))
    # More than two dims that do not merge are rare; each further index costs a call.
    for place in itertools.product(*(range(dim.size) for dim in outer)):
        first, into, out_of = begin, int(target.storage_offset()), int(source.storage_offset())
        for number, dim in zip(place, outer, strict=True):
            first += number * dim.uncut
            into += number * dim.target
            out_of += number * dim.source
        size = (rows.size, columns.size)
        yield Matrix(
            target.as_strided(size, (rows.target, columns.target), into),
            source.as_strided(size, (rows.source, columns.source), out_of),
            first,
            (rows.uncut, columns.uncut),
            keys,
        )


def _merged(dims: Iterable[_Dim]) -> list[_Dim]:
    """Merge neighbouring dims if a step of the outer equals all steps of the inner dim; return two dims or more."""
    merged: list[_Dim] = []
    for dim in dims:
        if merged and merged[-1][1:] == (dim.size * dim.uncut, dim.size * dim.target, dim.size * dim.source):
            merged[-1] = dim._replace(size=merged[-1].size * dim.size)
        # A dim of one index has no step, and would keep its neighbours from merging.
        elif dim.size > 1:
            merged.append(dim)
    return [_Dim(1, 0, 0, 0)] * (2 - len(merged)) + merged
