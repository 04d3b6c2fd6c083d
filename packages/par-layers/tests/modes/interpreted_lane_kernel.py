"""Products in lanes by the kernel for GPUs, run by Triton's interpreter; run with TRITON_INTERPRET=1."""

import torch

from par_groups import tree
from par_layers.modes.lane_kernel import sum_of_lanes
from par_layers.modes.lanes import sum_of_lanes as by_torch

SHAPES = [(1, 32, 1), (70, 65, 40), (130, 96, 64)]
"""Rows, columns and features of a lane; few fill their tiles."""


def numbers(*shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(rows, columns, features, dtype):
    for lanes in (1, 2, 4, 8):
        x = numbers(rows, features * lanes, seed=0, dtype=dtype)
        weight = numbers(columns, features * lanes, seed=1, dtype=dtype)
        found = sum_of_lanes(x, weight, lanes)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found, by_torch(x, weight, lanes), rtol=4 * eps, atol=16 * eps * features**0.5)
        # Neither strides, nor rows or columns beside it, nor who holds the lanes changes an element.
        assert torch.equal(sum_of_lanes(x, weight.t().contiguous().t(), lanes), found)
        # The first of them, since the interpreter's own matmul has bits that depend on the place in a tile.
        assert torch.equal(sum_of_lanes(x[: -(-rows // 2)], weight, lanes), found[: -(-rows // 2)])
        assert torch.equal(sum_of_lanes(x, weight[: columns // 2], lanes), found[:, : columns // 2])
        for ranks in (2, 4):
            if ranks <= lanes:
                parts = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
                assert torch.equal(tree([sum_of_lanes(*each, lanes // ranks) for each in parts]), found)


for shape in SHAPES:
    for dtype in (torch.float32, torch.float16):  # the interpreter multiplies the bits of bf16 as whole numbers
        check(*shape, dtype)
x, weight = (numbers(64, 256, seed=seed, dtype=torch.float32) for seed in (0, 1))
assert not torch.equal(sum_of_lanes(x, weight, 4), sum_of_lanes(x, weight, 1)), "so the equalities above can fail"
