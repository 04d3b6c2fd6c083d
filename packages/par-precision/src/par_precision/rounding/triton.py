"""Stochastic rounding on a GPU: the arithmetic of `tiles` as a Triton kernel. Importing it needs Triton.

One launch rounds any number of matrices. A table has a row of numbers for each matrix; each program looks up which
matrix its block belongs to. A matrix that is alone needs no table.
"""

# ruff: noqa: ANN001, ANN201, N803, PLR0124, PLR0917 - a kernel is no Python function
# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .matrices import DROPPED, SPREAD, Matrix, signed

_BLOCK = 4096
"""Number of elements that a program rounds; each thread has 16, which it loads and stores 16 bytes at a time."""
_WARPS = 8
_RIGHT = signed(SPREAD)
"""What the state of the hash grows by from an element to the next of a tensor that is not cut."""
_PART = 256
"""Number of elements at a time of a block that cannot be taken as one."""
_ALIGNED = 16
"""Number of bytes that addresses must be multiples of for loads and stores of 16 bytes."""


def round_matrices_(matrices: Sequence[Matrix]) -> None:
    """Round matrices that are all on one device, with one launch for each dtype of targets."""
    for dtype in DROPPED:
        given = [matrix for matrix in matrices if matrix.target.dtype == dtype]
        if len(given) == 1:
            _round_one_(given[0])
        elif given:
            _round_many_(given)


def _round_one_(matrix: Matrix) -> None:
    target, source = matrix.target, matrix.source
    dropped = DROPPED[target.dtype]
    with torch.cuda.device_of(target):
        round_block[(triton.cdiv(target.numel(), _BLOCK),)](
            target, source, 0, *_arguments(matrix), DROPPED=dropped, BLOCK=_BLOCK, PART=_PART, num_warps=_WARPS
        )


def _round_many_(matrices: Sequence[Matrix]) -> None:
    """Round matrices whose targets have one dtype, with one launch."""
    target = matrices[0].target
    table, blocks = _table(matrices)
    with torch.cuda.device_of(target):
        round_many[(blocks,)](
            table,
            len(matrices),
            DTYPE=tl.bfloat16 if target.dtype == torch.bfloat16 else tl.float16,
            DROPPED=DROPPED[target.dtype],
            FIELDS=table.shape[1],
            BLOCK=_BLOCK,
            PART=_PART,
            num_warps=_WARPS,
        )


def _table(matrices: Sequence[Matrix]) -> tuple[Tensor, int]:
    """Return a table with a row for each matrix, (matrices, fields) in int64 on their device, and the number of blocks.

    A row has the number of the matrix's first block, the addresses of its target and its source, and its `_arguments`.
    """
    rows, blocks = [], 0
    for matrix in matrices:
        arguments = _arguments(matrix)
        rows.append((blocks, matrix.target.data_ptr(), matrix.source.data_ptr(), *arguments))
        blocks += -(-arguments[1] // _BLOCK)
    device = matrices[0].target.device
    # pinned, so that the host need not wait; torch uses the memory for something else only once the copy is done
    table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), blocks


def _arguments(matrix: Matrix) -> tuple[int, ...]:
    """Return the arguments of `round_block` from `layout` to `key`."""
    target, source, first, steps, keys = matrix
    numel, start, key = target.numel(), signed(first * SPREAD + keys[0]), signed(keys[1])
    layout = 2 if (target.data_ptr() | source.data_ptr()) % _ALIGNED == 0 else 1
    if steps is None:
        return layout, numel, numel, 0, 1, 0, 1, start, 0, _RIGHT, key
    columns, strides = target.shape[1], (*target.stride(), *source.stride())
    if columns != numel or strides[1] != 1 or strides[3] != 1:
        layout = 0
    down, right = (signed(step * SPREAD) for step in steps)
    return layout, numel, columns, *strides, start, down, right, key


@triton.jit
def mix(state, key):
    """Compute the hash: `tiles.mix_` on uint32."""
    state ^= state >> 16
    state = state * 0x21F0AAAD + key
    state ^= state >> 15
    return state * 0x735A2D97


