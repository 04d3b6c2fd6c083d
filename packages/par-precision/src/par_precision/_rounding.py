"""Stochastic rounding of fp32 values, with random numbers that depend on the element alone, not on who holds it.

A value between two neighbours of the target's grid becomes the upper one with the probability of its distance from the
lower one. So the mean of many roundings is the value, and updates too small for round-to-nearest are not lost.
"""

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from par_groups import Box, Segment, Segments, segments_of, whole

from ._placed import is_placed, local_part

Keys = tuple[int, int]
"""Two numbers below 2**32, of one tensor at one step."""
Dim = tuple[int, ...]
"""Size of a dim, and its three steps from one index to the next: in the whole tensor, the target and the source."""

DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""Low bits of an fp32 number that a normal number of the target lacks."""
_TILE = 1 << 17
"""Elements that are rounded at a time: scratch stays in cache, and calls are few."""
SPREAD = 0x9E3779B1
"""What one index more adds to the state of the hash: 2**32 over the golden ratio."""
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What is rounded at once.

    Args:
        target: (rows, columns), bf16 or fp16.
        source: (rows, columns), fp32.
        first: Index of its first element in the whole tensor, counted row-major.
        steps: From a row to the next and from a column to the next, in such indices.
    """

    target: Tensor
    source: Tensor
    first: int
    steps: tuple[int, int]


def stochastic_round_(target: Tensor, source: Tensor, seed: int, step: int, *, name: str = "") -> None:
    """Writes fp32 values into a bf16 or fp16 tensor, each rounded up or down at random, without bias.

    The random number of an element is a hash of (seed, step, name, index in the whole tensor). It is the same on every
    replica and however the tensor is cut: the target may be plain, a DTensor, have a `Sharding`, or be a flat tensor
    with `Segments`; what lies outside its boxes stays. Elements of one tensor that lie 2**32 apart share a number.

    A value that the target can hold stays what it is; NaN and infinities stay. The neighbour above the largest finite
    number is infinity: a finite value beyond that number becomes infinite with the probability that any other value
    would round up, and fp16 targets make infinities of all from 65536 on. fp16 takes what is below 2**-38 for zero.

    Args:
        target: bf16 or fp16, of any shape.
        source: fp32, laid out like the target.
        seed: Of the run, the same on all ranks.
        step: Of training. At another one the random numbers are others.
        name: The parameter's name in the whole model. Tensors of equal names share random numbers. Unused where the
            target has `Segments`, which have names.

    Raises:
        TypeError: Another dtype.
        ValueError: Shapes or devices that differ.

    Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3 (the rounding); the hash is
        C. Wellons' "lowbias32", keyed, without the last shift, since only upper bits of it are used.
    """
    _check(target, source)
    round_segments_(target, source, packed(target, name), seed, step)


def packed(tensor: Tensor, name: str) -> Segments:
    """What a tensor packs. Most say nothing of themselves, which is quicker to see than to ask for."""
    if is_placed(tensor) or "par_sharding" in tensor.__dict__ or "par_segments" in tensor.__dict__:
        return segments_of(tensor, name)
    return Segments([Segment(name, whole(tuple(tensor.shape), ()))])


@torch.no_grad()
def round_segments_(target: Tensor, source: Tensor, segments: Segments, seed: int, step: int) -> None:
    """`stochastic_round_` of a tensor that packs `segments`, whatever the record on it."""
    into, given = local_part(target), local_part(source)
    round_matrix_ = _rounds_on(into)
    for segment in segments:
        keys = keys_of(seed, step, segment.name)
        for box in segment.sharding.boxes:
            for matrix in _matrices(box, segment.sharding.shape, box.of(into), box.of(given)):
                round_matrix_(matrix, keys)


