"""Seconds to plan a save of 2,816 ranks and 1,000 tensors, on one of them, from everybody's claims.

Only the ranks are simulated: claims, files and blocks are those of a model of 75 billion parameters, or a third of one
and its optimizer. Run as `python tools/bench/checkpoint_plan.py`; writes docs/benchmarks/checkpoint_plan.md and .json.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from _table import write

from par_checkpoint.plan.claims import Claims, check_covered, merge
from par_checkpoint.plan.files import data_blocks, lay_out
from par_checkpoint.plan.plan import Planner
from par_groups import cut, whole

RANKS, TENSORS, TENSOR, PIPELINE = 2816, 1000, 8, 4
Everybody = list[tuple[Sequence[int], Claims]]
Index = tuple[int, ...]
Rows = dict[int, list[list[int]]]

SHAPES: list[Index] = [(8192, 8192), (28672, 8192), (8192,), (8192,)]


def main() -> None:
    """Plans every layout once."""
    layouts: dict[str, Callable[[], Everybody]] = {
        "FSDP 2816, rows": rows,
        "TP 8 x FSDP 352, columns and rows": columns_and_rows,
        "TP 8 x PP 4 x DP 88, ZeRO-1 cuts of the optimizer": flat_cuts,
    }
    torch.set_num_threads(1)
    note = (
        f"{RANKS:,} ranks, {TENSORS:,} tensors, blocks of 4 MiB; rank 0 puts all claims together, checks that they "
        "cover every element, lays out files and deals out the blocks. Later saves of the same layout look it up."
    )
    table = [planned(name, make()) for name, make in layouts.items()]
    write("checkpoint_plan", "Planning a save", table, note)


def planned(name: str, claims: Everybody) -> dict[str, object]:
    """One row: seconds of each step."""
    begin = time.perf_counter()
    tensors = merge(claims)
    merged = time.perf_counter()
    check_covered(tensors)
    covered = time.perf_counter()
    files = lay_out(tensors, 5 * 10**9)
    blocks = list(data_blocks(files, tensors))
    laid_out = time.perf_counter()
    plan = Planner(tensors, 0, RANKS).save(blocks)
    end = time.perf_counter()
    return {
        "layout": name,
        "boxes": f"{sum(map(len, tensors)):,}",
        "blocks": f"{len(blocks):,}",
        "merge s": f"{merged - begin:.2f}",
        "coverage s": f"{covered - merged:.2f}",
        "files s": f"{laid_out - covered:.2f}",
        "plan s": f"{end - laid_out:.2f}",
        "total s": f"{end - begin:.2f}",
        "blocks of rank 0": len(plan.mine),
    }


def rows() -> Everybody:
    """Every tensor cut by rows over all ranks, as torch.chunk does."""
    shapes = [SHAPES[i % len(SHAPES)] for i in range(TENSORS)]
    every: Everybody = []
    for rank in range(RANKS):
        held: Rows = {}
        for number, shape in enumerate(shapes):
            add(held, number, chunk(shape, 0, RANKS, rank))
        every.append(([rank], claims_of(named(shapes), {"model:": held})))
    return every


def columns_and_rows() -> Everybody:
    """Matrices cut by columns over 8 ranks, and each part by rows over 352; vectors by rows alone, in 8 replicas."""
    shapes = [SHAPES[i % len(SHAPES)] for i in range(TENSORS)]
    every: Everybody = []
    for rank in range(RANKS):
        held: Rows = {}
        for number, shape in enumerate(shapes):
            start, size = chunk(shape, 0, RANKS // TENSOR, rank // TENSOR)
            if len(shape) == 2:
                (_, column), (_, width) = chunk(shape, 1, TENSOR, rank % TENSOR)
                start, size = (start[0], column), (size[0], width)
            add(held, number, (start, size))
        every.append(([rank], claims_of(named(shapes), {"model:": held})))
    return every


def flat_cuts() -> Everybody:
    """A third of the tensors are parameters, in 88 replicas; the others their slots, a flat buffer cut into 88."""
    shapes = [SHAPES[i % len(SHAPES)] for i in range(TENSORS // 3)]
    replicas, each = RANKS // (TENSOR * PIPELINE), -(-len(shapes) // PIPELINE)
    every: Everybody = []
    for part in range(TENSOR * PIPELINE):
        column, stage = part % TENSOR, part // TENSOR
        mine = dict(list(named(shapes).items())[stage * each : (stage + 1) * each])
        boxes = [chunk(shape, len(shape) - 1, TENSOR, column) for shape in mine.values()]
        model: Rows = {}
        for number, box in enumerate(boxes):
            add(model, number, box)
        for replica in range(replicas):
            slots = flat_part(boxes, replica, replicas)
            parts = {"model:": model, "optimizer:exp_avg.": slots, "optimizer:exp_avg_sq.": slots}
            every.append(([replica * TENSOR * PIPELINE + part], claims_of(mine, parts)))
    return every


def named(shapes: Sequence[Index]) -> dict[str, Index]:
    """Shapes by name."""
    return {f"layer.{number}.weight": shape for number, shape in enumerate(shapes)}


def chunk(shape: Sequence[int], dim: int, parts: int, part: int) -> tuple[Index, Index]:
    """Start and size of a part, as torch.chunk cuts; the last ones may be empty."""
    length = -(-shape[dim] // parts)
    first = min(part * length, shape[dim])
    start, size = [0] * len(shape), list(shape)
    start[dim], size[dim] = first, min(length, shape[dim] - first)
    return tuple(start), tuple(size)


def flat_part(boxes: Sequence[tuple[Index, Index]], part: int, parts: int) -> Rows:
    """Part of the flat buffer of some boxes, as rectangles of each."""
    numels = [math.prod(size) for _, size in boxes]
    length = -(-sum(numels) // parts)
    found: Rows = {}
    begin = 0
    for number, ((start, size), numel) in enumerate(zip(boxes, numels, strict=True)):
        low, high = max(part * length - begin, 0), min((part + 1) * length - begin, numel)
        if low < high:
            for box in cut(whole(size, ()), low, high).boxes:
                add(found, number, (tuple(a + b for a, b in zip(start, box.start, strict=True)), box.size))
        begin += numel
    return found


def add(rows: Rows, number: int, box: tuple[Index, Index]) -> None:
    """Notes a box, unless it is empty."""
    if 0 not in box[1]:
        rows.setdefault(len(box[0]), []).append([number, *box[0], *box[1]])


def claims_of(shapes: Mapping[str, Index], parts: Mapping[str, Rows]) -> Claims:
    """What a rank holds of parameters and their slots, each of which may be cut in its own way.

    Args:
        shapes: By parameter's name.
        parts: By prefix of the key: the boxes, by the parameter's number.
    """
    tensors = []
    boxes: Rows = {}
    for offset, (prefix, rows) in enumerate(parts.items()):
        dtype = torch.bfloat16 if prefix.startswith("model") else torch.float32
        tensors += [(prefix + name, dtype, shape) for name, shape in shapes.items()]
        for dims, each in rows.items():
            boxes.setdefault(dims, []).extend([offset * len(shapes) + number, *box] for number, *box in each)
    return Claims(tensors=tuple(tensors), rows={dims: torch.tensor(each) for dims, each in boxes.items()})


if __name__ == "__main__":
    main()
