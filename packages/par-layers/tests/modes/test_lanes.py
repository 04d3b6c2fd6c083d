"""Products, losses and look-ups in lanes: the bits of one rank on several ranks, for the bytes of a ring."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_groups import EXACT_LIMIT, LaneCounts, ProcessGroups, Topology
from par_layers import initialize, layer_set, parallelize
from par_layers.examples.gpt import GPT
from par_layers.modes.chunks import ChunkedParameters, ChunkSums
from par_layers.modes.grid import Grid
from par_layers.modes.lanes import LaneColumn, LaneLosses, LaneRow, rules_in_lanes
from par_layers.modes.token_losses import LossOptions, token_losses
from par_layers.modes.token_parameters import TokenParameters
from par_testing import count_collectives

LANES = LaneCounts(data=1, tensor=4)
ROWS, WIDTH, HIDDEN = 24, 128, 384


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(product, x, weight, bias, upstream):
    """The output, and the gradients of input, weight and bias."""
    inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
    y = product(*inputs, None)
    y.backward(upstream)
    return [y.detach(), *(each.grad for each in inputs)]


def live(size, **options):
    topology = Topology.from_config({"tensor": {"size": size, "mode": "1d", **options}}, dist.get_world_size())
    return ProcessGroups(topology)


@pytest.mark.parametrize("bias", [None, numbers(HIDDEN, seed=3, dtype=torch.float64)], ids=["plain", "bias"])
def test_products_in_lanes_are_linear_layers(bias):
    x, weight = numbers(2, 3, WIDTH, dtype=torch.float64), numbers(HIDDEN, WIDTH, seed=1, dtype=torch.float64)
    expected = functional.linear(x, weight, bias)
    for product in (LaneColumn(None, 4, False), LaneColumn(None, 4, False, (128, 128, 128)), LaneRow(None, 4, False)):
        torch.testing.assert_close(product(x, weight, bias, None), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("product", [LaneColumn(None, 4, False, (128, 256)), LaneRow(None, 4, False)], ids=str)
def test_deferred_weight_gradient_in_lanes_has_the_same_bits(product, transposed):
    x, weight = numbers(ROWS, WIDTH).requires_grad_(), numbers(HIDDEN, WIDTH, seed=1)
    weight = (weight.t().contiguous().t() if transposed else weight).requires_grad_()
    product(x, weight, None, None).sum().backward()
    now, later = weight.grad.clone(), []
    product(x, weight, None, later.append).sum().backward()
    assert torch.equal(later[0].compute().float(), now)
    torch.testing.assert_close(now, torch.ones(ROWS, HIDDEN).t() @ x.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.ranks(4)
def test_products_over_ranks_have_the_bits_of_one_rank(dtype):
    for size in (2, 4):
        with live(size) as groups:
            group, rank, each = groups["tensor"], groups.rank("tensor"), 4 // size
            x, wide = numbers(ROWS, WIDTH, dtype=dtype), numbers(ROWS, HIDDEN, seed=2, dtype=dtype)
            weight, bias = numbers(HIDDEN, WIDTH, seed=1, dtype=dtype), numbers(HIDDEN, seed=3, dtype=dtype)

            y, of_x, of_weight, of_bias = outcome(LaneColumn(None, 4, False), x, weight, bias, wide)
            cut = [each.chunk(size, dim)[rank] for each, dim in ((weight, 0), (bias, 0), (wide, 1))]
            found = outcome(LaneColumn(group, each, False), x, *cut)
            expected = y.chunk(size, 1)[rank], of_x, of_weight.chunk(size)[rank], of_bias.chunk(size)[rank]
            assert all(map(torch.equal, found, expected))

            weight, bias = weight.t().contiguous(), numbers(WIDTH, seed=3, dtype=dtype)
            y, of_x, of_weight, of_bias = outcome(LaneRow(None, 4, False), wide, weight, bias, x)
            cut = [each.chunk(size, 1)[rank] for each in (wide, weight)]
            found = outcome(LaneRow(group, each, False), *cut, bias, x)
            expected = y, of_x.chunk(size, 1)[rank], of_weight.chunk(size, 1)[rank], of_bias
            assert all(map(torch.equal, found, expected))


@pytest.mark.ranks(4)
def test_products_over_ranks_receive_the_bytes_of_a_ring():
    with live(4) as groups:
        group = groups["tensor"]
        x, weight = numbers(ROWS, WIDTH).requires_grad_(), numbers(HIDDEN // 4, WIDTH, seed=1)
        with count_collectives() as counted:
            LaneColumn(group, 1, False)(x, weight, None, None).sum().backward()
        assert counted.received() == 2 * Fraction(3, 4) * x.numel()
        with count_collectives() as counted:
            LaneRow(group, 1, False)(x.chunk(4, 1)[0], weight.t()[:, :32], None, None).sum().backward()
        assert counted.received() == 2 * Fraction(3, 4) * x.numel()


@pytest.mark.ranks(4)
def test_lanes_that_one_all_reduce_adds_have_other_bits():
    """So the tests of this module can fail: the same products, added by the backend in its own order."""
    with live(4) as groups:
        wide, weight = numbers(ROWS, HIDDEN, seed=2), numbers(WIDTH, HIDDEN, seed=1)
        expected = LaneRow(None, 4, False)(wide, weight, None, None)
        rank = groups.rank("tensor")
        partial = LaneRow(None, 1, False)(wide.chunk(4, 1)[rank], weight.chunk(4, 1)[rank], None, None)
        dist.all_reduce(partial)
        assert not torch.equal(partial, expected)
        assert not torch.equal(LaneRow(None, 2, False)(wide, weight, None, None), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_in_lanes_are_cross_entropies(smoothing):
    logits, target = numbers(ROWS, 128, dtype=torch.float64), torch.arange(ROWS) % 128
    target[3] = -100
    options = LossOptions(classes=128, label_smoothing=smoothing)
    found = LaneLosses(None, 4)(logits, target, None, (), options)
    torch.testing.assert_close(found, token_losses(logits, target, None, (), options), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_gpt_over_ranks_has_the_bits_of_one_rank():
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for size in (1, 2):
        with live(size) as groups:
            layers = layer_set("auto", groups, lanes=LANES)
            model = GPT(layers, vocabulary=128, width=128, heads=4, depth=1, length=8)
            initialize(model, 0)
            loss = model.loss(ids[:, :-1], ids[:, 1:], label_smoothing=0.1)
            loss.backward()
            found.append([loss.detach(), model.norm.weight.grad, model.positions.weight.grad])
    assert all(map(torch.equal, *found))


def gradients_of_tokens(parameters, x, ids, first):
    """The gradients of a norm's parameters and of a table, whose rows are looked up and added by position."""
    weight, bias = (numbers(WIDTH, seed=seed).requires_grad_() for seed in (1, 2))
    table = numbers(16, WIDTH, seed=3).requires_grad_()
    y = parameters.norm(parameters.add_positions(x, table, first), weight, bias, eps=1e-5, mean=True)
    (y * parameters.look_up(ids, table) / 64).sum().backward()
    return [each.grad.double() for each in (weight, bias, table)]