def keys_of(seed: int, step: int, name: str) -> Keys:
    """The keys of a tensor at a step: one shifts the sequence of its random numbers, the other makes it another one."""
    digest = hashlib.blake2b(f"{int(seed)} {int(step)} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _check(target: Tensor, source: Tensor) -> None:
    if target.dtype not in DROPPED:
        raise TypeError(f"the target has dtype {target.dtype}; stochastic rounding writes bfloat16 or float16")
    if source.dtype != torch.float32:
        raise TypeError(f"the source has dtype {source.dtype}; stochastic rounding reads float32: call .float()")
    if target.shape != source.shape:
        raise ValueError(f"target {tuple(target.shape)} and source {tuple(source.shape)} must have the same shape")
    if target.device != source.device:
        raise ValueError(f"the target is on {target.device}, the source on {source.device}; move one to the other")


def _rounds_on(tensor: Tensor) -> Callable[[Matrix, Keys], None]:
    """What rounds on a tensor's device: one kernel on a GPU where there is Triton, else torch's own operations."""
    if tensor.is_cuda and find_spec("triton"):
        from ._rounding_triton import round_matrix_  # noqa: PLC0415 - it imports Triton

        return round_matrix_
    return _Tiles(tensor).round_


def _matrices(box: Box, shape: Sequence[int], target: Tensor, source: Tensor) -> Iterator[Matrix]:
    """A box as matrices. Most are one, because dims that are one in memory and in the whole tensor are taken for one.

    Args:
        box: Of the target.
        shape: Of the whole tensor.
        target: The box's view of it.
        source: The box's view of it.
    """
    row_major = tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1][: len(shape)]
    begin = sum(start * step for start, step in zip(box.start, row_major, strict=True))
    *outer, rows, columns = _merged(zip(box.size, row_major, target.stride(), source.stride(), strict=True))
    for place in itertools.product(*(range(dim[0]) for dim in outer)):
        first, into, given = (
            origin + sum(index * dim[which] for index, dim in zip(place, outer, strict=True))
            for which, origin in enumerate((begin, int(target.storage_offset()), int(source.storage_offset())), start=1)
        )
        size, steps, into_strides, given_strides = zip(rows, columns, strict=True)
        yield Matrix(
            target=target.as_strided(size, into_strides, into),
            source=source.as_strided(size, given_strides, given),
            first=first,
            steps=(steps[0], steps[1]),
        )


def _merged(dims: Iterable[Dim]) -> list[Dim]:
    """Neighbouring dims made one where all their steps allow it; two at least."""
    merged: list[Dim] = []
    for size, *steps in dims:
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        elif size > 1:
            merged.append((size, *steps))
    return [(1, 0, 0, 0)] * (2 - len(merged)) + merged


class _Tiles:
    """Rounds with torch's own operations, a tile at a time; all of the integers are int32 that wrap around.

    Args:
        target: Where the memory for a tile is.
    """

    def __init__(self, target: Tensor) -> None:
        size = min(target.numel(), _TILE)
        self._hash, self._spare = (torch.empty(size, dtype=torch.int32, device=target.device) for _ in range(2))

    def round_(self, matrix: Matrix, keys: Keys) -> None:
        """Rounds a matrix with a tensor's keys."""
        rows, columns = matrix.target.shape
        width = min(columns, _TILE)
        height = max(1, _TILE // width)
        right = _spread(width, matrix.steps[1], 0, matrix.target.device)[None]
        for top, left in itertools.product(range(0, rows, height), range(0, columns, width)):
            here = slice(top, top + height), slice(left, left + width)
            target, source = matrix.target[here], matrix.source[here]
            state, spare = (each[: target.numel()].view(target.shape) for each in (self._hash, self._spare))
            start = (matrix.first + top * matrix.steps[0] + left * matrix.steps[1]) * SPREAD + keys[0]
            below: Tensor | int = signed(start)
            if target.shape[0] > 1:
                below = _spread(target.shape[0], matrix.steps[0], start, target.device)[:, None]
            torch.add(right[:, : target.shape[1]], below, out=state)
            _mix_(state, spare, keys[1])
            _round_tile_(target, source, state, spare)


def _spread(size: int, step: int, first: int, device: torch.device) -> Tensor:
    """What `size` indices, `step` apart, add to the state of the hash."""
    return torch.arange(size, dtype=torch.int32, device=device).mul_(signed(step * SPREAD)).add_(signed(first))


def _mix_(state: Tensor, spare: Tensor, key: int) -> None:
    """The hash of `index * SPREAD + first key`; its upper bits are the random number."""
    state.bitwise_xor_(_shift(state, 16, spare))
    state.mul_(signed(_FIRST)).add_(signed(key))
    state.bitwise_xor_(_shift(state, 15, spare))
    state.mul_(signed(_SECOND))


def _round_tile_(target: Tensor, source: Tensor, state: Tensor, spare: Tensor) -> None:
    dropped = DROPPED[target.dtype]
    if target.dtype == torch.float16:  # below 2**-14 its grid is even; what 2**-14 is added to has just that grid
        shift = (source.abs() < 2**-14).to(source.dtype).mul_(2**-14).copysign_(source)
        grid = source + shift
    else:
        shift, grid = None, source
    bits = _shift(state, 32 - dropped, spare).add_(grid.view(torch.int32)).bitwise_and_(-1 << dropped)
    rounded = bits.view(torch.float32)
    if shift is not None:
        rounded.sub_(shift)
    finite = torch.clamp(source, -1, 1, out=state.view(torch.float32))  # but for NaN, whose bits may be a number's now
    target.copy_(rounded.add_(finite, alpha=0))


def _shift(state: Tensor, bits: int, out: Tensor) -> Tensor:
    """An unsigned right shift: int32 shifts copies of the sign in."""
    return torch.bitwise_right_shift(state, bits, out=out).bitwise_and_((1 << 32 - bits) - 1)


def signed(value: int) -> int:
    """The int32 with the same low 32 bits."""
    return (value + 2**31) % 2**32 - 2**31
