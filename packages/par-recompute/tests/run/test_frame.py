"""A layer that drops what modules make: bytes, operations and bits, for every subset of modules and in odd layers."""

import gc
from itertools import chain, combinations

import pytest
import torch
from torch import nn

from par_recompute import Drop, checkpoint_layers, kept, measure, saved
from par_testing import live_bytes

from ..models import LEAVES, Block
from ..training import Living, flops, handed_on


def dropped(names, layer, given):
    """A layer whose modules of these names are dropped: its output and gradients, its report, and what it hands on."""
    checkpoint_layers(layer, Drop(lambda name, module: name in names), layers=[layer], example=given)
    return ran(layer, given)


def ran(layer, given, *, autocast=False):
    layer.zero_grad()
    given = given.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), handed_on(layer) as sizes:
        output = layer(given)
    report = saved(layer) if hasattr(layer, "par_recompute_layer") else None
    output.float().square().sum().backward()
    return (output, given.grad, *(parameter.grad for parameter in layer.parameters())), report, sum(sizes.values())


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def subsets():
    return chain.from_iterable(combinations(LEAVES, count) for count in range(len(LEAVES) + 1))


def test_every_subset_of_a_blocks_modules_keeps_what_is_predicted_and_changes_no_bit():
    torch.manual_seed(0)
    layer, given = Block(16, heads=2), torch.randn(2, 5, 16, requires_grad=True)
    table = measure(layer, given)
    expected, _, everything = ran(layer, given)
    assert everything == kept(table, ())
    names = set()
    checkpoint_layers(layer, Drop(lambda name, module: name in names), layers=[layer])
    names.update(LEAVES)
    ran(layer, given)  # is looked at
    seen = next(iter(layer.par_recompute_layer.known.seen.values()))
    for subset in subsets():
        seen.dropped = frozenset(subset)
        results, report, handed = ran(layer, given)
        assert same(results, expected), subset
        assert report.predicted == report.counted == handed == kept(table, subset), subset


@pytest.mark.parametrize(
    ("names", "twelfths"),
    [(("ln1", "ln2", "act"), 0), (("ln1", "ln2", "act", "fc"), 4), (("ln1", "ln2", "act", "fc", "attn.qkv"), 7)],
)
def test_each_product_is_done_again_once(names, twelfths):
    layer, given = Block(), torch.randn(1, 8, 32, requires_grad=True)
    before = flops(lambda: ran(layer, given))
    dropped(names, layer, given)
    after = flops(lambda: ran(layer, given))
    assert after - before == twelfths * 2 * 8 * 32**2


def test_a_whole_layer_does_eight_twelfths_again_as_torchs_checkpoint_does():
    """All products but the last. The counter does not know attention on a CPU, which is done again, too."""
    layer, given = Block(), torch.randn(1, 8, 32, requires_grad=True)
    counts = [flops(lambda: ran(layer, given))]
    counts.append(
        flops(lambda: torch.utils.checkpoint.checkpoint(layer, given, use_reentrant=False).square().sum().backward())
    )
    checkpoint_layers(layer, "layers", layers=[layer])
    counts.append(flops(lambda: ran(layer, given)))
    assert [count - counts[0] for count in counts[1:]] == [8 * 2 * 8 * 32**2] * 2


def test_what_is_dropped_lives_no_longer():
    layer, given = Block(), torch.randn(2, 16, 32, requires_grad=True)
    living = {}
    for names in ((), LEAVES):
        model = Block()
        if names:
            checkpoint_layers(model, Drop(lambda name, module: name in LEAVES), layers=[model], example=given)
        with Living() as made:
            output = model(given)
            living[bool(names)] = made.bytes() - output.untyped_storage().nbytes()
    table = measure(layer, given)
    # The input was made before, and the branch that is added last is kept by nobody.
    assert living[False] - living[True] == kept(table, ()) - kept(table, LEAVES)


class Odd(nn.Module):
    """A layer that does with a norm's output whatever a test says."""

    def __init__(self, use):
        super().__init__()
        self.norm, self.fc, self.use = nn.LayerNorm(8), nn.Linear(8, 8), use

    def forward(self, x):
        return self.use(self, x)


def twice(layer, x):
    return layer.fc(layer.norm(layer.norm(x).sin()))


def views(layer, x):
    y = layer.norm(x)
    return layer.fc(y[1:, 2:].transpose(0, 1)).sum() * y.chunk(2, dim=-1)[1].mT.sin() * y.view(-1)[5:6]


def used_twice(layer, x):
    y = layer.norm(x)
    return layer.fc(y) * y.sin() + y.cos()


def in_place(layer, x):
    y = layer.norm(x)
    z = layer.fc(y)
    return z * layer.norm(x).add_(1).sin()


def residual_in_place(layer, x):
    y = layer.fc(layer.norm(x))
    y += x
    return y.sin()


def returned(layer, x):
    y = layer.norm(x)
    return y + 0 * layer.fc(y)


