import pytest
import torch
from torch import nn
from torch.nn import functional

from par_groups import WeightGradient, add_product, weight_and_hook
from par_groups.sharding.weight_gradients import is_better_in_blocks


def gradient_of(weight):
    """One that is left.T @ right."""
    torch.manual_seed(1)
    left, right = torch.randn(5, weight.shape[0]), torch.randn(5, weight.shape[1])
    return WeightGradient(weight, lambda: left.t() @ right), left.t() @ right


def test_a_gradient_is_set_and_then_added():
    weight = nn.Parameter(torch.randn(3, 2))
    later, expected = gradient_of(weight)
    later()
    assert torch.equal(weight.grad, expected)
    later()
    assert torch.equal(weight.grad, 2 * expected)


@pytest.mark.parametrize("listened", [True, False])
def test_who_listens_hears_of_each_gradient_once(listened):
    weight = nn.Parameter(torch.randn(3, 2))
    heard = []
    weight.register_hook(lambda gradient: heard.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda parameter: heard.append("accumulated"))
    weight.grad = torch.ones(3, 2)
    later, expected = gradient_of(weight)
    later(listened=listened)
    assert heard == (["tensor", "accumulated"] if listened else [])
    assert torch.equal(weight.grad, 1 + expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_product_is_added_in_place_where_the_dtypes_allow(dtype):
    weight = nn.Parameter(torch.randn(3, 2, dtype=dtype))
    left, right = torch.randn(5, 3), torch.randn(5, 2)
    computed = []

    def compute():
        computed.append(True)
        return left.t() @ right

    weight.grad = torch.ones_like(weight)
    place = weight.grad.data_ptr()
    WeightGradient(weight, compute, (left, right))(listened=False)
    assert weight.grad.data_ptr() == place
    assert computed == ([] if dtype == torch.float32 else [True])
    expected = torch.ones(3, 2).addmm_(left.t(), right)
    torch.testing.assert_close(weight.grad.float(), expected, atol=0 if dtype == torch.float32 else 0.05, rtol=0)


def test_without_a_hook_a_layer_multiplies_with_its_parameter():
    layer = nn.Linear(2, 3)
    assert weight_and_hook(layer) == (layer.weight, None)
    other = layer.weight.bfloat16()
    assert weight_and_hook(layer, other) == (other, None)


def test_a_frozen_weight_puts_nothing_off():
    layer = nn.Linear(2, 3).requires_grad_(False)
    layer.weight_grad_hook = pytest.fail
    assert weight_and_hook(layer) == (layer.weight, None)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_put_off_gradient_is_the_parameters_and_its_hooks_wait(dtype):
    layer = nn.Linear(2, 3)
    put_off, heard = [], []
    layer.weight_grad_hook = put_off.append
    layer.weight.register_post_accumulate_grad_hook(heard.append)
    weight, hook = weight_and_hook(layer, layer.weight.to(dtype) if dtype else None)
    x = torch.randn(5, 2, dtype=weight.dtype)
    y = functional.linear(x, weight, layer.bias.to(weight.dtype))
    y.sum().backward()
    hook(WeightGradient(weight, lambda: weight.grad))
    assert weight is not layer.weight
    assert (weight.data_ptr() == layer.weight.data_ptr()) is (dtype is None)
    assert layer.weight.grad is None
    assert heard == []
    (later,) = put_off
    assert later.weight is layer.weight
    later()
    assert heard == [layer.weight]
    assert torch.equal(layer.weight.grad, weight.grad.float())


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Sums of up to 200 products of standard normals, whose order differs; bfloat16 keeps 8 bits of about 50."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("shape", "rows"),
    [  # around the numbers of rows that are taken in blocks, and shapes that never are
        *(((512, 256), rows) for rows in (1, 47, 48, 127, 128)),
        ((128, 1024), 48),
        ((500, 300), 48),
        ((64, 32), 200),
        ((3, 5), 47),
    ],
    ids=str,
)
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


def test_a_gradient_that_nobody_waits_for_is_added_in_blocks_where_that_is_quicker():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(512, 256, dtype=torch.float64))
    left, right = torch.randn(64, 512).double(), torch.randn(64, 256).double()
    weight.grad = torch.ones_like(weight)
    with torch.profiler.profile() as profile:
        WeightGradient(weight, pytest.fail, (left, right))(listened=False)
    assert "aten::baddbmm_" in {event.key for event in profile.key_averages()}
    torch.testing.assert_close(weight.grad, 1 + left.t() @ right, rtol=0, atol=1e-12)  # the order of 64 summands
