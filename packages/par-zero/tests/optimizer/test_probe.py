"""What `shard` does with what a trial of an optimizer shows, and that a trial leaves everything as it is."""

import pytest
import torch
import torch.distributed as dist

from par_groups import draws_numbers
from par_testing.optimizers import Drawing, NormScaled
from par_zero import shard

from ..helpers import assert_same, batch, copies, loss_of, mlp, sharded


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
