from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_groups import sharding_of
from par_layers import PartialGradientReducer, layer_set
from par_testing import storm

from ..helpers import (
    PRODUCTS,
    assert_layer_equals_one_device,
    every_config,
    filled,
    integers,
    modes,
    numbers,
    run_checks,
)

SIZES = [1, storm(2), 4, 8]  # 4 ranks have every mode of 2


def stack(layers):
    """Linear after linear stays in the residual layout."""
    return nn.Sequential(layers.Linear(16, 32), layers.LayerNorm(32), layers.Linear(32, 16))


class MLP(nn.Module):
    def __init__(self, layers, width, bias=True):
        super().__init__()
        self.expand = layers.ColumnLinear(width, 4 * width, bias)
        self.contract = layers.RowLinear(4 * width, width, bias)

    def forward(self, x):
        return self.contract(functional.gelu(self.expand(x)))


class Attention(nn.Module):
    def __init__(self, layers, width, heads, key_heads):
        super().__init__()
        self.layers, self.head = layers, width // heads
        sizes = [width, key_heads * self.head, key_heads * self.head]
        self.qkv = layers.ColumnLinear(width, sum(sizes), blocks=sizes, unit=self.head)
        self.output = layers.RowLinear(width, width)

    def forward(self, x):
        q, k, v = self.qkv.parts(self.qkv(x))
        return self.output(self.layers.attention(q, k, v, head=self.head, causal=True))


# Equality with one device


@pytest.mark.ranks(SIZES)
def test_every_mode_computes_what_one_device_does():
    """And every way to multiply does all that is asked of it below; on 2 ranks there is none that 4 lack."""
    products = [] if dist.get_world_size() == 2 else PRODUCTS[dist.get_world_size()]
    others = [each for each in every_config() if each not in products]
    for configs, checks in ((products, OF_EVERY_PRODUCT), (others, [])):
        if configs:
            run_checks([check_column_row_and_linear, *checks], configs)


def check_column_row_and_linear(mode):
    x = numbers(8, 4, 16)
    assert_layer_equals_one_device(mode, lambda layers: layers.ColumnLinear(16, 24), x, inner=True)
    assert_layer_equals_one_device(mode, lambda layers: layers.Linear(16, 24, bias=False), x)
    assert_layer_equals_one_device(mode, lambda layers: MLP(layers, 16), x)
    assert_layer_equals_one_device(mode, lambda layers: MLP(layers, 16, bias=False), x)
    assert_layer_equals_one_device(mode, stack, x)


def check_inputs_of_two_and_of_four_dims(mode):
    shapes = [(8, 4, 3, 16)] if mode.by_sequence else [(8, 16), (8, 4, 3, 16)]  # it cuts dim 1, which is no token's
    for shape in shapes:
        assert_layer_equals_one_device(mode, lambda layers: layers.Linear(16, 24), numbers(*shape))
        assert_layer_equals_one_device(mode, lambda layers: MLP(layers, 16), numbers(*shape))


def check_inputs_that_are_not_contiguous(mode):
    for x in (numbers(4, 8, 16).transpose(0, 1), numbers(16, 4, 8).transpose(0, 2)):
        assert not x.is_contiguous()
        assert_layer_equals_one_device(mode, lambda layers: MLP(layers, 16), x)


def check_blocks_are_cut_each_by_itself(mode):
    local = filled(mode.layers.ColumnLinear(16, 48, blocks=3))
    parts = local.parts(local(mode.layers.split(numbers(8, 4, 16))))
    one = filled(layer_set(None).ColumnLinear(16, 48, blocks=3))
    for part, expected in zip(parts, one(numbers(8, 4, 16)).chunk(3, dim=-1), strict=True):
        torch.testing.assert_close(mode.layers.gather(part, inner=True), expected, rtol=1e-10, atol=1e-10)


def check_self_attention(mode):
    """With fewer key heads than heads; with as many, test_models.py has it."""
    assert_layer_equals_one_device(mode, lambda layers: Attention(layers, 32, 8, key_heads=4), numbers(8, 4, 32))


def check_bfloat16_is_close(mode):
    # Every product rounds to 8 bits, and sums over ranks round once more: a few units of 2**-8, of outputs around 1.
    x = numbers(8, 4, 16, dtype=torch.bfloat16)
    parallel, exact = filled(MLP(mode.layers, 16), torch.bfloat16), filled(MLP(layer_set(None), 16))
    y = mode.layers.gather(parallel(mode.layers.split(x)))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact(x.double()), rtol=0.02, atol=0.02)


def check_frozen_weights_and_inputs_without_gradient(mode):
    x = numbers(8, 4, 16)
    frozen = filled(MLP(mode.layers, 16))
    frozen.expand.weight.requires_grad_(False)
    frozen.contract.bias.requires_grad_(False)
    one = filled(MLP(layer_set(None), 16))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    mode.layers.gather(frozen(mode.layers.split(mine))).sum().backward()
    one(other).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10)
    assert frozen.expand.weight.grad is None
    assert frozen.contract.bias.grad is None

    weights_alone = filled(MLP(mode.layers, 16))
    mode.layers.gather(weights_alone(mode.layers.split(x))).sum().backward()
    PartialGradientReducer(weights_alone, mode.groups).handle_gradient()
    for box in sharding_of(weights_alone.expand.weight).boxes:
        expected = one.expand.weight.grad[box.slices]
        torch.testing.assert_close(box.of(weights_alone.expand.weight.grad), expected, rtol=1e-10, atol=1e-10)


