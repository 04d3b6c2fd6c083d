"""Float8 products: the quantisation equals a model in fp64 bit for bit, and the rest is the linear algebra of it."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_precision import Float8Linear, _float8, convert_to_float8_, mixed
from par_precision._float8 import check_float8
from par_testing import count_collectives, storm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = (torch.bfloat16, torch.float32)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantised(values, dtype, largest=None):
    """The model: scale by a power of two, take the nearest number of the float8 grid, ties to even; all in fp64."""
    values = values.detach().double()
    largest = values.abs().max().item() if largest is None else largest
    scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest))
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    codes = torch.arange(256)[grid.isfinite() & (grid.signbit().logical_not() | (grid < 0))]
    order = grid[codes].argsort()
    codes, grid = codes[order], grid[codes][order]
    upper = torch.searchsorted(grid, values * scale).clamp(1, len(grid) - 1)
    below, above = values * scale - grid[upper - 1], grid[upper] - values * scale
    up = (above < below) | ((above == below) & (codes[upper] % 2 == 0))
    return torch.where(up, grid[upper], grid[upper - 1]) / scale


def linears(rows=5, dtype=torch.bfloat16, bias=True):
    """A plain layer, the float8 one that shares its parameters, and input and output gradient."""
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=bias).to(dtype)
    return plain, convert_to_float8_(nn.Sequential(plain))[0], randn(rows, 32, dtype=dtype), randn(rows, 48, seed=1)


def results(layer, x, gradient):
    """Output and gradients: of input, weight and bias."""
    x = x.detach().clone().requires_grad_()
    output = layer(x)
    gradients = torch.autograd.grad(output, [x, *layer.parameters()], gradient.to(output.dtype))
    return [output.detach(), *gradients]


@pytest.mark.parametrize("float8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1e-25, 1e-3, 1.0, 448.0, 1e20])
def test_the_cast_equals_the_model_bit_for_bit(float8, dtype, size):
    values = (randn(15, 17).exp2() * randn(15, 17, seed=1) * size).to(dtype)
    scaled = _float8._cast(values, float8, _float8._largest(None, values)[0])
    found = scaled.values.double() * scaled.unit.double()
    assert torch.equal(found, quantised(values, float8))
    assert scaled.values.double().abs().max() > torch.finfo(float8).max / 4  # the range is used
    assert math.frexp(scaled.unit.item())[0] == 0.5  # a power of two


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 15, 17, 123, 128])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_products_of_quantised_matrices(rows, dtype, bias):
    plain, layer, x, gradient = linears(rows, dtype, bias)
    gradient = gradient.to(dtype)
    x8, w8, g8 = quantised(x, E4M3), quantised(plain.weight, E4M3), quantised(gradient, E5M2)
    expected = [x8 @ w8.t(), g8 @ w8, g8.t() @ x8]
    if bias:
        expected[0] += plain.bias.double()
        expected.append(gradient.double().sum(0))
    # sums of up to 128 terms in fp32, and the result's own rounding: of the product, and of the sum with the bias
    tolerance = 2**-7 if dtype == torch.bfloat16 else 128 * 2**-24
    for found, model in zip(results(layer, x, gradient), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), model, rtol=tolerance, atol=tolerance * model.abs().mean().item())


def test_numbers_that_float8_holds_give_the_same_as_a_plain_layer():
    """Small integers: sums are exact, so is every dtype's result."""
    plain, layer, _, _ = linears(dtype=torch.float32)
    integers = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randint(-3, 4, shape, generator=integers).float() for shape in [(17, 32), (48, 32), (17, 48)]
    )
    with torch.no_grad():
        plain.weight.copy_(weight)
    for found, expected in zip(results(layer, x, gradient), results(plain, x, gradient), strict=True):
        assert torch.equal(found, expected)


def test_the_error_against_bf16_is_that_of_float8():
    """Relative errors of a cast are below 2**-4 (e4m3) and 2**-3 (e5m2), some 0.4 of it in the mean square."""
    plain, layer, x, gradient = linears(128)
    pairs = zip(results(layer, x, gradient), results(plain, x, gradient), strict=True)
    errors = [((found - expected).float().norm() / expected.float().norm()).item() for found, expected in pairs]
    output, of_input, of_weight, of_bias = errors
    assert 0.01 < output < 0.06
    assert 0.02 < of_input < 0.09
    assert 0.02 < of_weight < 0.09
    assert of_bias == 0