@triton.jit(do_not_specialize=["count"])
def round_many(
    table,
    count,
    DTYPE: tl.constexpr,
    DROPPED: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Round this program's block, which belongs to the last matrix in the table that begins at this program or before.

    Args:
        table: Address of the table's first number.
        count: Number of matrices.
        DTYPE: dtype of the targets.
        DROPPED: Number of bits that the targets lack.
        FIELDS: Numbers in a row of the table.
        BLOCK: Number of elements of a block.
        PART: Number of elements at a time of a block that is not aligned.
    """
    program = tl.program_id(0)
    # A binary search for the last matrix whose first block is this program's or an earlier one.
    low = program * 0
    high = low + count - 1
    while low < high:
        middle = (low + high + 1) // 2
        begun = tl.load(table + middle * FIELDS) <= program
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    row = table + low * FIELDS
    round_block(
        tl.load(row + 1).to(tl.pointer_type(DTYPE)),
        tl.load(row + 2).to(tl.pointer_type(tl.float32)),
        tl.load(row).to(tl.int32),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
        tl.load(row + 7),
        tl.load(row + 8),
        tl.load(row + 9),
        tl.load(row + 10).to(tl.int32),
        tl.load(row + 11).to(tl.int32),
        tl.load(row + 12).to(tl.int32),
        tl.load(row + 13).to(tl.int32),
        DROPPED,
        BLOCK,
        PART,
    )


@triton.jit(
    do_not_specialize=[
        "first",
        "layout",
        "numel",
        "columns",
        "target_row",
        "target_column",
        "source_row",
        "source_column",
        "start",
        "down",
        "right",
        "key",
    ]
)
def round_block(
    target,
    source,
    first,
    layout,
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
    PART: tl.constexpr,
):
    """Round this program's block of a matrix. All int32 wrap around.

    Args:
        target: Address of the target's first element.
        source: Address of the source's first element.
        first: Number of the program that has the matrix's first block.
        layout: 2 for a row without gaps at addresses that are multiples of 16, 1 for a row without gaps elsewhere, 0
            for anything else.
        numel: Number of elements of the matrix.
        columns: Number of elements of a row.
        target_row: Distance from a row of the target to the next, in elements.
        target_column: Distance from a column of the target to the next, in elements.
        source_row: Distance from a row of the source to the next, in elements.
        source_column: Distance from a column of the source to the next, in elements.
        start: State of the first element's hash.
        down: Step of the state from a row to the next.
        right: Step of the state from a column to the next.
        key: The second key of the hash.
        DROPPED: Number of bits that the target lacks.
        BLOCK: Number of elements of a block.
        PART: Number of elements at a time of a block that is not aligned.
    """
    begin = (tl.program_id(0) - first).to(tl.int64) * BLOCK
    if (layout != 0) & (begin + BLOCK <= numel):  # neither masks nor divisions
        within = tl.arange(0, BLOCK)
        state = start + begin.to(tl.int32) * right + within * right
        if layout == 2:  # `multiple_of` speaks of the very sum that it is given, so each branch has sums of its own
            values = tl.load(tl.multiple_of(source + begin + within, 16))
            rounded = round_values(values, state, key, DROPPED)
            tl.store(tl.multiple_of(target + begin + within, 16), rounded.to(target.dtype.element_ty))
        else:
            rounded = round_values(tl.load(source + begin + within), state, key, DROPPED)
            tl.store(target + begin + within, rounded.to(target.dtype.element_ty))
    else:
        for part in range(0, BLOCK, PART):  # for a block at once, indices of rows and columns would fill the registers
            column = begin + part + tl.arange(0, PART)
            inside = column < numel
            row = tl.zeros([PART], tl.int64)
            if columns != numel:
                row = column // columns
                column -= row * columns
            state = start + row.to(tl.int32) * down + column.to(tl.int32) * right
            values = tl.load(source + row * source_row + column * source_column, mask=inside, other=0.0)
            rounded = round_values(values, state, key, DROPPED)
            at = target + row * target_row + column * target_column
            tl.store(at, rounded.to(target.dtype.element_ty), mask=inside)


@triton.jit
def round_values(value, state, key, DROPPED: tl.constexpr):
    """Round fp32 values to numbers that the target can represent."""
    random = mix(state.to(tl.uint32, bitcast=True), key.to(tl.uint32, bitcast=True)) >> (32 - DROPPED)
    if DROPPED == 13:  # fp16's grid is even below 2**-14
        shift = tl.where(tl.abs(value) < 6.103515625e-05, tl.where(value < 0, -6.103515625e-05, 6.103515625e-05), 0.0)
        rounded = add_and_cut(value + shift, random, DROPPED) - shift
    else:
        rounded = add_and_cut(value, random, DROPPED)
    # a NaN is not equal to itself, and its bits may have become a number's
    return tl.where(value == value, rounded, value)


@triton.jit
def add_and_cut(value, random, DROPPED: tl.constexpr):
    """Add a random number to the bits that the target lacks, and set these to zero."""
    bits = value.to(tl.uint32, bitcast=True) + random
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
