import pytest
import torch
from torch import nn
from torch.nn import functional

from par_groups import WeightGradient, weight_and_hook


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
