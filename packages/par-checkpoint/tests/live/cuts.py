"""Ways to shard a tensor over ranks, and tensors that are sharded so."""

import math
import random

import torch

from par_groups import Box, Rectangle, Sharding, cut, whole

Shape = tuple[int, ...]

KINDS = (
    *("rows", "columns", "grid", "flat", "flat rows", "whole", "pairs", "some", "blocks"),
    *("one", "strided", "uneven"),
)


def rectangles(kind: str, shape: Shape, world: int, rng: random.Random) -> list[list[Rectangle]]:
    """The rectangles of a tensor that each rank holds."""
    full = (0,) * len(shape), shape

    def part(dim: int, i: int, n: int, within: Rectangle = full) -> Rectangle:
        start, size = list(within[0]), list(within[1])
        low, high = i * size[dim] // n, (i + 1) * size[dim] // n
        start[dim], size[dim] = start[dim] + low, high - low
        return tuple(start), tuple(size)

    ranks = range(world)
    numel = math.prod(shape)
    if not shape or kind == "whole":
        return [[full] for _ in ranks]
    if kind == "one":
        owner = rng.randrange(world)
        return [[full] if rank == owner else [] for rank in ranks]
    if kind == "some":
        owners = rng.sample(ranks, max(world // 2, 1))
        return [[full] if rank in owners else [] for rank in ranks]
    if kind == "pairs":
        halves = max(world // 2, 1)
        return [[part(0, rank % halves, halves)] for rank in ranks]
    if kind == "columns" and len(shape) > 1:
        return [[part(1, rank, world)] for rank in ranks]
    if kind == "grid" and len(shape) > 1 and world % 2 == 0:
        return [[part(1, rank % 2, 2, part(0, rank // 2, world // 2))] for rank in ranks]
    if kind == "blocks":  # some elements are on two ranks
        return [
            [part(0, (2 * rank) % (2 * world), 2 * world), part(0, (2 * rank + 5) % (2 * world), 2 * world)]
            for rank in ranks
        ]
    if kind == "strided":
        return [[part(0, each, 3 * world) for each in range(rank, 3 * world, world)] for rank in ranks]
    if kind in ("flat", "flat rows", "uneven") and numel >= world:
        edges = [0, *sorted(rng.sample(range(1, numel), world - 1)), numel] if numel > world else [*range(world), numel]
        found = []
        for rank in ranks:
            if kind == "flat rows" and world % 2 == 0:
                start, size = part(0, rank % 2, 2)
                count, parts = math.prod(size), world // 2
                steps = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
                if not count:
                    found.append([])
                    continue
                rows = Sharding(shape, (Box(start, size, 0, steps, (0,)),))
                sharding = cut(rows, rank // 2 * count // parts, (rank // 2 + 1) * count // parts)
            else:
                sharding = cut(whole(shape, (0,)), edges[rank], edges[rank + 1])
            found.append([(box.start, box.size) for box in sharding.boxes])
        return found
    return [[part(0, rank, world)] for rank in ranks]


def sharded(shape: Shape, held: list[Rectangle], rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, Sharding]:
    """A local tensor of some rectangles, one after the other, and its sharding; it has no values yet."""
    boxes, begin = [], 0
    for start, size in held:
        if math.prod(size):
            steps = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
            boxes.append(Box(start, size, begin, steps, (rank,)))
            begin += math.prod(size)
    return torch.full((begin,), -1, dtype=dtype), Sharding(shape, tuple(boxes))


def values(shape: Shape, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A full tensor, whose elements differ."""
    return (torch.arange(math.prod(shape), dtype=torch.float32) + 1000 * number).view(shape).to(dtype)


def lacking(shape: Shape, held: list[Rectangle], wanted: list[Rectangle]) -> int:
    """The number of elements in `wanted` that are not in `held`."""
    has, wants = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for mask, boxes in ((has, held), (wants, wanted)):
        for start, size in boxes:
            mask[tuple(slice(low, low + n) for low, n in zip(start, size, strict=True))] = True
    return int((wants & ~has).sum())
