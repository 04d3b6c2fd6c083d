"""The optimizer on flat slices: which ones may work so, and those that keep tensors whole."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import shard

from .helpers import (
    STAGES,
    adamw,
    assert_near,
    assert_same,
    batch,
    copies,
    for_each_stage,
    joint,
    loss_of,
    mlp,
    sharded,
    train,
    whole,
)

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


class NormScaled(torch.optim.Optimizer):
    """Steps of the same length for each tensor, as LARS makes."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


WHOLE = {"Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon, "NormScaled": NormScaled}


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
def test_one_that_looks_at_whole_tensors_or_needs_a_closure_is_refused(make):
    with pytest.raises(ValueError, match=r"pass atomic=True|in its attribute '_params'"):
        sharded(matrix(), 1, make)


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


@for_each(stage=STAGES, atomic=(False, True), fused=(False, True))
@pytest.mark.ranks(2)
def test_state_that_a_constructor_makes_is_cut_like_its_parameters(stage, atomic, fused):
    def make(parameters):
        return torch.optim.Adagrad(parameters, lr=0.02, initial_accumulator_value=0.5, fused=fused)

    reference = mlp()
    train(reference, make(reference.parameters()), [[joint(step, width=8)] for step in range(3)])
    module, optimizer = sharded(mlp(), stage, make, atomic=atomic)
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert set(optimizer.state) == set(held)
    train(module, optimizer, [[batch(step, width=8)] for step in range(3)])
    assert_near(whole(module), copies(reference))


@for_each(name=("Adafactor", "NormScaled"))
@pytest.mark.ranks(4)
def test_atomic_keeps_tensors_whole_and_equals_one_device(name):
    reference = mlp(width=10)
    train(reference, WHOLE[name](reference.parameters(), lr=0.02), [[joint(step, width=10)] for step in range(3)])
    results = []
    for stage in STAGES:
        module, optimizer = sharded(mlp(width=10), stage, lambda p: WHOLE[name](p, lr=0.02), atomic=True)
        shapes = [tuple(each.shape) for group in optimizer.param_groups for each in group["params"]]
        assert set(shapes) <= {tuple(each.shape) for each in mlp(width=10).parameters()}
        train(module, optimizer, [[batch(step, width=10)] for step in range(3)])
        results.append(whole(module))
    for result in results[1:]:
        assert_same(results[0], result)
    assert_near(results[0], copies(reference), rtol=1e-4, atol=1e-5)  # mean of means, through a quotient


def split_by_dims(module):
    """Muon for matrices, AdamW for the rest, on one module is two optimizers; here the rest is frozen."""
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    return [each for each in module.parameters() if each.requires_grad]


@pytest.mark.ranks(2)
def test_muon_equals_one_device():
    reference = mlp(width=10)
    its = torch.optim.Muon(split_by_dims(reference), lr=0.02)
    train(reference, its, [[joint(step, width=10)] for step in range(3)])
    results = []
    for stage in STAGES:
        module = mlp(width=10)
        optimizer = torch.optim.Muon(split_by_dims(module), lr=0.02)
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, bucket=300, atomic=True)
        train(module, optimizer, [[batch(step, width=10)] for step in range(3)])
        results.append(whole(module))
    for result in results[1:]:
        assert_same(results[0], result)
    # It multiplies in bfloat16, and makes directions of tiny singular values as long as the others.
    assert_near(results[0], copies(reference), rtol=0.05, atol=5e-3)


@for_each_stage
@pytest.mark.ranks(2)
def test_an_atomic_tensor_that_is_unused_is_passed_over(stage):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, both):
            x = self.one(x)
            return self.other(x) if both else x

    module, optimizer = sharded(Half(), stage, torch.optim.Adafactor, atomic=True)
    reference = Half()
    its = torch.optim.Adafactor(reference.parameters())
    for step, both in enumerate((True, False, True)):
        optimizer.zero_grad()
        module(batch(step, width=8), both).square().mean().backward()
        optimizer.step()
        its.zero_grad()
        reference(joint(step, width=8), both).square().mean().backward()
        its.step()
    assert_near(whole(module), copies(reference), rtol=1e-4, atol=1e-5)  # mean of means, through a quotient


@for_each_stage
@pytest.mark.ranks(2)
def test_the_group_dicts_stay_and_take_new_settings(stage):
    module = mlp()
    optimizer = torch.optim.SGD([{"params": module.parameters(), "tag": "mine"}], lr=0.1)
    (group,) = optimizer.param_groups
    shard(module, optimizer, stage=stage, group=dist.group.WORLD)
    assert optimizer.param_groups[0] is group
    assert group["tag"] == "mine"
    group["lr"] = 0.0
    train(module, optimizer, [[batch(0, width=8)]])
    assert_same(whole(module), copies(mlp()))


@for_each_stage
@pytest.mark.ranks(2)
def test_names_given_to_the_optimizer_do_no_harm(stage):
    module = mlp()
    optimizer = adamw(module.named_parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD)
    other, its = sharded(mlp(), stage, bucket=25_000_000)
    for model, each in ((module, optimizer), (other, its)):
        loss_of(model, batch(0, width=8)).backward()
        each.step()
    assert_same(whole(module), whole(other))


@pytest.mark.ranks(2)
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


@pytest.mark.ranks(2)
def test_a_generator_of_the_optimizer_s_own_is_neither_taken_for_a_look_at_others_nor_moved_on():
    module = mlp()
    optimizer = Noisy(module.parameters())
    before = optimizer.generator.get_state()
    shard(module, optimizer, stage=0, group=dist.group.WORLD, atomic=True)
    assert torch.equal(optimizer.generator.get_state(), before)
