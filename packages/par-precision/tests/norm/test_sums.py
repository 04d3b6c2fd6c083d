"""Sums in fp64."""

import math

import pytest
import torch

from par_precision.norm import sums as _sums
from par_precision.norm.sums import largest, sum_of_powers

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensors(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def exactly(given, power):
    return math.fsum(abs(x) ** power for each in given for x in each.flatten().tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
def test_sums_have_the_digits_of_fp64(dtype, power):
    given = tensors(dtype, (123,), (15, 17), (), (0,), (3, 4, 5), (200, 77))
    total = sum_of_powers(given, power, CPU)
    assert total.dtype == torch.float64
    assert abs(total.item() / exactly(given, power) - 1) < 1e-13  # rounding errors of some thousand fp64 additions


def test_tensors_larger_than_a_block_and_runs_of_small_ones_are_summed_once(monkeypatch):
    monkeypatch.setattr(_sums, "_BLOCK", 64)
    monkeypatch.setattr(_sums, "_TOGETHER", 32)
    shapes = [(5,), (31,), (32,), (33,), (64,), (65,), (200,), (1,), (16, 2), (16, 2), (0,), (129,)]
    given = tensors(torch.float32, *shapes)
    assert sum_of_powers(given, 2.0, CPU).item() == pytest.approx(exactly(given, 2.0), rel=1e-14)
    ones = [torch.ones(shape) for shape in shapes]
    assert sum_of_powers(ones, 2.0, CPU) == sum(each.numel() for each in ones)


def test_dtypes_and_strides_may_be_mixed():
    given = [torch.full((3, 5), 2.0).t(), torch.ones(4, dtype=torch.bfloat16), torch.ones(6, dtype=torch.float64)[::2]]
    assert sum_of_powers(given, 2.0, CPU) == 60 + 4 + 3
    alike = [torch.full((5,), 3.0, dtype=dtype) for dtype in DTYPES]
    assert sum_of_powers([*alike, torch.full((10,), 2.0)[::2]], 2.0, CPU) == 4 * 45 + 20


def test_squares_beyond_fp32_are_finite():
    assert sum_of_powers([torch.full((3,), 1e30)], 2.0, CPU).item() == pytest.approx(3e60, rel=1e-7)  # 1e30 in fp32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_seen_anywhere(bad, dtype):
    for place in (0, 130, 299):
        given = [torch.zeros(100, dtype=dtype) for _ in range(3)]
        given[place // 100][place % 100] = bad
        assert not sum_of_powers(given, 2.0, CPU).isfinite()
        assert largest(given, CPU) == math.inf


def test_nothing_sums_to_zero():
    for given in ([], [torch.zeros(0)]):
        assert sum_of_powers(given, 2.0, CPU) == 0
        assert sum_of_powers(given, 3.0, CPU) == 0
        assert largest(given, CPU) == 0


def test_the_largest_is_by_magnitude():
    assert largest([torch.tensor([1.0, -7.5]), torch.tensor([3.0])], CPU) == 7.5
