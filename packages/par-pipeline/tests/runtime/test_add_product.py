"""A product that is added in place, whole and in blocks."""

import pytest
import torch

from par_pipeline.runtime.add_product import add_product, is_better_in_blocks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Sums of up to 200 products of standard normals, whose order differs; bfloat16 keeps 8 bits of about 50."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 47, 48, 64, 127, 128, 200])
@pytest.mark.parametrize("shape", [(512, 256), (500, 300), (128, 1024), (64, 32), (3, 5)], ids=str)
def test_it_adds_the_product(dtype, rows, shape):
    torch.manual_seed(0)
    n, k = shape
    total, left, right = (torch.randn(size, dtype=torch.float64) for size in ((n, k), (rows, n), (rows, k)))
    expected = total.to(dtype).double() + left.to(dtype).double().t() @ right.to(dtype).double()
    given = total.to(dtype)
    add_product(given, left.to(dtype), right.to(dtype))
    torch.testing.assert_close(given.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("strided", ["total", "left", "right"])
def test_in_blocks_the_operands_may_lie_in_any_order(strided):
    torch.manual_seed(0)
    sizes = {"total": (512, 256), "left": (64, 512), "right": (64, 256)}
    made = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    expected = made["total"] + made["left"].t() @ made["right"]
    made[strided] = made[strided].t().contiguous().t()
    assert is_better_in_blocks(made["total"], 64)
    add_product(**made)
    torch.testing.assert_close(made["total"], expected, rtol=0, atol=1e-12)  # float64; the order of 64 summands


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "blocks"),
    [
        ((512, 256), torch.float32, 64, True),
        ((512, 256), torch.float64, 127, True),
        ((512, 256), torch.float32, 47, False),
        ((512, 256), torch.float32, 128, False),
        ((512, 256), torch.bfloat16, 64, False),
        ((500, 300), torch.float32, 64, False),  # no whole number of blocks
        ((256, 256), torch.float32, 64, False),  # small enough for the caches
    ],
)
def test_blocks_are_for_large_matrices_and_few_rows(shape, dtype, rows, blocks):
    assert is_better_in_blocks(torch.empty(shape, dtype=dtype), rows) is blocks
