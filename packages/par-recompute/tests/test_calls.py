"""Layers that are called in other ways than once, with one tensor, by their model."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_recompute import Drop, Keep, checkpoint_layers, kept, measure, saved

from .models import MODELS, Block, gpt
from .training import handed_on

POLICIES = {"cheap": "cheap", "layers": "layers", "Keep": Keep(0.5), "Drop": Drop(lambda name, module: True)}


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def same(one, other):
    return all(map(torch.equal, one, other))


class Repeated(nn.Module):
    """One block several times, as in ALBERT."""

    def __init__(self, times):
        super().__init__()
        self.h, self.times = nn.ModuleList([Block(), Block()]), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.h[0](x)
        return self.h[1](x)


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
def test_a_layer_that_runs_several_times_in_a_forward_has_its_bytes_as_often(share, example):
    torch.manual_seed(0)
    model, given = Repeated(3), torch.randn(2, 15, 32, requires_grad=True)
    expected, budget = gradients(model(given).square().sum(), model), int(share * 4 * kept(measure(Block(), given), ()))
    checkpoint_layers(model, Keep(budget), example=given if example else None)
    for forward in range(3):
        with handed_on(model) as sizes:
            loss = model(given).square().sum()
        report = saved(model)
        assert [line.calls for line in report.lines] == [3, 1]
        # The loss saves what it squares, which no layer keeps.
        assert report.counted == sum(sizes.values()) - given.nbytes <= budget
        assert report.counted == report.predicted
        assert report.counted > budget - 0.5 * 4 * kept(measure(Block(), given), ()) or not (forward or example)
        assert same(gradients(loss, model), expected)


def test_more_calls_than_a_plan_was_made_for_get_one_of_their_own():
    model, given = Repeated(1), torch.randn(2, 15, 32, requires_grad=True)
    budget = kept(measure(Block(), given), ())
    checkpoint_layers(model, Keep(budget), example=given)
    for times in (1, 3, 3, 3, 1):
        model.times = times
        model(given).sum().backward()
        counted = saved(model).counted
        assert counted <= budget + (0 if model.times != times else 3 * given.nbytes)
        model.times = times
    assert counted <= budget


class Modes(nn.Module):
    """Saves more when a flag is set, and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x, *, twice=False):
        y = self.norm(self.first(x))
        if twice:
            y = y * y.sin() * y.cos()
        return self.last(y), {"norm": y.mean()}


@pytest.mark.parametrize("policy", POLICIES)
def test_flags_are_looked_at_apart_and_layers_may_return_anything(policy):
    torch.manual_seed(0)
    layer, given = Modes(), torch.randn(4, 8, requires_grad=True)

    def ran(twice):
        output, more = layer(given, twice=twice)
        return gradients(output.square().sum() + more["norm"], layer)

    expected = {twice: ran(twice) for twice in (False, True)}
    checkpoint_layers(layer, POLICIES[policy], layers=[layer])
    for twice in (False, True, False, True, True, False):
        assert same(ran(twice), expected[twice])
        (line,) = saved(layer).lines
        assert line.predicted in ({None} if policy == "layers" else {line.counted})
    assert line.dropped or policy == "Keep"  # which counts both kinds of calls


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_that_are_checkpointed_by_somebody_else_too(policy, reentrant):
    """Their second run saves what the first one did, though meanwhile others have decided what layers drop."""
    model, ids = gpt()

    def loss(around):
        x = model.wte(ids)
        for block in model.h:
            x = checkpoint(block, x, use_reentrant=reentrant) if around else block(x)
        return model.ln_f(x).square().sum()

    def first(loss):
        return torch.autograd.grad(loss, model.wte.weight) if not reentrant else backward(loss)

    def backward(loss):
        model.wte.weight.grad = None
        loss.backward()
        return [model.wte.weight.grad]

    expected = first(loss(False))
    checkpoint_layers(model, POLICIES[policy])
    for around in (True, False, True):
        losses = [loss(around), loss(False), loss(around)]
        for each in losses:
            assert same(first(each), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_gradients_and_retained_graphs_of_whole_models(policy):
    model, ids = gpt()

    def ran():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model(ids).square().mean()
            first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            second = gradients(sum(each.square().sum() for each in first), model)
        loss = model(ids).square().mean()
        twice = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=again) for again in (True, False)]
        return [*first, *second, *twice[0], *twice[1]]

    expected = ran()
    checkpoint_layers(model, POLICIES[policy])
    for _ in range(2):
        assert same(ran(), expected)


@pytest.mark.parametrize("given", ["one", "tuple", "dict"])
def test_an_example_is_an_argument_or_all_of_them(given):
    model, ids = gpt()
    checkpoint_layers(model, "cheap", example={"one": ids, "tuple": (ids,), "dict": {"ids": ids}}[given])
    model(ids).sum().backward()
    assert {line.dropped for line in saved(model).lines} == {("act", "ln1", "ln2")}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_modules_and_tensors_are_the_same_objects(policy, name):
    model, inputs = MODELS[name]()
    before = [*model.modules(), *model.parameters(), *model.buffers()]
    checkpoint_layers(model, POLICIES[policy])
    for _ in range(2):
        model(inputs).sum().backward()
    after = [*model.modules(), *model.parameters(), *model.buffers()]
    assert len(before) == len(after)
    assert all(one is other for one, other in zip(before, after, strict=True))