def check_a_broadcast_that_writes_to_what_it_sends_is_no_change_for_autograd(mode):
    """As gloo's does with a GPU's tensors. The output of a tanh is saved for its backward, and is broadcast."""
    broadcast = dist.broadcast

    def writing(tensor, *arguments, **keywords):
        work = broadcast(tensor, *arguments, **keywords)
        work.wait()
        tensor.add_(0)
        return work

    if not mode.by_sequence:
        with patch.object(dist, "broadcast", writing):
            make = lambda layers: nn.Sequential(nn.Tanh(), layers.Linear(16, 24))  # noqa: E731
            assert_layer_equals_one_device(mode, make, numbers(8, 16))


@pytest.mark.ranks(4)
def test_fewer_key_and_value_heads_than_ranks():
    one_d, x = {"mode": "1d"}, numbers(8, 4, 32)
    configs = [{**one_d, "kv_heads": each, "sequence_parallel": cut} for each in (1, 2) for cut in (False, True)]
    for mode in modes(configs):
        key_heads = mode.tensor["kv_heads"]
        assert_layer_equals_one_device(mode, lambda layers, heads=key_heads: Attention(layers, 32, 8, heads), x)
        query, key, value = sharding_of(Attention(mode.layers, 32, 8, key_heads).qkv.weight).boxes
        assert [len(box.copies) for box in (query, key, value)] == [1, 4 // key_heads, 4 // key_heads]
        assert key.sum_over == value.sum_over == ("kv_copy",)
        assert mode.layers.local_heads(key_heads) == 1
        assert mode.layers.local_heads(8) == 2


# The gradient of the weight, later


def hooked(layers, layer):
    """A layer of each product, with the list that its hook fills."""
    module = filled(layer(layers))
    later = []
    module.weight_grad_hook = later.append
    return module, later


LAYERS = [
    lambda layers: layers.ColumnLinear(16, 24),
    lambda layers: layers.Linear(16, 24),
    lambda layers: layers.VocabClassifier(16, 30),
]


def check_the_hook_gives_the_same_gradient_later(mode):
    for layer, shape in [
        *((each, (8, 4, 16)) for each in LAYERS),
        *([] if mode.by_sequence else [(LAYERS[1], (8, 16))]),
    ]:
        x = numbers(*shape)
        plain = filled(layer(mode.layers))
        plain(mode.layers.split(x)).nan_to_num(neginf=0.0).sum().backward()
        module, later = hooked(mode.layers, layer)
        fired = []
        module.weight.register_post_accumulate_grad_hook(fired.append)
        mine = x.clone().requires_grad_()
        module(mode.layers.split(mine)).nan_to_num(neginf=0.0).sum().backward()
        assert module.weight.grad is None
        assert mine.grad is not None
        (closure,) = later
        closure(listened=True)
        torch.testing.assert_close(module.weight.grad, plain.weight.grad, rtol=1e-10, atol=1e-10)
        before = module.weight.grad
        for times, listened, expected in ((2, True, 2), (3, False, 2)):
            closure(listened=listened)
            assert len(fired) == expected
            assert module.weight.grad is before
            assert not module.weight.grad.requires_grad
            torch.testing.assert_close(module.weight.grad, times * plain.weight.grad, rtol=1e-10, atol=1e-10)


def check_the_hook_of_a_row_and_of_frozen_weights(mode):
    x = numbers(8, 4, 16)
    plain, late = filled(MLP(mode.layers, 16)), filled(MLP(mode.layers, 16))
    later = []
    late.expand.weight_grad_hook = late.contract.weight_grad_hook = later.append
    for model in (plain, late):
        (model(mode.layers.split(x)) ** 2).sum().backward()
    for closure in later:
        closure()
    for name in ("expand", "contract"):
        here, there = getattr(late, name).weight.grad, getattr(plain, name).weight.grad
        torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-10)
    late.requires_grad_(False)
    late(mode.layers.split(x).requires_grad_()).sum().backward()
    assert len(later) == 2  # a frozen weight has no gradient to compute


# Several layers in a row


def check_layouts_do_not_depend_on_the_order_of_construction(mode):
    last = mode.layers.RowLinear(32, 16)
    first = mode.layers.ColumnLinear(16, 32)
    swapped = filled(nn.ModuleDict({"first": first, "last": last}))
    one = layer_set(None)
    whole = filled(nn.ModuleDict({"first": one.ColumnLinear(16, 32), "last": one.RowLinear(32, 16)}))
    x = numbers(8, 4, 16)
    y = mode.layers.gather(swapped["last"](swapped["first"](mode.layers.split(x))))
    torch.testing.assert_close(y, whole["last"](whole["first"](x)), rtol=1e-10, atol=1e-10)


OF_EVERY_PRODUCT = [
    check_inputs_of_two_and_of_four_dims,
    check_inputs_that_are_not_contiguous,
    check_blocks_are_cut_each_by_itself,
    check_self_attention,
    check_bfloat16_is_close,
    check_frozen_weights_and_inputs_without_gradient,
    check_a_broadcast_that_writes_to_what_it_sends_is_no_change_for_autograd,
    check_the_hook_gives_the_same_gradient_later,
    check_the_hook_of_a_row_and_of_frozen_weights,
    check_layouts_do_not_depend_on_the_order_of_construction,
]


def test_on_one_device_without_groups_it_is_torch():
    layers, x = layer_set(None), numbers(3, 5, 16)
    linear = filled(layers.Linear(16, 24))
    assert torch.equal(linear(x), functional.linear(x, linear.weight, linear.bias))
    assert layers.gather(layers.split(x)) is x
    assert torch.equal(layers.split(integers(9, 2, 3)), integers(9, 2, 3))
    assert "in_features=16, out_features=24, bias=True" in repr(linear)