def test_gradients_in_chunks_are_those_of_torch():
    x, ids = numbers(2, 16, WIDTH), torch.arange(32).view(2, 16) % 7
    found = gradients_of_tokens(ChunkedParameters(ChunkSums(4, cut=False)), x, ids, 0)
    torch.testing.assert_close(found, gradients_of_tokens(TokenParameters(), x, ids, 0), rtol=1e-4, atol=1e-5)


def test_chunks_on_two_ranks_add_up_to_the_bits_of_one():
    x = numbers(2, 16, WIDTH) / 64
    one = ChunkSums(4, cut=False).of_tokens(x)
    assert torch.equal(sum(ChunkSums(2, cut=True).of_tokens(half) for half in x.chunk(2, 1)), one)
    assert not torch.equal(ChunkSums(1, cut=False).of_tokens(x), one)  # so this test can fail


def test_sums_of_chunks_beyond_the_exact_range_are_as_large():
    x = torch.tensor([5.0, 5.0, -5.0, -4.0]).view(1, 4, 1)
    assert ChunkSums(4, cut=False).of_tokens(x) >= EXACT_LIMIT


# What has no form in lanes


@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
def test_modes_without_lanes_raise(mode):
    with pytest.raises(ValueError, match=f"mode='{mode}' with numerics='canonical': it divides sums"):
        rules_in_lanes(mode, Grid(None), {}, LANES)


