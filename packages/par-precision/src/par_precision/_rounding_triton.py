"""Stochastic rounding on a GPU: `_rounding`'s arithmetic as one Triton kernel. Whoever imports this has Triton."""

# ruff: noqa: ANN001, ANN202, N803, PLR0124, PLR0913, PLR0917 - a kernel is no Python function
# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from ._rounding import DROPPED, SPREAD, Keys, Matrix, signed

_BLOCK = 1024


def round_matrix_(matrix: Matrix, keys: Keys) -> None:
    """Rounds a matrix with a tensor's keys."""
    target, source = matrix.target, matrix.source
    down, right = (signed(step * SPREAD) for step in matrix.steps)
    with torch.cuda.device(target.device):
        round_kernel[(triton.cdiv(target.numel(), _BLOCK),)](
            target,
            source,
            target.numel(),
            target.shape[1],
            *target.stride(),
            *source.stride(),
            signed(matrix.first * SPREAD + keys[0]),
            down,
            right,
            signed(keys[1]),
            DROPPED=DROPPED[target.dtype],
            BLOCK=_BLOCK,
        )


@triton.jit
def mix(state, key):
    """The hash: `_rounding._mix_` on uint32."""
    state ^= state >> 16
    state = state * 0x21F0AAAD + key
    state ^= state >> 15
    return state * 0x735A2D97


@triton.jit(do_not_specialize=["start", "key"])
def round_kernel(
    target,
    source,
    numel,
    columns,
    target_row,
    target_column,
    source_row,
    source_column,
    start,
    down,
    right,
    key,
    DROPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of elements. All int32 wrap around."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    row, column = element // columns, element % columns
    state = start + row.to(tl.int32) * down + column.to(tl.int32) * right
    random = mix(state.to(tl.uint32, bitcast=True), key.to(tl.uint32, bitcast=True)) >> (32 - DROPPED)

    value = tl.load(source + row * source_row + column * source_column, mask=inside)
    if DROPPED == 13:  # fp16's grid is even below 2**-14
        shift = tl.where(tl.abs(value) < 6.103515625e-05, tl.where(value < 0, -6.103515625e-05, 6.103515625e-05), 0.0)
        rounded = add_and_cut(value + shift, random, DROPPED) - shift
    else:
        rounded = add_and_cut(value, random, DROPPED)
    # a NaN is not equal to itself, and its bits may have become a number's
    rounded = tl.where(value == value, rounded, value)
    tl.store(target + row * target_row + column * target_column, rounded.to(target.dtype.element_ty), mask=inside)


@triton.jit
def add_and_cut(value, random, DROPPED: tl.constexpr):
    """Adds to the bits that the target lacks, and sets them to zero."""
    bits = value.to(tl.uint32, bitcast=True) + random
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
