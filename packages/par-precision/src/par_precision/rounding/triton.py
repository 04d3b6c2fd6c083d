"""Stochastic rounding on a GPU: `_rounding`'s arithmetic as a Triton kernel. Whoever imports this has Triton.

One launch rounds any number of matrices: a table has a row of numbers for each, and each program looks up whose block
it rounds. A matrix that is alone needs no table.
"""

# ruff: noqa: ANN001, N803, PLR0124, PLR0917 - a kernel is no Python function
# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding import DROPPED, SPREAD, Matrix, signed

_BLOCK = 4096
"""Elements a program; a thread has 16, which it loads and stores by 16 bytes."""
_WARPS = 8
_PART = 256
_ALIGNED = 16
"""Bytes that addresses must be multiples of for that."""
_RIGHT = signed(SPREAD)


def round_matrices_(matrices: Sequence[Matrix]) -> None:
    """Rounds matrices that are all on one device, with one launch for each dtype of targets."""
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
            target, source, 0, *_numbers(matrix), DROPPED=dropped, BLOCK=_BLOCK, PART=_PART, num_warps=_WARPS
        )


def _round_many_(matrices: Sequence[Matrix]) -> None:
    """Those of one dtype."""
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
    """A row for each matrix, (matrices, fields) in int64 on their device; and the number of blocks.

    A row has the number of the matrix's first block, the addresses of its target and its source, and its `_numbers`.
    """
    rows, blocks = [], 0
    for matrix in matrices:
        numbers = _numbers(matrix)
        rows.append((blocks, matrix.target.data_ptr(), matrix.source.data_ptr(), *numbers))
        blocks += -(-numbers[1] // _BLOCK)
    device = matrices[0].target.device
    # from pinned memory, so that the host need not wait; torch uses that again once the copy is done
    table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), blocks


def _numbers(matrix: Matrix) -> tuple[int, ...]:
    """What kernels are told: the arguments of `round_block` from `layout` on."""
    target, source, first, steps, keys = matrix
    start, key, numel = signed(first * SPREAD + keys[0]), signed(keys[1]), target.numel()
    row = 2 if (target.data_ptr() | source.data_ptr()) % _ALIGNED == 0 else 1
    if steps is None:
        return row, numel, numel, 0, 1, 0, 1, start, 0, _RIGHT, key
    columns, strides = target.shape[1], (*target.stride(), *source.stride())
    layout = row if columns == numel and strides[1] == strides[3] == 1 else 0
    down, right = (signed(step * SPREAD) for step in steps)
    return layout, numel, columns, *strides, start, down, right, key


@triton.jit
def mix(state, key):
    """The hash: `_rounding._mix_` on uint32."""
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
    """A block of the matrix that is the last to begin at this program or before."""
    program = tl.program_id(0)
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
    """This program's block of a matrix. All int32 wrap around.

    Args:
        target: Address of the first element.
        source: The same.
        first: The program that has its first block.
        layout: 2 for a row without gaps at addresses that are multiples of 16, 1 for another such row, else 0.
        numel: Elements.
        columns: Elements of a row.
        target_row: From a row to the next, as all such in elements.
        target_column: From a column to the next.
        source_row: The same.
        source_column: The same.
        start: State of the first element's hash.
        down: What a row adds to the state.
        right: What a column adds.
        key: The second key.
        DROPPED: Bits that the target lacks.
        BLOCK: Elements of a block.
        PART: Elements at a time of a block that is not aligned.
    """
    begin = (tl.program_id(0) - first).to(tl.int64) * BLOCK
    if (layout != 0) & (begin + BLOCK <= numel):  # neither masks nor divisions
        within = tl.arange(0, BLOCK)
        state = start + begin.to(tl.int32) * right + within * right
        if layout == 2:  # `multiple_of` says so of the very sum that it is given, so each branch has its own
            values = tl.load(tl.multiple_of(source + begin + within, 16))
            rounded = round_values(values, state, key, DROPPED)
            tl.store(tl.multiple_of(target + begin + within, 16), rounded.to(target.dtype.element_ty))
        else:
            rounded = round_values(tl.load(source + begin + within), state, key, DROPPED)
            tl.store(target + begin + within, rounded.to(target.dtype.element_ty))
    else:
        for part in range(0, BLOCK, PART):  # all at once, the numbers of rows and columns would fill the registers
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
    """fp32 numbers that the target can hold."""
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
    """Adds to the bits that the target lacks, and sets them to zero."""
    bits = value.to(tl.uint32, bitcast=True) + random
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