def test_any_number_of_dims_works_as_with_a_plain_layer():
    _, layer, _, _ = linears()
    flat = randn(30, 32, dtype=torch.bfloat16)
    outputs = layer(flat)
    for shape in [(5, 6), (2, 3, 5), (30, 1)]:
        assert torch.equal(layer(flat.view(*shape, 32)), outputs.view(*shape, 48))
    alone = layer(flat[0])
    assert alone.shape == (48,)
    assert torch.equal(alone, layer(flat[:1])[0])


def test_strided_inputs_and_expanded_gradients_work():
    _, layer, _, _ = linears()
    x = randn(32, 20, dtype=torch.bfloat16)
    one = x.t().requires_grad_()
    other = x.t().contiguous().requires_grad_()
    layer(one).sum().backward()
    (layer(other) * torch.ones(20, 48)).bfloat16().sum().backward()
    assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 32)])
def test_no_rows_give_no_rows_and_zero_gradients(shape):
    _, layer, _, _ = linears()
    output = layer(torch.empty(shape, dtype=torch.bfloat16))
    assert output.shape == (*shape[:-1], 48)
    output.sum().backward()
    assert all(parameter.grad.eq(0).all() for parameter in layer.parameters())


def test_zeros_stay_zeros():
    _, layer, _, _ = linears(bias=False)
    found = results(layer, torch.zeros(5, 32, dtype=torch.bfloat16), torch.zeros(5, 48))
    assert all(each.eq(0).all() for each in found)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_everything_nan(bad):
    """So no product hides it from a check of the gradients."""
    _, layer, x, gradient = linears()
    x[2, 3] = bad
    output, *_, of_weight, _ = results(layer, x, gradient)
    assert output.isnan().all()
    assert of_weight.isnan().all()
    _, layer, x, gradient = linears()
    gradient[1, 1] = bad
    _, of_input, of_weight, _ = results(layer, x, gradient)
    assert of_input.isnan().all()
    assert of_weight.isnan().all()


