"""Stochastic rounding by torch's own operations, a tile at a time. All integers are int32 that wrap around."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .matrices import DROPPED, SPREAD, Matrix, signed

_TILE = 1 << 17
"""Number of elements that are rounded at a time: scratch stays in cache, and calls are few."""
_ROW = 1 << 8
"""Columns that a single long row is folded into: adding up two short counts is quicker than counting on."""
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
"""The hash's multipliers."""


def round_matrices_(matrices: Sequence[Matrix]) -> None:
    """Round matrices one after the other."""
    for matrix in matrices:
        _round_matrix_(matrix)


def _round_matrix_(matrix: Matrix) -> None:
    matrix, steps = _folded(matrix)
    rows, columns = matrix.target.shape
    width = min(columns, _TILE)
    height = min(rows, max(1, _TILE // width))
    counting = torch.arange(max(height, width), dtype=torch.int32, device=matrix.target.device)
    scratch = [torch.empty(height, width, dtype=torch.int32, device=counting.device) for _ in range(2)]
    key = counting.new_full((), signed(matrix.keys[1]))
    for tile in _tiles(matrix, steps, height, width):
        below, across = tile.target.shape
        state, spare = scratch if tile is matrix else (buffer[:below, :across] for buffer in scratch)
        begin_(state, counting, tile, steps)
        mix_(state, spare, key)
        _round_tile_(tile.target, tile.source, state, spare)


def _folded(matrix: Matrix) -> tuple[Matrix, tuple[int, int]]:
    """Folds a single row into several, and the steps, also where there were none."""
    target, source, first, steps, keys = matrix
    if steps is not None and (target.shape[0] > 1 or target.shape[1] % _ROW):
        return matrix, steps
    length = _ROW if target.numel() % _ROW == 0 else target.numel()
    step = 1 if steps is None else steps[1]
    steps = (length * step, step)
    return Matrix(target.view(-1, length), source.view(-1, length), first, steps, keys), steps


def _tiles(matrix: Matrix, steps: tuple[int, int], height: int, width: int) -> Iterator[Matrix]:
    """Yield the tiles of a matrix: tiles of one size, and smaller tiles at its ends."""
    rows, columns = matrix.target.shape
    if (rows, columns) == (height, width):
        yield matrix
        return
    for top, left in itertools.product(range(0, rows, height), range(0, columns, width)):
        here = slice(top, top + height), slice(left, left + width)
        first = matrix.first + top * steps[0] + left * steps[1]
        yield Matrix(matrix.target[here], matrix.source[here], first, steps, matrix.keys)


def begin_(state: Tensor, counting: Tensor, tile: Matrix, steps: tuple[int, int]) -> None:
    """Write the state of the hash before it is mixed: `index * SPREAD + first key` of each element.

    Args:
        state: (rows, columns), written.
        counting: 0, 1, 2 ..., at least as many as rows and columns.
        tile: Matrix with its first index and keys.
        steps: Distances in the index between neighbouring rows and between neighbouring columns.
    """
    below, across = state.shape
    down, right = (signed(step * SPREAD) for step in steps)
    start = counting.new_full((1, 1), signed(tile.first * SPREAD + tile.keys[0]))
    if below > 1:
        start = torch.add(start, counting[:below, None], alpha=down)
    torch.add(start, counting[:across], alpha=right, out=state)


def mix_(state: Tensor, spare: Tensor, key: Tensor) -> None:
    """Hashes states in place; the upper bits are the random numbers.

    Args:
        state: int32, written.
        spare: int32 of the same shape, overwritten.
        key: The second key, a scalar.
    """
    state.bitwise_xor_(_shift(state, 16, spare))
    torch.add(key, state, alpha=signed(_FIRST), out=state)
    state.bitwise_xor_(_shift(state, 15, spare))
    state.mul_(signed(_SECOND))


def _round_tile_(target: Tensor, source: Tensor, state: Tensor, spare: Tensor) -> None:
    """Add random numbers to the bits that the target lacks, cut these off, and write what remains."""
    dropped = DROPPED[target.dtype]
    if target.dtype == torch.float16:  # below 2**-14 its grid is even; what 2**-14 is added to has just that grid
        shift = (source.abs() < 2**-14).to(source.dtype).mul_(2**-14).copysign_(source)
        grid = source + shift
    else:
        shift, grid = None, source
    # A carry out of the dropped bits rounds up to the next number; its probability is the fraction in these bits.
    bits = _shift(state, 32 - dropped, spare).add_(grid.view(torch.int32)).bitwise_and_(-1 << dropped)
    rounded = bits.view(torch.float32)
    if shift is not None:
        rounded.sub_(shift)
    if not source.is_cpu or math.isnan(source.sum()):  # a look at it is free on a CPU
        finite = torch.clamp(source, -1, 1, out=state.view(torch.float32))  # but for NaN, which may look like a number
        rounded.add_(finite, alpha=0)
    target.copy_(rounded)


def _shift(state: Tensor, bits: int, out: Tensor) -> Tensor:
    """Shift to the right without sign: a shift of int32 would copy the sign in."""
    return torch.bitwise_right_shift(state, bits, out=out).bitwise_and_((1 << 32 - bits) - 1)
