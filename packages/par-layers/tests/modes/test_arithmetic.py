import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_groups import sharding_of
from par_layers import PartialGradientReducer, layer_set
from par_layers.examples import GPT, ViT
from par_layers.modes.arithmetic import in_autocast_dtype

from ..helpers import (
    FROM_4,
    PRODUCTS,
    assert_layer_equals_one_device,
    filled,
    in_the_typical_modes,
    integers,
    modes,
    numbers,
    run_checks,
)

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
"""Of products and activations; in fp32, where sums over tokens and ranks round as often, four of them."""


class MLP(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.expand = layers.ColumnLinear(width, 4 * width)
        self.contract = layers.RowLinear(4 * width, width)

    def forward(self, x):
        return self.contract(functional.gelu(self.expand(x)))


LINEARS = [  # and whether they lead to the inner layout
    (lambda layers: layers.Linear(16, 24), False),
    (lambda layers: layers.ColumnLinear(16, 24), True),
    (lambda layers: MLP(layers, 16), False),
]


# Each precision: whole models


def gpt(layers, **options):
    return filled(GPT(layers, 30, 16, 4, 1, 12, **options), torch.float32)


def tokens():
    """Ids and targets, some of them ignored."""
    ids, target = integers(30, 8, 8), integers(30, 8, 8, seed=8)
    target[0, :3] = -100
    return ids, target


def assert_equal_up_to_rounding(mode, parallel, whole, dtype):
    """The gradients of each parameter, in the norm.

    One device's own gradients are up to 5 roundings off fp64; ours may be off by as much in the other direction.
    """
    of_whole = dict(whole.named_parameters())
    names = [name for name, _ in parallel.named_parameters()]
    squares = torch.zeros(len(names), dtype=torch.float64)  # of the differences, each element's from one of its owners
    for number, (name, parameter) in enumerate(parallel.named_parameters()):
        expected = of_whole[name].grad
        assert parameter.grad.dtype == expected.dtype == parameter.dtype
        for box in sharding_of(parameter).boxes:
            if box.owns(dist.get_rank(), range(dist.get_world_size())):
                squares[number] += (box.of(parameter.grad).double() - expected[box.slices].double()).square().sum()
    dist.all_reduce(squares)
    for name, square in zip(names, squares, strict=True):
        off = square.sqrt() / of_whole[name].grad.double().norm()
        assert off < 10 * ROUNDING[dtype], f"{mode.tensor}: the gradient of {name} is off by {off:.1e}"


def check_model(mode, parallel, whole, batch, dtype, *, autocast=True):
    """One forward and backward: the loss and the gradients."""
    losses = []
    for model in (whole, parallel):
        torch.manual_seed(1)  # of dropout
        with torch.autocast("cpu", dtype, enabled=autocast):
            losses.append(model.loss(*batch))
        losses[-1].backward()
    PartialGradientReducer(parallel, mode.groups).handle_gradient()
    assert losses[1].dtype == torch.float32
    # Logits, around 1, are off by a rounding or two, and their differences' mean over the tokens by less than one.
    torch.testing.assert_close(losses[1], losses[0], rtol=ROUNDING[dtype], atol=0)
    assert_equal_up_to_rounding(mode, parallel, whole, dtype)


@pytest.mark.storm
@pytest.mark.ranks(FROM_4)
@in_the_typical_modes
def test_models_are_as_exact_as_on_one_device(configs):
    run_checks(
        [
            check_gpt_in_fp32,
            check_gpt_under_autocast,
            check_vit_under_autocast,
            check_gpt_with_all_weights_in_half_precision,
        ],
        configs[dist.get_world_size()],
    )


def check_gpt_in_fp32(mode):
    parallel, whole = gpt(mode.layers), gpt(layer_set(None))
    check_model(mode, parallel, whole, tokens(), torch.float32, autocast=False)


def check_gpt_under_autocast(mode):
    options = {"tied": True, "dropout": 0.2}
    check_model(mode, gpt(mode.layers, **options), gpt(layer_set(None), **options), tokens(), torch.bfloat16)
    if dist.get_world_size() == 4:
        check_model(mode, gpt(mode.layers), gpt(layer_set(None)), tokens(), torch.float16)


def check_vit_under_autocast(mode):
    batch = numbers(8, 3, 2, 14, dtype=torch.float32), integers(5, 8)
    parallel, whole = (
        filled(ViT(layers, 2, 8, 16, 4, 1, 5), torch.float32) for layers in (mode.layers, layer_set(None))
    )
    check_model(mode, parallel, whole, batch, torch.bfloat16)


def check_gpt_with_all_weights_in_half_precision(mode):
    dtype = {4: torch.float16, 8: torch.bfloat16}[dist.get_world_size()]
    parallel, whole = gpt(mode.layers, tied=True).to(dtype), gpt(layer_set(None), tied=True).to(dtype)
    check_model(mode, parallel, whole, tokens(), dtype, autocast=False)


# Half precision: layers


@pytest.mark.ranks([1, *FROM_4])
def test_layers_in_half_precision_and_with_a_linear_of_the_users():
    run_checks(
        [
            check_layers_under_autocast_have_the_dtypes_and_numbers_of_one_device,
            check_autocast_leaves_fp64_alone,
            check_the_loss_in_parts_is_the_same_under_autocast,
            check_weight_gradients_that_are_put_off_under_autocast,
            check_a_linear_of_the_users_is_refused_where_products_take_several_ranks,
        ],
        PRODUCTS[dist.get_world_size()],
    )


def check_layers_under_autocast_have_the_dtypes_and_numbers_of_one_device(mode):
    dtype = torch.bfloat16
    exact = 16 * ROUNDING[dtype]  # gradients of biases are sums of 32 numbers around 1, each rounded
    for given, linears in ((torch.float32, LINEARS), (dtype, LINEARS[-1:])):  # also of the weights
        x = numbers(8, 4, 16, dtype=given)
        with torch.autocast("cpu", dtype):  # backward too
            for make, inner in linears:
                assert_layer_equals_one_device(mode, make, x, inner=inner, exact=exact)
                assert filled(make(layer_set(None)), given)(x).dtype == dtype
            logits = filled(mode.layers.Classifier(16, 5), given)(mode.layers.split(x))
            assert logits.dtype == dtype
            for make in (lambda layers: layers.LayerNorm(16), lambda layers: layers.RMSNorm(16)):
                assert_layer_equals_one_device(mode, make, x, exact=exact)
                assert filled(make(layer_set(None)), given)(x).dtype == torch.float32


def check_autocast_leaves_fp64_alone(mode):
    with torch.autocast("cpu", torch.bfloat16):
        assert_layer_equals_one_device(mode, lambda layers: MLP(layers, 16), numbers(8, 4, 16))


def check_the_loss_in_parts_is_the_same_under_autocast(mode):
    x, target = numbers(8, 8, 16, dtype=torch.float32), tokens()[1]
    results = []
    for in_parts in (False, True):
        head = filled(mode.layers.VocabClassifier(16, 30), x.dtype)
        local = mode.layers.split(x).detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if in_parts:
                loss = mode.layers.linear_cross_entropy(local, head, target, classes=30, chunks=2)
            else:
                loss = mode.layers.cross_entropy(head(local), target, classes=30)
        loss.backward()
        results.append((loss.detach(), local.grad, head.weight.grad))
    for whole, part in zip(*results, strict=True):
        assert whole.dtype == part.dtype == torch.float32
        assert (whole - part).norm() < 2**-7 * whole.norm()  # weight gradients are rounded a part at a time, and in sum


def check_weight_gradients_that_are_put_off_under_autocast(mode):
    x = numbers(8, 4, 16, dtype=torch.float32)
    for make in (lambda layers: layers.ColumnLinear(16, 24), lambda layers: layers.VocabClassifier(16, 32)):
        later, plain, late = [], filled(make(mode.layers), x.dtype), filled(make(mode.layers), x.dtype)
        late.weight_grad_hook = later.append
        with torch.autocast("cpu", torch.bfloat16):
            for layer in (plain, late):
                layer(mode.layers.split(x)).float().square().sum().backward()
        (closure,) = later
        assert closure.weight is late.weight
        for times, listened in ((1, True), (2, True), (3, False)):
            closure(listened=listened)
            assert late.weight.grad.dtype == torch.float32
            assert torch.equal(late.weight.grad, sum([plain.weight.grad] * times))


@pytest.mark.parametrize(("device", "autocast"), [("cpu", False), ("meta", False), ("meta", True)])
def test_operands_are_as_they_are_without_autocast(device, autocast):
    x, weight = torch.empty(2, 3, device=device), torch.empty(4, 3, device=device)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = in_autocast_dtype(x, weight, None)
    assert given[0] is x
    assert given[1] is weight


# A function in the place of torch's product


class Counted:
    """torch's product of a scaled weight; knows what it was given."""

    def __init__(self, scale=1.0):
        self.scale, self.given = scale, []

    def __call__(self, x, weight, bias):
        self.given.append((x, weight, bias))
        return functional.linear(x, self.scale * weight, bias)


class Module(nn.Module):
    """A function that is a module is registered, not merely set."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def replaced(module, linear):
    """The module, with this function in each of its linears."""
    for each in module.modules():
        if hasattr(each, "linear"):
            each.linear = linear
    return module


@pytest.mark.ranks([1, 2])
def test_a_linear_of_the_users_has_its_weights_gradients_and_collectives_around_it():
    x = numbers(8, 4, 16)
    for mode in modes([{"mode": "1d"}, {"mode": "1d", "sequence_parallel": True}]):
        for make, inner in LINEARS:
            scaled, in_a_module = Counted(3.0), Counted(3.0)
            for linear in (scaled, Module(in_a_module)):
                assert_layer_equals_one_device(
                    mode,
                    lambda layers: replaced(make(layers), linear),  # noqa: B023
                    x,
                    inner=inner,
                )
            assert len(scaled.given) == len(in_a_module.given) > 0
            counted = Counted()
            module = filled(replaced(make(mode.layers), counted))
            local, plain = mode.layers.split(x), filled(make(mode.layers))
            torch.testing.assert_close(module(local), plain(local), rtol=1e-12, atol=1e-12)  # perhaps another order
            weights = [each for each in module.parameters() if each.dim() == 2]
            assert [id(weight) for _, weight, _ in counted.given] == [id(weight) for weight in weights]
            assert [tuple(given.shape[:2]) for given, _, _ in counted.given] == [(8, 4)] * len(weights)


@pytest.mark.ranks(2)
def test_a_linear_of_the_users_may_keep_its_output_for_backward():
    for mode in modes([{"mode": "1d"}]):
        row = filled(mode.layers.RowLinear(16, 8))
        row.linear = lambda x, weight, _: functional.linear(x, weight).exp()  # exp keeps it
        x, other = numbers(3, 8).requires_grad_(), numbers(3, 8).requires_grad_()
        row(x).sum().backward()
        functional.linear(other, row.weight).exp().sum().backward()  # the all-reduce's backward is the identity
        assert torch.equal(x.grad, other.grad)


@pytest.mark.ranks([1, 2])
def test_a_linear_of_the_users_is_given_autocasts_dtype():
    for mode in modes([{"mode": "1d"}, {"mode": "1d", "sequence_parallel": True}]):
        counted = Counted()
        model = filled(replaced(MLP(mode.layers, 16), counted), torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(mode.layers.split(numbers(8, 4, 16, dtype=torch.float32)))
        y.sum().backward()
        assert {each.dtype for given in counted.given for each in given if each is not None} == {torch.bfloat16}
        assert {each.grad.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.ranks([1, 2])
def test_a_linear_of_the_users_computes_its_weight_gradient_in_backward_whatever_the_hook():
    for mode in modes([{"mode": "1d"}]):
        later, layer, plain = [], *(filled(mode.layers.ColumnLinear(16, 24)) for _ in range(2))
        layer.weight_grad_hook, layer.linear = later.append, functional.linear
        for each in (layer, plain):
            each(numbers(8, 16)).sum().backward()
        assert later == []
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


def check_a_linear_of_the_users_is_refused_where_products_take_several_ranks(mode):
    name, layers = mode.tensor["mode"], mode.layers
    if name != "1d" and mode.groups.size("tensor") > 1:
        for make in (layers.Linear, layers.ColumnLinear, layers.RowLinear):
            layer = filled(replaced(make(16, 32), Counted()))
            with pytest.raises(ValueError, match=f"`linear` .*Counted.* mode .*{name}.*; use mode 1d"):
                layer(layers.split(numbers(8, 4, 16)))
            layer.linear = None
            assert layer(layers.split(numbers(8, 4, 16))).isfinite().all()
