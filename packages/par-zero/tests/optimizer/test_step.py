"""The optimizer on flat slices, and on whole parameters that are dealt out."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import JointOptimizer
from par_testing import for_each
from par_zero import shard

from ..helpers import (
    KINDS_OF_STAGES,
    STAGES,
    WHOLE,
    Stumbling,
    adamw,
    assert_near,
    assert_same,
    batch,
    copies,
    for_each_stage,
    joint,
    loss_of,
    matrices_and_rest,
    mlp,
    policies,
    sharded,
    train,
    whole,
)


@for_each(stage=KINDS_OF_STAGES, how=((False, True), (True, False)))
@pytest.mark.ranks(2)
def test_state_that_a_constructor_makes_is_cut_like_its_parameters(stage, how):
    atomic, fused = how

    def make(parameters):
        return torch.optim.Adagrad(parameters, lr=0.02, initial_accumulator_value=0.5, fused=fused)

    reference = mlp()
    train(reference, make(reference.parameters()), [[joint(step, width=8)] for step in range(2)])
    module, optimizer = sharded(mlp(), stage, make, atomic=atomic)
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert set(optimizer.state) == set(held)
    train(module, optimizer, [[batch(step, width=8)] for step in range(2)])
    assert_near(whole(module), copies(reference))


@for_each(name=("Adafactor", "NormScaled"))
@pytest.mark.ranks(2)
def test_atomic_keeps_tensors_whole_and_equals_one_device(name):
    reference = mlp(width=10)
    train(reference, WHOLE[name](reference.parameters(), lr=0.02), [[joint(step, width=10)] for step in range(2)])
    results = []
    for stage in STAGES:
        module, optimizer = sharded(mlp(width=10), stage, lambda p: WHOLE[name](p, lr=0.02), atomic=True)
        shapes = [tuple(each.shape) for group in optimizer.param_groups for each in group["params"]]
        assert set(shapes) <= {tuple(each.shape) for each in mlp(width=10).parameters()}
        train(module, optimizer, [[batch(step, width=10)] for step in range(2)])
        results.append(whole(module))
    for result in results[1:]:
        assert_same(results[0], result)
    assert_near(results[0], copies(reference), rtol=1e-4, atol=1e-5)  # mean of means, through a quotient


@pytest.mark.ranks(2)
def test_torch_s_muon_beside_adamw_equals_one_device():
    def make(module):
        matrices, rest = matrices_and_rest(module)
        return JointOptimizer(torch.optim.Muon(matrices, lr=0.02), adamw(rest))

    reference = mlp(width=10)
    train(reference, make(reference), [[joint(step, width=10)] for step in range(2)])
    results = []
    for stage in STAGES:
        module = mlp(width=10)
        optimizer = make(module)
        options = {"bucket": 300, "atomic": lambda group: "ns_steps" in group}
        assert shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(**options))[1] is optimizer
        train(module, optimizer, [[batch(step, width=10)] for step in range(2)])
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


class Shrinking(torch.optim.AdamW):
    """Does something of its own behind the step of its parent."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.mul_(0.9)
        return loss


@for_each_stage
@pytest.mark.ranks(2)
def test_a_step_that_calls_its_parent_s_is_one_step_though_torch_calls_hooks_for_both(stage):
    """Torch does so as soon as there is an optimizer of the parent's class."""
    adamw(mlp().parameters())
    module, optimizer = sharded(
        mlp(), stage, lambda parameters: Shrinking(parameters, lr=1e-2, eps=1e-3), elementwise=True
    )
    reference = mlp()
    its = Shrinking(reference.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        for one, each, rows in ((module, optimizer, batch), (reference, its, joint)):

            def closure(one=one, each=each, rows=rows, step=step):
                each.zero_grad()
                loss_of(one, rows(step, width=8)).backward()

            if step == 1:
                each.step(closure)
            else:
                closure()
                each.step()
    assert_near(whole(module), copies(reference))


def stumble(*_):
    raise ArithmeticError("a hook stumbles")


@for_each(stage=KINDS_OF_STAGES, where=("hook", "step"))
@pytest.mark.ranks(2)
def test_a_step_that_has_failed_before_it_began_is_made_when_it_is_called_again(stage, where):
    results = []
    for fails in (False, True):
        module, optimizer = sharded(mlp(), stage, lambda parameters: Stumbling(parameters, lr=1e-2), elementwise=True)
        for step in range(3):
            loss_of(module, batch(step, width=8)).backward()
            if step == 1 and fails:
                Stumbling.fails = where == "step"
                hook = optimizer.register_step_pre_hook(stumble) if where == "hook" else None
                with pytest.raises(ArithmeticError, match="stumbles"):
                    optimizer.step()
                if hook is not None:
                    hook.remove()
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole(module))
    assert_same(*results)


@for_each_stage
@pytest.mark.ranks(2)
def test_state_that_was_read_by_the_modules_parameters_can_be_saved(stage):
    module, optimizer = sharded(mlp(), stage)
    train(module, optimizer, [[batch(0, width=8)]])
    assert [dict(optimizer.state[parameter]) for parameter in module.parameters()] == [{}] * len(copies(mlp()))
    state = optimizer.state_dict()
    assert len(state["state"]) == len(state["param_groups"][0]["params"])
    train(module, optimizer, [[batch(1, width=8)]])
