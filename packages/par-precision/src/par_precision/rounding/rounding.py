"""Stochastic rounding of fp32 values, with random numbers that depend on the element alone, not on who holds it.

A value between two neighbours of the target's grid becomes the upper one with the probability of its distance from the
lower one. So the mean of many roundings is the value, and updates too small for round-to-nearest are not lost.
"""

import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn

from par_groups import Box, Segment, Segments, segments_of, whole

from .._dtensor import local_part

Keys = tuple[int, int]
"""Two numbers below 2**32, of one tensor at one step."""
Dim = tuple[int, ...]
"""Size of a dim, and its three steps from one index to the next: in the whole tensor, the target and the source."""

DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""Low bits of an fp32 number that a normal number of the target lacks."""
_TILE = 1 << 17
"""Elements that are rounded at a time: scratch stays in cache, and calls are few."""
_ROW = 1 << 8
"""Elements of the rows that a long one is folded into: what adds up their two counts is quicker than counting on."""
ORDINARY = (Tensor, nn.Parameter)
"""Types of tensors of which nothing is known but what `__dict__` has."""
SPREAD = 0x9E3779B1
"""What one index more adds to the state of the hash: 2**32 over the golden ratio."""
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


class Matrix(NamedTuple):
    """What is rounded at once.

    Args:
        target: (rows, columns), bf16 or fp16; contiguous and of any shape where there are no steps.
        source: fp32, of the same shape, and as contiguous.
        first: Index of its first element in the whole tensor, counted row-major.
        steps: From a row to the next and from a column to the next, in such indices. None: one by one, as in memory.
        keys: Of the whole tensor.
    """

    target: Tensor
    source: Tensor
    first: int
    steps: tuple[int, int] | None
    keys: Keys


class Rounding(NamedTuple):
    """A tensor to be rounded.

    Args:
        target: bf16 or fp16, of any shape.
        source: fp32, laid out like the target.
        packed: What the target packs, or the name of one that is whole.
        suffix: Added to names.
    """

    target: Tensor
    source: Tensor
    packed: Segments | str
    suffix: str = ""


@torch.no_grad()
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
    plain = type(target) is Tensor and not target.__dict__ and target.numel()
    if plain and target.is_contiguous() and source.is_contiguous():  # what the other way comes to, sooner
        _rounds_on(target.device)([Matrix(target, source, 0, None, keys_of(seed, step, name))])
    else:
        round_all_([Rounding(target, source, packed_in(target, name))], seed, step)


@torch.no_grad()
def round_all_(roundings: Iterable[Rounding], seed: int, step: int) -> None:
    """`stochastic_round_` of many tensors; those on a GPU share one kernel."""
    matrices: dict[torch.device, list[Matrix]] = {}
    for each in roundings:
        into, given = local_part(each.target), local_part(each.source)
        here = matrices.setdefault(into.device, [])
        if isinstance(each.packed, str) and into.is_contiguous() and given.is_contiguous():  # the usual one, quickly
            if into.numel():
                here.append(Matrix(into, given, 0, None, keys_of(seed, step, each.packed + each.suffix)))
        else:
            here.extend(_matrices(each, into, given, (seed, step)))
    for device, found in matrices.items():
        _rounds_on(device)(found)


def packed_in(tensor: Tensor, name: str) -> Segments | str:
    """What a tensor packs; just the name, which is found sooner, where nothing is noted on an ordinary tensor."""
    return name if type(tensor) in ORDINARY and not tensor.__dict__ else segments_of(tensor, name)


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


def _rounds_on(device: torch.device) -> Callable[[Sequence[Matrix]], None]:
    """What rounds on a device: one kernel on a GPU where there is Triton, else torch's own operations."""
    if device.type == "cuda" and find_spec("triton"):
        from .triton import round_matrices_  # noqa: PLC0415 - it imports Triton

        return round_matrices_
    return _round_in_turn_


def _matrices(rounding: Rounding, into: Tensor, given: Tensor, when: tuple[int, int]) -> Iterator[Matrix]:
    """A tensor as matrices, none of which is empty.

    Args:
        rounding: The tensor.
        into: Its local target.
        given: Its local source.
        when: Seed and step.
    """
    packed, suffix = rounding.packed, rounding.suffix
    if isinstance(packed, str):
        packed = Segments([Segment(packed, whole(into.shape, ()))])
    for segment in packed:
        keys = keys_of(*when, segment.name + suffix)
        for box in segment.sharding.boxes:
            yield from _of_box(box, segment.sharding.shape, into, given, keys)


