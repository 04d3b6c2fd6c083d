"""Several optimizers as one: every step is that of each, and whatever reads an optimizer sees all."""

import copy

import pytest
import torch
from torch import nn

from par_groups import JointOptimizer, gradients


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def pair(module):
    weights = [each for each in module.parameters() if each.ndim == 2]
    biases = [each for each in module.parameters() if each.ndim == 1]
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.AdamW([{"params": [each]} for each in biases])


def loss_of(module, step):
    return module(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean()


def train(module, optimizers, schedulers, steps):
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(module, step).backward()
        for each in (*optimizers, *schedulers):
            each.step()


def test_it_steps_as_its_optimizers_do_and_goes_on_with_its_state():
    expected, module, resumed = model(), model(), model()
    apart = pair(expected)
    halved = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in apart]
    train(expected, apart, halved, range(4))

    joint = JointOptimizer(*pair(module))
    scheduler = torch.optim.lr_scheduler.StepLR(joint, 2, 0.5)
    train(module, [joint], [scheduler], range(2))
    assert len(joint.param_groups) == 3
    assert set(joint.state) == set(module.parameters())
    resumed.load_state_dict(module.state_dict())
    other = JointOptimizer(*pair(resumed))
    its = torch.optim.lr_scheduler.StepLR(other, 2, 0.5)
    other.load_state_dict(copy.deepcopy(joint.state_dict()))
    its.load_state_dict(scheduler.state_dict())
    train(module, [joint], [scheduler], range(2, 4))
    train(resumed, [other], [its], range(2, 4))
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
        assert torch.equal(resumed.state_dict()[name], value)


def test_a_closure_is_called_once_and_hooks_are():
    module = model()
    joint, seen = JointOptimizer(*pair(module)), []
    joint.register_step_post_hook(lambda *_: seen.append("step"))

    def closure():
        seen.append("closure")
        joint.zero_grad()
        loss = loss_of(module, 0)
        loss.backward()
        return loss

    loss = joint.step(closure)
    assert seen == ["closure", "step"]
    assert loss.item() > 0
    assert len(list(gradients(joint))) == 4
    joint.zero_grad()
    assert not list(gradients(joint))


def test_state_is_written_to_the_optimizer_that_has_the_tensor():
    module = model()
    first, second = pair(module)
    joint = JointOptimizer(first, second)
    weight, bias = module[0].weight, module[0].bias
    joint.state[bias] = {"exp_avg": torch.ones(5)}
    joint.state["steps"] = 3
    assert bias in second.state
    assert first.state["steps"] == 3
    assert joint.state.get(weight, {}) == {}
    assert weight not in first.state  # asking makes none
    assert joint.state.pop(bias)["exp_avg"].sum() == 5
    assert bias not in second.state
    with pytest.raises(KeyError, match=r"shape \(2,\) is in no param group"):
        joint.state[torch.zeros(2)] = {}


def test_mistakes():
    module = model()
    first, second = pair(module)
    with pytest.raises(TypeError, match="optimizer 1 is a str"):
        JointOptimizer(first, "adamw")
    with pytest.raises(TypeError, match="was given no optimizer"):
        JointOptimizer()
    with pytest.raises(ValueError, match=r"shape \(5, 4\) is in the SGD and in the AdamW"):
        JointOptimizer(first, torch.optim.AdamW(module.parameters()))
    joint = JointOptimizer(first, second)
    with pytest.raises(ValueError, match=r"add it to one of JointOptimizer.optimizers"):
        joint.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="the state has 1 param groups, and here are 3"):
        joint.load_state_dict(first.state_dict())
