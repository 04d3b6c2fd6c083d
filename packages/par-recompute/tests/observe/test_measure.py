"""What a layer saves, on fake tensors: no element is computed, and why a module cannot be called again."""

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from par_recompute import kept, measure
from par_recompute.observe.observer import Observer

from ..models import LEAVES, Block, LlamaBlock
from ..training import handed_on


def test_a_gpt_block_keeps_what_the_formula_says():
    width, rows = 32, 2 * 15
    table = measure(Block(width), torch.randn(2, 15, width, requires_grad=True))
    h = rows * width * 4
    statistics = 2 * 2 * rows * 4 + 4 * rows * 4  # mean and deviation of two norms; a sum of attention for each head
    assert kept(table, ()) == 16 * h + statistics  # 15 h beside the input
    assert kept(table, {"ln1", "ln2", "act"}) == 10 * h + statistics
    assert kept(table, {"ln1", "ln2", "act", "fc"}) == 6 * h + statistics
    assert kept(table, {"ln1", "ln2", "act", "fc", "attn.qkv"}) == 3 * h + statistics
    assert kept(table, {""}) == h
    assert set(table.candidates) == set(LEAVES)
    operations = 2 * rows * width**2
    assert [table.modules[name].flops // operations for name in LEAVES] == [0, 3, 1, 0, 4, 0, 4]


@pytest.mark.parametrize("block", ["gpt", "vit", "llama"])
def test_fake_tensors_have_the_bytes_of_a_real_call(block):
    layer = {"gpt": Block(), "vit": Block(causal=False), "llama": LlamaBlock()}[block]
    x = torch.randn(3, 7, 32, requires_grad=True)
    given = {"cos": torch.randn(7, 8), "sin": torch.randn(7, 8)} if block == "llama" else {}
    state = torch.get_rng_state()
    table = measure(layer, x, **given)
    assert torch.equal(torch.get_rng_state(), state)
    with handed_on(layer) as sizes:
        output = layer(x, **given)
    assert kept(table, ()) == sum(sizes.values())
    assert output.shape == x.shape


def test_weights_in_bf16_gain_by_every_norm_and_activation():
    layer, given = Block().bfloat16(), torch.randn(2, 15, 32, dtype=torch.bfloat16, requires_grad=True)
    table, h = measure(layer, given), 2 * 15 * 32 * 2
    assert [kept(table, ()) - kept(table, {name}) for name in ("ln1", "ln2", "act", "fc")] == [h, h, 4 * h, 4 * h]


@pytest.mark.parametrize("act", [nn.ReLU(), nn.Sigmoid(), nn.Softmax(-1)])
def test_what_a_module_saves_of_its_own_output_gains_nothing(act):
    layer = nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8))
    table = measure(layer, torch.randn(4, 8))
    assert table.modules["1"].obstacle is None
    assert kept(table, {"1"}) == kept(table, ())


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


class Two(nn.Module):
    def forward(self, x):
        return x + 1, x + 2


class Pair(nn.Module):
    def forward(self, x, y):
        return x * y


class Remembers(nn.Module):
    """Reads a tensor that it has from elsewhere."""

    def __init__(self):
        super().__init__()
        self.bias = [torch.ones(8)]

    def forward(self, x):
        return x.sin() + self.bias[0]


class Statistics(nn.Module):
    """A batch norm as functions have it, whose statistics get no new version when they are written."""

    def __init__(self, training):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.on = training

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, training=self.on)


class Surrounded(nn.Module):
    """A layer that calls a module as often as it is told to."""

    def __init__(self, module, call=None):
        super().__init__()
        self.module, self.last = module, nn.Linear(8, 8)
        self.call = call or (lambda module, x: module(x))

    def forward(self, x):
        result = self.call(self.module, x.sin())
        return self.last(result[0] if isinstance(result, tuple) else result)


@pytest.mark.parametrize(
    ("module", "obstacle"),
    [
        (nn.Dropout(0.1), "draws random numbers"),
        (nn.Dropout(0.0).eval(), "gives its input, or a view of it"),
        (nn.Flatten(), "gives its input, or a view of it"),
        (nn.BatchNorm1d(8), "writes into its buffers or parameters"),
        (nn.BatchNorm1d(8).eval(), None),
        (nn.BatchNorm1d(8, track_running_stats=False), None),
        (Statistics(True), "writes into its buffers or parameters"),
        (Statistics(False), None),
        (nn.ReLU(inplace=True), "changes its input in place"),
        (InPlace(), "changes its input in place"),
        (Two(), "gives not one tensor alone"),
        (Remembers(), "reads what is neither its input nor its own"),
        (nn.Linear(8, 8), None),
        (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), None),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), "writes into its buffers or parameters"),
    ],
)
def test_why_a_module_cannot_be_called_again(module, obstacle):
    layer = Surrounded(module)
    layer.last.train()
    table = measure(layer, torch.randn(4, 8, requires_grad=True))
    assert table.modules["module"].obstacle == obstacle
    assert ("module" in table.candidates) == (obstacle is None)
    assert (obstacle or "yes") in str(table)


def test_modules_of_two_arguments_and_compiled_ones_stay():
    x = torch.randn(4, 8, requires_grad=True)
    table = measure(Surrounded(Pair(), lambda module, x: module(x, x)), x)
    assert table.modules["module"].obstacle == "takes not one tensor alone"
    compiled = nn.Linear(8, 8)
    compiled.compile(backend="eager")
    layer = Surrounded(compiled, lambda module, x: F.linear(x, module.weight))
    assert "module" not in measure(layer, x).candidates


def test_a_module_that_is_called_twice_is_made_twice():
    table = measure(Surrounded(nn.LayerNorm(8), lambda module, x: module(module(x))), torch.randn(4, 8))
    assert sum(getattr(event, "module", None) == "module" for event in table.events) == 2


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


class Reduced(nn.Module):
    """A norm over features that are cut over ranks."""

    def forward(self, x):
        return x * torch.rsqrt(Sum.apply(x.square().sum(-1, keepdim=True)))


@pytest.mark.ranks(2, backend="gloo")  # strict ranks are no part of torch's dispatcher, where collectives are seen
def test_a_module_that_calls_a_collective_stays():
    from par_recompute import checkpoint_layers, saved

    layers = nn.Sequential(*(Surrounded(nn.Sequential(Reduced(), nn.Tanh())) for _ in range(2)))
    checkpoint_layers(layers, "cheap")
    for _ in range(2):
        layers(torch.ones(4, 8, requires_grad=True)).sum().backward()
    again = [line.dropped for line in saved(layers).lines]
    assert again == [(), ()]  # a tangent saves its own output
    obstacles = layers[0].par_recompute_layer.known.seen.popitem()[1].table.modules
    assert obstacles["module.0"].obstacle == obstacles["module"].obstacle == "calls a collective"
    assert obstacles[""].communicates


class Branch(nn.Module):
    """A layer that drops one of its results, whose node saves its own output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropped = None

    def forward(self, x):
        dropped = self.linear(x).softmax(-1)
        self.dropped = weakref.ref(dropped.untyped_storage())
        return self.linear(x).tanh()


def test_an_observed_layer_frees_what_it_drops():
    layer, x = Branch(), torch.randn(4, 8, requires_grad=True)
    observer = Observer(layer, ((x,), {}))
    observer.begin()
    output = layer(x)
    observer.end()
    assert layer.dropped() is None
    # What is saved has its graph again, for a second derivative.
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert torch.equal(first, wanted)
    assert torch.equal(second, torch.autograd.grad(wanted.sum(), x)[0])