class Complex(nn.Module):
    """Whose conjugates, and their imaginary parts, are views that are read in another way."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8, dtype=torch.cfloat)

    def forward(self, x):
        y = self.fc(x)
        conjugate = y.conj()
        return (conjugate * conjugate * y).abs() * conjugate.imag * y.imag * y.real


@pytest.mark.parametrize("names", [(), ("fc",)])
def test_conjugated_and_negated_views_are_what_they_were(names):
    torch.manual_seed(0)
    layer, given = Complex(), torch.randn(4, 8, dtype=torch.cfloat, requires_grad=True)

    def gradients():
        return torch.autograd.grad(layer(given).sum(), [given, *layer.parameters()])

    expected = gradients()
    checkpoint_layers(layer, Drop(lambda name, module: True), layers=[layer], example=given)
    (seen,) = layer.par_recompute_layer.known.seen.values()
    seen.dropped = frozenset(names)
    assert same(gradients(), expected)
    (line,) = saved(layer).lines
    assert line.predicted == line.counted


@pytest.mark.parametrize("use", [twice, views, used_twice, in_place, residual_in_place, returned])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_output_is_used_in_any_way(use, autocast):
    torch.manual_seed(0)
    layer, given = Odd(use), torch.randn(4, 4, 8, requires_grad=True)
    expected, _, everything = ran(layer, given, autocast=autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        table = measure(layer, given)
        checkpoint_layers(layer, Drop(lambda name, module: True), layers=[layer], example=given)
    results, report, handed = ran(layer, given, autocast=autocast)
    assert same(results, expected)
    assert report.predicted == report.counted == handed == kept(table, {"norm", "fc"}) <= everything


def test_under_autocast_a_cast_that_no_module_made_stays():
    layer, given = Block(), torch.randn(2, 4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        table = measure(layer, given)
    h = 2 * 4 * 32 * 4
    assert kept(table, ()) - kept(table, {"act"}) == 4 * h // 2  # which is in bf16 as the product is
    assert kept(table, {"ln2"}) == kept(table, ())  # a norm gives fp32, and the product saves its cast to bf16


def test_without_gradients_nothing_is_noted():
    layer, given = Block(), torch.randn(2, 4, 32)
    expected = layer(given)
    _, report, _ = dropped(LEAVES, layer, given)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(layer(given), expected)
    assert saved(layer) == report


def test_a_graph_that_is_retained_is_gone_through_again():
    layer, given = Block(), torch.randn(2, 4, 32, requires_grad=True)
    dropped(LEAVES, layer, given)
    loss = layer(given).square().sum()
    gc.collect()  # of what other tests have left some goes at the second time only
    before = live_bytes()
    first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    gradients = {gradient.untyped_storage().data_ptr(): gradient.untyped_storage().nbytes() for gradient in first}
    assert live_bytes() == before + sum(gradients.values())  # what was made again is gone with its last use
    partly = torch.autograd.grad(loss, [layer.ln2.weight], retain_graph=True)
    again = torch.autograd.grad(loss, list(layer.parameters()))
    assert same(first, again)
    assert torch.equal(partly[0], first[2 + 4])


def test_of_modules_that_give_the_same_output_the_inner_one_is_called_again():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 8))
    given = torch.randn(4, 8)
    without = flops(lambda: layer(given).sum().backward())
    checkpoint_layers(layer, Drop(lambda name, module: name in ("1", "1.1")), layers=[layer], example=given)
    assert flops(lambda: layer(given).sum().backward()) == without  # no product again


def test_a_graph_without_backward_is_freed():
    """Tanh saves its own output, whose graph would hold what stands for it."""
    layer, given = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8)
    checkpoint_layers(layer, Drop(lambda name, module: name == "2"), layers=[layer], example=given)
    gc.collect()  # of what other tests have left some goes at the second time only
    before = live_bytes()
    layer(given)
    assert live_bytes() == before


def test_gradients_of_gradients_are_those_without():
    layer, given = Odd(used_twice), torch.randn(4, 8, requires_grad=True)

    def second(model):
        (first,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [given, *model.parameters()], allow_unused=True)

    expected = second(layer)
    dropped(("norm",), layer, given)
    results = second(layer)
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_a_tensor_that_was_changed_since_is_an_error_with_its_place():
    layer, given = Block(), torch.randn(2, 4, 32)
    dropped(LEAVES, layer, given)
    changed = given.clone()
    loss = layer(changed).sum()
    changed.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[2, 4, 32\], saved in layer ''"):
        loss.backward()
    loss = layer(given).sum()
    with torch.no_grad():
        layer.fc.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[128\], saved in module '.?fc'"):
        loss.backward()


class Changing(nn.Module):
    """Gives another number of rows at each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x.sin().repeat(self.calls, 1)


def test_a_module_that_gives_something_else_the_next_time_is_an_error():
    layer = nn.Sequential(Changing(), nn.Linear(8, 8))
    checkpoint_layers(layer, Drop(lambda name, module: name == "0"), layers=[layer])
    given = torch.ones(2, 8, requires_grad=True)
    layer(given)  # is looked at, and not run again
    loss = layer(given).sum()
    with pytest.raises(
        RuntimeError, match=r"module '0' gave .*; drop only modules that give the same for the same input"
    ):
        loss.backward()


def test_an_exception_in_forward_leaves_nothing_behind():
    layer, given = Block(), torch.randn(2, 4, 32)
    expected, *_ = dropped(LEAVES, layer, given)
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 4, 31))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert same(ran(layer, given)[0], expected)


@pytest.mark.parametrize("names", [LEAVES, ("act",)])
def test_within_torchs_checkpoint_everything_is_as_without(names):
    layer, given = Block(), torch.randn(2, 4, 32, requires_grad=True)
    expected, _, _ = ran(layer, given)
    dropped(names, layer, given)
    layer.zero_grad()
    given.grad = None
    output = torch.utils.checkpoint.checkpoint(layer, given, use_reentrant=False)
    output.square().sum().backward()
    assert same((output, given.grad, *(parameter.grad for parameter in layer.parameters())), expected)


def test_frozen_weights_save_less_and_thawed_ones_are_looked_at_anew():
    layer, given = Block(), torch.randn(2, 4, 32)
    checkpoint_layers(layer, Drop(lambda name, module: True), layers=[layer])
    for trained in (True, False, True):
        layer.requires_grad_(trained)
        layer.ln1.requires_grad_(True)
        for _ in range(2):
            loss = layer(given).square().sum()
            report = saved(layer)
            loss.backward()
        assert report.predicted == report.counted