def _of_box(box: Box, shape: tuple[int, ...], into: Tensor, given: Tensor, keys: Keys) -> Iterator[Matrix]:
    """A box as matrices. Most are one, because dims that are one in memory and in the whole tensor are taken for one.

    Args:
        box: Of both local tensors.
        shape: Of the whole tensor.
        into: The local target.
        given: The local source.
        keys: Of the whole tensor.
    """
    covers = box.size == shape == into.shape and box.stride == into.stride()
    if covers and into.is_contiguous() and given.is_contiguous():
        yield Matrix(into, given, 0, None, keys)
        return
    target, source = box.of(into), box.of(given)
    row_major = tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1][: len(shape)]
    begin = sum(start * step for start, step in zip(box.start, row_major, strict=True))
    *outer, rows, columns = _merged(zip(box.size, row_major, target.stride(), source.stride(), strict=True))
    for place in itertools.product(*(range(dim[0]) for dim in outer)):
        first, target_first, source_first = (
            origin + sum(index * dim[which] for index, dim in zip(place, outer, strict=True))
            for which, origin in enumerate((begin, int(target.storage_offset()), int(source.storage_offset())), start=1)
        )
        size, steps, target_strides, source_strides = zip(rows, columns, strict=True)
        yield Matrix(
            target.as_strided(size, target_strides, target_first),
            source.as_strided(size, source_strides, source_first),
            first,
            (steps[0], steps[1]),
            keys,
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


def _round_in_turn_(matrices: Sequence[Matrix]) -> None:
    for matrix in matrices:
        _round_in_tiles_(matrix)


def _round_in_tiles_(matrix: Matrix) -> None:
    """Rounds a matrix by torch's own operations; all integers are int32 that wrap around."""
    matrix, steps = _folded(matrix)
    rows, columns = matrix.target.shape
    width = min(columns, _TILE)
    height = min(rows, max(1, _TILE // width))
    counting = torch.arange(max(height, width), dtype=torch.int32, device=matrix.target.device)
    scratch = [torch.empty(height, width, dtype=torch.int32, device=counting.device) for _ in range(2)]
    key = counting.new_full((), signed(matrix.keys[1]))
    for tile in _tiles(matrix, steps, height, width):
        below, across = tile.target.shape
        state, spare = scratch if tile is matrix else (each[:below, :across] for each in scratch)
        _begin_(state, counting, tile, steps)
        _mix_(state, spare, key)
        _round_tile_(tile.target, tile.source, state, spare)


def _folded(matrix: Matrix) -> tuple[Matrix, tuple[int, int]]:
    """A single row as several; and the steps, also where there were none."""
    target, source, first, steps, keys = matrix
    if steps is not None and (target.shape[0] > 1 or target.shape[1] % _ROW):
        return matrix, steps
    length = _ROW if target.numel() % _ROW == 0 else target.numel()
    step = 1 if steps is None else steps[1]
    steps = (length * step, step)
    return Matrix(target.view(-1, length), source.view(-1, length), first, steps, keys), steps


def _tiles(matrix: Matrix, steps: tuple[int, int], height: int, width: int) -> Iterator[Matrix]:
    """A matrix cut into such of that size, and smaller ones at its ends."""
    rows, columns = matrix.target.shape
    if (rows, columns) == (height, width):
        yield matrix
        return
    for top, left in itertools.product(range(0, rows, height), range(0, columns, width)):
        here = slice(top, top + height), slice(left, left + width)
        first = matrix.first + top * steps[0] + left * steps[1]
        yield Matrix(matrix.target[here], matrix.source[here], first, steps, matrix.keys)


def _begin_(state: Tensor, counting: Tensor, tile: Matrix, steps: tuple[int, int]) -> None:
    """The state of the hash before it is mixed: `index * SPREAD` and the first key."""
    below, across = state.shape
    down, right = (signed(step * SPREAD) for step in steps)
    start = counting.new_full((1, 1), signed(tile.first * SPREAD + tile.keys[0]))
    if below > 1:
        start = torch.add(start, counting[:below, None], alpha=down)
    torch.add(start, counting[:across], alpha=right, out=state)


def _mix_(state: Tensor, spare: Tensor, key: Tensor) -> None:
    """The hash of a state; its upper bits are the random number."""
    state.bitwise_xor_(_shift(state, 16, spare))
    torch.add(key, state, alpha=signed(_FIRST), out=state)
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
    if not source.is_cpu or math.isnan(source.sum()):  # a look at it is free there
        finite = torch.clamp(source, -1, 1, out=state.view(torch.float32))  # but for NaN, which may look like a number
        rounded.add_(finite, alpha=0)
    target.copy_(rounded)


def _shift(state: Tensor, bits: int, out: Tensor) -> Tensor:
    """An unsigned right shift: int32 shifts copies of the sign in."""
    return torch.bitwise_right_shift(state, bits, out=out).bitwise_and_((1 << 32 - bits) - 1)


def signed(value: int) -> int:
    """The int32 with the same low 32 bits."""
    return (value + 2**31) % 2**32 - 2**31
