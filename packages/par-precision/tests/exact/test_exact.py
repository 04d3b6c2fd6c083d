"""Sums that do not depend on their order: gradients on a grid, and squares in whole numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from par_groups import EXACT_LIMIT, exact_sum, on_grid
from par_precision import ExactSums
from par_precision.exact.grid import GridHooks
from par_precision.exact.squares import exact_squares, squares_of

floats = st.floats(-1, 1, width=32)


@given(st.lists(floats, min_size=1, max_size=40), st.randoms())
def test_sums_of_gradients_on_the_grid_do_not_depend_on_their_order(values, random):
    gradients = list(on_grid(torch.tensor(values) / len(values)))
    total = sum(gradients, torch.zeros((), dtype=torch.float64))
    random.shuffle(gradients)
    middle = random.randrange(len(gradients) + 1)
    zero = torch.zeros((), dtype=torch.float64)
    assert total == sum(gradients[:middle], zero) + sum(gradients[middle:], zero)
    assert total == math.fsum(float(gradient) for gradient in gradients)


@given(floats)
def test_the_grid_changes_a_number_by_at_most_half_a_unit(value):
    on = float(on_grid(torch.tensor(value)))
    assert abs(on - value) <= 2.0**-51
    assert (on * 2.0**50).is_integer()


def test_numbers_off_the_grid_have_sums_that_depend_on_their_order():
    """So the first test can fail."""
    values = [1.0, 2.0**-53, 2.0**-53]
    assert (values[0] + values[1]) + values[2] != values[0] + (values[1] + values[2])
    assert EXACT_LIMIT == 2.0**3  # 53 bits from 2**-50 upwards


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50), st.randoms())
def test_squares_have_the_same_words_in_any_order_and_split(values, random):
    elements = torch.tensor(values)
    top = elements.abs().amax().double()
    words = exact_squares([elements], top)
    random.shuffle(values)
    middle = random.randrange(len(values) + 1)
    parts = [torch.tensor(values[:middle]), torch.tensor(values[middle:])]
    assert torch.equal(words, exact_squares(parts[:1], top) + exact_squares(parts[1:], top))
    # 60 bits below the largest square are kept of each; the result is rounded to fp64 a few times.
    expected = math.fsum(value * value for value in values)
    assert float(squares_of(words, top)) == pytest.approx(expected, rel=1e-14)


def test_squares_of_gradients_below_the_range_of_fp32_powers_are_right():
    values = torch.tensor([3e-40, 4e-40], dtype=torch.float64)
    top = values.abs().amax()
    assert float(squares_of(exact_squares([values], top), top)) == pytest.approx(2.5e-79, rel=1e-12)


def test_squares_of_zeros_are_zero():
    top = torch.zeros((), dtype=torch.float64)
    assert float(squares_of(exact_squares([torch.zeros(3)], top), top)) == 0


def tied(times=1):
    """An embedding and a linear layer with one weight, whose gradients are 1 and 2**-30 in each element."""
    table, head = nn.Embedding(1, 2), nn.Linear(2, 1, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    GridHooks(model, losses=times)
    for _ in range(times):
        first = table(torch.zeros(1, dtype=torch.int64))
        (first.sum() + head(torch.full((1, 2), 2.0**-30)).sum()).backward()
    return table.weight


@pytest.mark.parametrize("times", [1, 3])
def test_each_use_of_a_shared_parameter_is_rounded_alone(times):
    expected = torch.full((1, 2), times * (1 + 2.0**-30), dtype=torch.float64)
    assert torch.equal(tied(times).grad, expected)  # a sum of the uses in fp32 is 1


def test_a_module_with_a_shared_parameter_keeps_its_names():
    table = tied()
    assert isinstance(table, nn.Parameter)
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    names = list(model.state_dict())
    GridHooks(model, losses=1)
    model(torch.zeros(1, dtype=torch.int64))
    assert list(model.state_dict()) == names
    assert model[1].weight is model[0].weight


def test_parameters_in_fp64_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"'1.weight' is torch.float64, .*; exact sums need fp32 or bf16"):
        ExactSums(losses=1, replicas=1).attach(module)
    module[1].requires_grad_(False)
    ExactSums(losses=1, replicas=1).attach(module)


@pytest.mark.parametrize("elements", [100, 20_000])
def test_parts_have_one_exact_sum_in_any_order(elements):
    """Of few elements they are stacked, of many they are added one by one."""
    parts = [torch.randn(elements, generator=torch.Generator().manual_seed(seed)) / 8 for seed in range(5)]
    expected = torch.stack([on_grid(part) for part in parts]).sum(0)
    assert torch.equal(exact_sum(parts), expected)
    assert torch.equal(exact_sum(parts[:2]) + exact_sum(parts[:1:-1]), expected)
    assert torch.equal(exact_sum(parts[:1]), on_grid(parts[0]))
    for large in (8.0, -8.0, torch.nan, torch.inf):
        parts[1][3] = large
        assert not exact_sum(parts)[3].abs() < EXACT_LIMIT
    parts[1][3], parts[2][3] = 7.0, -7.0
    assert exact_sum(parts)[3].abs() >= EXACT_LIMIT  # a partial sum may leave the range, if the whole does not