def test_layers_of_sizes_without_lanes_raise():
    layers = layer_set(None, lanes=LANES)
    with pytest.raises(ValueError, match="a block of out_features is 64, which does not divide into 4 lanes"):
        layers.ColumnLinear(128, 64)
    with pytest.raises(ValueError, match=r"in_features is 64, .* a multiple of 32 features; use 128, or fewer"):
        layers.RowLinear(64, 128)
    with pytest.raises(ValueError, match="the vocabulary is 100"):
        layers.VocabClassifier(128, 100)
    with pytest.raises(ValueError, match=r"heads have 4 features: with tensor lanes, .* use 8"):
        layers.ColumnLinear(128, 384, blocks=3, unit=4)
    with pytest.raises(ValueError, match=r"experts have 130 intermediate features, .* use 132, or fewer"):
        layers.MoE(128, 130, num_experts=4, top_k=2)
    with pytest.raises(ValueError, match="the layers have 2 sequence lanes, and experts have no products in these"):
        layer_set(None, lanes=LaneCounts(data=4, sequence=2)).MoE(128, 128, num_experts=4, top_k=2)


def test_function_in_place_of_the_matmul_raises():
    layers = layer_set(None, lanes=LANES)
    linear = layers.ColumnLinear(128, 128)
    linear.linear = functional.linear
    with pytest.raises(ValueError, match="multiplies lanes by torch's own matmul; set `linear` to None"):
        linear(torch.ones(2, 128))


class Mlp(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(128, hidden), nn.Linear(hidden, 128)

    def forward(self, x):
        return self.down(functional.silu(self.up(x)))


def test_existing_model_of_a_size_without_lanes_raises_unchanged():
    model = Mlp(hidden=96)
    with pytest.raises(ValueError, match="'up' is 96, which does not divide into 4 lanes"):
        parallelize(model, layer_set(None, lanes=LANES), {"up": "colwise", "down": "rowwise"})
    assert type(model.up) is nn.Linear


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(128, 128), Mlp(hidden=128))])

    def forward(self, x):
        return self.layers[0](x)


@pytest.mark.ranks(2)
def test_replicated_linear_under_sequence_parallelism_raises():
    plan = {"layers.*.1.up": "colwise", "layers.*.1.down": "rowwise"}
    with live(2, sequence_parallel=True) as groups:
        layers = layer_set("auto", groups, lanes=LANES)
        with pytest.raises(ValueError, match=r"'layers.0.0.weight' has a gradient that is a sum .* a Linear"):
            parallelize(Layers(), layers, plan)


@pytest.mark.ranks(2)
def test_sequence_that_does_not_divide_into_chunks_raises():
    with live(2, sequence_parallel=True) as groups:
        norm = layer_set("auto", groups, lanes=LANES).LayerNorm(128)
        initialize(norm, 0)
        with pytest.raises(ValueError, match="a rank has 5 tokens of a sequence, which do not divide into 2 chunks"):
            norm(torch.ones(1, 5, 128))


@pytest.mark.parametrize("rule", ["packed_rowwise", "all_reduce"])
def test_rules_without_lanes_raise(rule):
    plan = {"up": "colwise", "down": rule}
    with pytest.raises(ValueError, match=r"the rule of 'down' is .*, which has no form in lanes"):
        parallelize(Mlp(hidden=128), layer_set(None, lanes=LANES), plan)