def test_autocast_sets_the_dtype_of_products_and_leaves_that_of_parameters():
    plain, layer, x, gradient = linears(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(layer, x, gradient)
    assert [each.dtype for each in found] == [torch.bfloat16, *[torch.float32] * 3]
    model = quantised(x.bfloat16(), E4M3) @ quantised(plain.weight, E4M3).t() + plain.bias.double()
    torch.testing.assert_close(found[0].double(), model, rtol=2**-7, atol=2**-8)  # two roundings to bf16


def test_backward_keeps_one_byte_a_number_of_the_input_and_no_copy_of_the_weight():
    _, layer, x, _ = linears(rows=16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x.requires_grad_())
    large = [tensor for tensor in kept if tensor.numel() > 1]
    assert {tensor.data_ptr() for tensor in large if tensor.element_size() > 1} == {layer.weight.data_ptr()}
    assert sum(tensor.numel() for tensor in large if tensor.element_size() == 1) == x.numel()


def test_frozen_parameters_get_no_gradient():
    _, layer, x, _ = linears()
    layer.weight.requires_grad_(requires_grad=False)
    layer(x.requires_grad_()).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert x.grad is not None


class Twice(nn.Module):
    """A shared layer, sizes that do not fit, and a subclass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.again = self.first
        self.odd = nn.Linear(32, 17)
        self.mine = type("Mine", (nn.Linear,), {})(32, 32)
        self.blocks = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))


def test_conversion_keeps_parameters_names_hooks_and_mode():
    module = Twice().eval()
    module.blocks[0].requires_grad_(requires_grad=False)
    names, called = dict(module.named_parameters()), []
    module.first.register_forward_hook(lambda *_: called.append("hook"))
    assert convert_to_float8_(module) is module
    assert all(parameter is names[name] for name, parameter in module.named_parameters())
    assert list(module.state_dict()) == list(Twice().state_dict())
    assert module.first is module.again
    kinds = {name: type(each) for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    assert kinds == {
        "first": Float8Linear,
        "odd": nn.Linear,
        "mine": type(module.mine),
        "blocks.0": Float8Linear,
        "blocks.1": Float8Linear,
    }
    assert not module.first.training
    module.first(randn(3, 32))
    assert called == ["hook"]


def test_an_optimizer_made_before_conversion_trains_the_layer():
    plain = nn.Linear(32, 16)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    layer = convert_to_float8_(plain)
    assert isinstance(layer, Float8Linear)
    before = layer.weight.detach().clone()
    layer(randn(4, 32)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_a_flag_of_that_name_is_no_place_for_a_product():
    module = nn.Sequential(nn.Linear(16, 16), nn.Conv2d(1, 1, 1))
    module[1].in_features, module[1].out_features, module[1].linear = 16, 16, True
    assert convert_to_float8_(module)[1].linear is True


def test_a_filter_chooses_by_name_and_layer():
    module = convert_to_float8_(Twice(), lambda name, linear: "blocks" in name and linear.out_features == 48)
    assert [name for name, each in module.named_modules() if isinstance(each, Float8Linear)] == ["blocks.0"]


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match=r"from 32 to 17 numbers.*multiples of 16.*keep this"):
        Float8Linear(32, 17)
    with pytest.raises(ValueError, match=r"from 32 to 17 numbers.*do not choose 'odd'"):
        convert_to_float8_(Twice(), lambda name, _: name == "odd")
    with pytest.raises(ValueError, match=r"no linear layer to convert"):
        convert_to_float8_(nn.Sequential(nn.Linear(3, 5)))
    with pytest.raises(TypeError, match=r"input.*float16; give it bfloat16"):
        linears()[1](torch.zeros(4, 32, dtype=torch.float16))
    with pytest.raises(TypeError, match=r"weight.*float16"):
        linears()[1].half()(torch.zeros(4, 32))


def test_a_device_without_float8_is_refused(monkeypatch):
    check_float8(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="not on mps; use bf16"):
        check_float8(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(RuntimeError, match=r"NVIDIA A100 has compute capability 8.0.*8.9.*use bf16"):
        check_float8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_float8(torch.device("cuda"))


@pytest.mark.cpu(reason="float8 runs on NVIDIA GPUs and CPUs")
@pytest.mark.ranks([storm(2), 4])
def test_ranks_with_a_group_round_like_one_device_with_all_of_the_data():
    """A share of the rows each; only the first has large numbers, which turn small ones subnormal."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, gradient = randn(17 * ranks, 32, dtype=torch.bfloat16), randn(17 * ranks, 48, seed=1, dtype=torch.bfloat16)
    x[0] *= 1e4
    gradient[1] *= 1e9
    mine = slice(17 * rank, 17 * (rank + 1))
    weight = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    alone, grouped = (convert_to_float8_(nn.Sequential(weight), group=group)[0] for group in (None, dist.group.WORLD))
    expected = results(alone, x, gradient)
    with count_collectives() as counted:
        found = results(grouped, x[mine], gradient[mine])
    assert torch.equal(found[0], expected[0][mine])
    assert torch.equal(found[1], expected[1][mine])
    of_weight = found[2].float()
    dist.all_reduce(of_weight)
    # each rank's share is rounded to bf16 before the sum
    torch.testing.assert_close(of_weight, expected[2].float(), rtol=2**-7, atol=2**-7 * of_weight.abs().max().item())
    assert counted.calls() == counted.calls("all_reduce") == 2  # forward and backward
    assert counted.elements() == 2 + 1
    if rank:
        assert not torch.equal(results(alone, x[mine], gradient[mine])[0], expected[0][mine])


@pytest.mark.cpu(reason="float8 runs on NVIDIA GPUs and CPUs")
@pytest.mark.ranks(2)
def test_a_nan_on_one_rank_of_a_group_is_one_on_all():
    _, layer, x, gradient = linears()
    layer.group = dist.group.WORLD
    if dist.get_rank() == 1:
        x[0, 0] = math.nan
    assert results(layer, x, gradient)[0].isnan().all()


@pytest.mark.cpu(reason="float8 runs on NVIDIA GPUs and CPUs")
@pytest.mark.ranks(2)
def test_a_dtensor_is_refused_and_fsdp_works():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    _, layer, x, gradient = linears()
    with pytest.raises(TypeError, match=r"input.*DTensor"):
        layer(distribute_tensor(x, mesh, [Replicate()]))
    expected = results(layer, x, gradient)
    sharded = fully_shard(nn.Sequential(layer), mesh=mesh)
    output = sharded(x)
    assert torch.equal(output, expected[0])
    output.backward(gradient.bfloat16())
    # equal on both ranks, and so is their mean
    assert torch.equal(layer.weight.grad.full_tensor(), expected[2])


class OfAnotherClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_features, self.out_features, self.linear = 32, 16, None
        self.weight = nn.Parameter(randn(16, 32))

    def forward(self, x):
        return (self.linear or nn.functional.linear)(x, self.weight, None)


def test_a_layer_of_another_class_that_lets_its_product_be_replaced_multiplies_float8():
    layer, plain, x = OfAnotherClass(), nn.Linear(32, 16, bias=False), randn(48, 32)
    plain.weight = layer.weight
    before = layer(x)
    expected = convert_to_float8_(plain)(x)
    assert convert_to_float8_(layer) is layer
    assert torch.equal(layer(x), expected)
    assert not torch.equal(before, expected)


# Weight gradients that are put off


def hooked(make, dtype):
    """A float8 layer whose weight gradients are put off, one whose are not, and what was put off."""
    torch.manual_seed(0)
    plain = convert_to_float8_(nn.Sequential(make().to(dtype)))[0]
    layer, later = copy.deepcopy(plain), []
    layer.weight_grad_hook = later.append
    return layer, plain, later


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [lambda: nn.Linear(32, 16), OfAnotherClass])
def test_a_weight_gradient_that_is_put_off_is_the_same_later_bit_for_bit(make, dtype):
    for rows, autocast in ((5, False), (17, True)):
        for listened in (True, False):
            layer, plain, later = hooked(make, dtype)
            fired = []
            layer.weight.register_hook(lambda _: fired.append("tensor"))  # noqa: B023
            layer.weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))  # noqa: B023
            for turn in range(2):
                here = randn(rows, 32, seed=turn, dtype=dtype).requires_grad_()
                there = here.detach().clone().requires_grad_()
                before = None if layer.weight.grad is None else layer.weight.grad.clone()
                for each, x in ((layer, here), (plain, there)):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        y = each(x)
                    y.float().square().sum().backward()
                assert torch.equal(here.grad, there.grad)
                assert (layer.weight.grad is None) if before is None else torch.equal(layer.weight.grad, before)
                (closure,) = later
                assert closure.weight is layer.weight
                closure(listened=listened)
                later.clear()
                assert torch.equal(layer.weight.grad, plain.weight.grad)
            assert fired == ["tensor", "accumulated"] * (2 if listened else 1)  # the first of all is always heard


