"""What a trial of an optimizer contradicts, and that it leaves everything as it is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import UpdateScope, shard
from par_zero.optimizer.probe import draws_numbers, find_scope_violation

from ..helpers import NormScaled, Shampoo, assert_same, batch, copies, loss_of, mlp, sharded

FLAT = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), capturable=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), capturable=True, foreach=True),
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


def tried(make, scope=UpdateScope.ELEMENT):
    optimizer = make([nn.Parameter(torch.ones(3, 3))])
    return find_scope_violation(optimizer, optimizer.param_groups[0], scope)


@for_each(make=FLAT.values())
def test_trial_of_an_elementwise_optimizer_shows_nothing(make):
    assert tried(make) is None


class Own(torch.optim.Optimizer):
    """What steps by a function of a tensor, its gradient and all gradients."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            given = [each for each in group["params"] if each.grad is not None]
            for each in given:
                each.sub_(self.update(each, given), alpha=group["lr"])


class JointNorm(Own):
    def update(self, each, given):
        return each.grad / torch.nn.utils.get_total_norm([other.grad for other in given])


class Estimating(Own):
    """A step size that grows with what all gradients agree on, as D-Adaptation's; it moves next to nothing at first."""

    def update(self, each, given):
        sums = self.state.setdefault("sums", {})
        found = 0.0
        for other in given:
            sums[other] = sums.get(other, 0) + other.grad
            found += float((sums[other] * other.grad).sum())
        self.scale = max(getattr(self, "scale", 1e-6), 1e-6 * found)
        return self.scale * each.grad


class Blocks(Own):
    """8-bit codes and a scale for each block of 256, of tensors with 4,096 elements or more."""

    def update(self, each, given):
        if each.numel() < 4096:
            return each.grad
        state = self.state[each]
        blocks = nn.functional.pad(each.grad.flatten(), (0, -each.numel() % 256)).view(-1, 256)
        state["scale"] = blocks.abs().amax(1, keepdim=True) / 127
        state["codes"] = (blocks / state["scale"]).round().to(torch.int8)
        return (state["codes"] * state["scale"]).flatten()[: each.numel()].view_as(each)


class Nested(Own):
    """Numbers for each element that lie in a mapping of the state, where slices do not look for them."""

    def update(self, each, given):
        kept = self.state[each].setdefault("kept", {"momentum": torch.zeros_like(each)})
        return kept["momentum"].mul_(0.9).add_(each.grad)


FOUND = {
    torch.optim.Adafactor: "otherwise than a tensor of another shape",
    NormScaled: "otherwise than a tensor of another shape",
    Shampoo: "",
    JointNorm: "by what is in other tensors",
    Estimating: "by what is in other tensors",
    Blocks: "tensor",
    Nested: "its state 'kept'",
}


@for_each(make=[kind for kind in FOUND if kind is not Shampoo], lr=(1e-2, 1e-6, 0.0, torch.tensor(1e-5)))
def test_trial_finds_what_an_optimizer_looks_at(make, lr):
    """Whatever learning rate it has: a warm-up begins with next to nothing."""
    assert FOUND[make] in tried(lambda parameters: make(parameters, lr=lr))


@for_each(make=(JointNorm, Estimating))
def test_trial_finds_one_step_size_of_all_tensors(make):
    assert "other tensors" in tried(make, UpdateScope.TENSOR)
    assert tried(NormScaled, UpdateScope.TENSOR) is None


def test_trial_raises_what_a_step_raises():
    with pytest.raises(ValueError, match="not enough values to unpack"):
        tried(Shampoo)


class Drawing(torch.optim.SGD):
    """Adds noise from torch's own generator."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(torch.randn(each.shape))
        return super().step(closure)


@pytest.mark.ranks(1)
def test_trial_runs_no_hook_and_draws_no_number():
    module = mlp()
    optimizer = Drawing(module.parameters(), lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before = torch.get_rng_state()
    assert draws_numbers(optimizer, optimizer.param_groups[0])
    with pytest.raises(ValueError, match=r"pass update=dict\(atomic=True\)"):
        shard(module, optimizer, stage=1, group=dist.group.WORLD, update={"elementwise": True})
    assert not called
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.ranks(1)
def test_trial_leaves_parameters_and_scheduler_as_they_are():
    """A scheduler's wrapper is bound to the optimizer itself."""
    module = mlp()
    optimizer = NormScaled(module.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = copies(module)
    loss_of(module, batch(0, width=8)).backward()
    with pytest.raises(ValueError, match=r"pass update=dict\(atomic=True\)"):
        shard(module, optimizer, stage=1, group=dist.group.WORLD, update={"elementwise": True})
    assert_same(copies(module), before)


class Noisy(torch.optim.SGD):
    """Draws from a generator of its own, and keeps a list and names of its parameters."""

    def __init__(self, parameters):
        given = list(parameters)
        super().__init__(given, lr=0.1)
        self.generator, self.names = torch.Generator().manual_seed(1), {each: str(i) for i, each in enumerate(given)}
        self.drawn = []

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.drawn.append(torch.randn((), generator=self.generator))
                    each.grad.add_(self.drawn[-1])
        return super().step(closure)


@pytest.mark.ranks(1)
def test_trial_leaves_attributes_as_they_are():
    module = mlp()
    optimizer = Noisy(module.parameters())
    before = optimizer.generator.get_state()
    with pytest.raises(ValueError, match=r"pass update=dict\(atomic=True\)"):
        shard(module, optimizer, stage=0, group=dist.group.WORLD, update={"elementwise": True})
    assert torch.equal(optimizer.generator.get_state(), before)
    assert not optimizer.drawn


@pytest.mark.ranks(2)
def test_shard_refuses_noise_that_differs_between_replicas():
    with pytest.raises(ValueError, match=r"Drawing: its step draws random numbers .* a generator of its own"):
        sharded(mlp(), 0, lambda parameters: Drawing(parameters, lr=0.1))
