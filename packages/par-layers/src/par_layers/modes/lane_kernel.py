"""Products in lanes on a GPU: one launch, with the tree over the lanes inside. Importing it needs Triton.

Tiles have one size for every shape, and a program adds up its features in one order. So an element has the same bits
whatever rows, columns and lanes lie next to it, which a library that chooses kernels by shapes does not promise.
"""

# ruff: noqa: ANN001, ANN202, N803, N806, PLR0917 - a kernel is no Python function
# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = tl.constexpr(64)
_COLUMNS = tl.constexpr(64)
_FEATURES = tl.constexpr(32)
"""Sizes of a tile. They are part of the arithmetic: others would give other bits."""


def sum_of_lanes(x: Tensor, weight: Tensor, lanes: int) -> Tensor:
    """Return the tree of the products of lanes of features, each rounded to the dtype of x.

    Args:
        x: Rows [M, K].
        weight: Weight [N, K] of x's dtype, with any strides.
        lanes: Number of lanes that K consists of, a power of two.

    Returns:
        Sums [M, N].
    """
    rows, features = x.shape
    columns = len(weight)
    x, y = x.contiguous(), x.new_empty(rows, columns)
    # Programs that follow one another share the columns of the weight.
    programs = (triton.cdiv(rows, _ROWS.value), triton.cdiv(columns, _COLUMNS.value))
    with torch.cuda.device_of(x):
        _sum_of_lanes[programs](x, weight, y, rows, columns, features // lanes, *weight.stride(), LANES=lanes)
    return y


@triton.jit
def _sum_of_lanes(x, weight, y, rows, columns, features, row_stride, feature_stride, LANES: tl.constexpr):
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS).to(tl.int64)
    column = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS).to(tl.int64)
    left, right = x + row * (features * LANES), weight + column * row_stride
    total = _subtree(left, right, row < rows, column < columns, features, feature_stride, 0, LANES)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(y + row[:, None] * columns + column[None, :], total, mask=inside)


@triton.jit
def _subtree(left, right, in_rows, in_columns, features, stride, FIRST: tl.constexpr, LANES: tl.constexpr):
    """Return the sum of adjacent lanes: each half is added up and rounded first, as on ranks that hold one half."""
    if LANES == 1:
        return _lane(left, right, in_rows, in_columns, features, stride, FIRST)
    HALF: tl.constexpr = LANES // 2
    first = _subtree(left, right, in_rows, in_columns, features, stride, FIRST, HALF)
    second = _subtree(left, right, in_rows, in_columns, features, stride, FIRST + HALF, HALF)
    return (first.to(tl.float32) + second.to(tl.float32)).to(first.dtype)


@triton.jit
def _lane(left, right, in_rows, in_columns, features, stride, FIRST: tl.constexpr):
    """Return the product of one lane, added up in fp32 from its first feature to its last."""
    total = tl.zeros((_ROWS, _COLUMNS), dtype=tl.float32)
    for begin in range(0, features, _FEATURES):
        place = begin + tl.arange(0, _FEATURES)
        inside, at = place < features, (FIRST * features + place).to(tl.int64)
        a = tl.load(left[:, None] + at[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
        b = tl.load(right[None, :] + (at * stride)[:, None], mask=inside[:, None] & in_columns[None, :], other=0.0)
        # Without this argument fp32 is rounded to 10 bits first.
        total = tl.dot(a, b, total, input_precision="ieee")
    return total.to(left.dtype.element_ty)