def test_a_weight_gradient_is_put_off_where_nothing_else_has_one_but_not_of_a_frozen_weight():
    layer, plain, later = hooked(lambda: nn.Linear(32, 16, bias=False), torch.float32)
    for each in (layer, plain):
        each(randn(5, 32)).square().sum().backward()
    later.pop()()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    layer.weight.requires_grad_(requires_grad=False)
    layer(randn(5, 32).requires_grad_()).sum().backward()
    assert later == []


class Language(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.body = nn.Linear(32, 32)
        self.add_module(head, nn.Linear(32, 48))
        self.get_output_embeddings = lambda: getattr(self, head)

    def forward(self, inputs):
        return self.get_output_embeddings()(self.body(inputs))


@pytest.mark.parametrize("head", ["lm_head", "embed_out"])
def test_the_head_of_a_language_model_is_left_alone_unless_it_is_chosen(head):
    made = [Language(head) for _ in range(3)]
    adam = [torch.optim.AdamW(module.parameters()) for module in made]
    mixed(made[0], adam[0], "fp8")
    mixed(made[1], adam[1], "fp8", float8_layers=lambda name, layer: True)
    mixed(made[2], adam[2], "fp8", float8_layers=lambda name, layer: name == head)
    kinds = [[type(getattr(module, name)) is Float8Linear for name in ("body", head)] for module in made]
    assert kinds == [[True, False], [True, True], [False, True]]
    named = convert_to_float8_(nn.ModuleDict({"lm_head": nn.Linear(16, 16), "a": nn.Linear(16, 16)}))
    assert [type(layer) for layer in named.values()] == [nn.Linear, Float8Linear]


def test_what_float8_layers_cannot_choose_is_refused_before_anything_changes():
    module = nn.Sequential(nn.Linear(16, 15), nn.Linear(15, 16))
    optimizer = torch.optim.AdamW(module.parameters())
    for precision, chosen, match in (
        ("fp8", lambda name, layer: name == "1", "do not choose '1'"),
        ("fp8", lambda name, layer: False, "chooses no linear layer on any rank"),
        ("fp8", "lm_head", "give a function"),
        ("bf16", lambda name, layer: True, "the precision is 'bf16'"),
    ):
        with pytest.raises(ValueError, match=match):
            mixed(module, optimizer, precision, float8_layers=chosen)
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    assert optimizer.param_groups[0]["params"] == list(module.parameters())
