"""Which optimizers may step flat shares, as `shard` finds out by trying them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import shard

from ..helpers import WHOLE, NormScaled, assert_same, batch, copies, loss_of, mlp, sharded

FLAT = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


def matrix():
    return nn.Linear(3, 3, bias=False)


@for_each(make=FLAT.values())
@pytest.mark.ranks(1)
def test_an_element_wise_optimizer_is_taken_and_left_as_it_is(make):
    module = matrix()
    value = module.weight.detach().clone()
    _, optimizer = sharded(module, 1, make)
    assert not optimizer.state
    assert torch.equal(module.weight, value)


@for_each(make=(*WHOLE.values(), torch.optim.LBFGS))
@pytest.mark.ranks(1)
def test_one_that_looks_at_whole_tensors_or_needs_a_closure_is_refused_and_left_as_it_is(make):
    module = matrix()
    value = module.weight.detach().clone()
    optimizer = make(module.parameters())
    with pytest.raises(ValueError, match=r"pass atomic=True|in its attribute '_params'"):
        shard(module, optimizer, stage=1, group=dist.group.WORLD)
    assert not optimizer.state
    assert torch.equal(module.weight, value)


@for_each(foreach=(None, True))
@pytest.mark.ranks(1)
def test_one_for_captured_graphs_is_tried_on_the_cpu(foreach):
    sharded(matrix(), 1, lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), capturable=True, foreach=foreach))


@pytest.mark.ranks(1)
def test_trying_an_optimizer_runs_none_of_its_hooks_and_draws_none_of_its_numbers():
    module, drawing = matrix(), matrix()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    shard(module, optimizer, stage=1, group=dist.group.WORLD)
    assert not called
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="pass atomic=True"):
        sharded(drawing, 1, Drawing)
    assert torch.equal(torch.get_rng_state(), before)


class Drawing(torch.optim.SGD):
    """Adds noise from torch's own generator."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(torch.randn(each.shape))
        return super().step(closure)


@pytest.mark.ranks(1)
def test_an_optimizer_is_tried_alone_whatever_scheduler_gradients_or_learning_rate_it_has():
    """A scheduler's wrapper is bound to the optimizer itself; with a learning rate of 0 nothing would move."""
    for lr in (0.1, 0.0):
        module = mlp()
        optimizer = NormScaled(module.parameters(), lr=lr)
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        before = copies(module)
        loss_of(module, batch(0, width=8)).backward()
        with pytest.raises(ValueError, match="pass atomic=True"):
            shard(module, optimizer, stage=1, group=dist.group.WORLD)
        assert_same(copies(module), before)


class Noisy(torch.optim.SGD):
    """Draws from a generator of its own, and knows its parameters' names."""

    def __init__(self, parameters):
        given = list(parameters)
        super().__init__(given, lr=0.1)
        self.generator, self.names = torch.Generator().manual_seed(1), {each: str(i) for i, each in enumerate(given)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.add_(torch.randn((), generator=self.generator))
        return super().step(closure)


@pytest.mark.ranks(1)
def test_a_generator_of_the_optimizer_s_own_is_not_moved_on():
    module = mlp()
    optimizer = Noisy(module.parameters())
    before = optimizer.generator.get_state()
    with pytest.raises(ValueError, match="pass atomic=True"):
        shard(module, optimizer, stage=0, group=dist.group.WORLD)
    assert torch.equal(optimizer.generator.get_state(), before)
    shard(module, optimizer, stage=0, group=dist.group.WORLD, atomic=True)
    assert torch.equal(optimizer.generator.get_state(), before)
