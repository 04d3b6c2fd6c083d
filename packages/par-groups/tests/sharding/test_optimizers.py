"""Whether an optimizer has stepped, and how its `zero_grad` is called."""

import pytest
import torch
from torch import nn

from par_groups import JointOptimizer, drop_reads_, has_stepped, zero_grad_
from par_testing import for_each


def made(kind, **settings):
    weight = nn.Parameter(torch.arange(4.0).view(2, 2))
    return kind([weight], lr=0.1, **settings), weight


class Modes(torch.optim.SGD):
    """Reads its state in `train`, which a defaultdict answers with an empty entry."""

    mode = None

    def train(self):
        self.mode = "train"
        return [self.state[each] for group in self.param_groups for each in group["params"]]

    def eval(self):
        self.mode = "eval"


STATES = {
    "nothing": ({}, False),
    "a count of zero": ({"step": torch.tensor(0.0), "sum": torch.arange(4.0).view(2, 2)}, False),
    "a count": ({"step": torch.tensor(1.0)}, True),
    "a number as count": ({"step": 2}, True),
    "zeros": ({"momentum": torch.zeros(2, 2)}, False),
    "a gradient of ones": ({"momentum": torch.ones(2, 2)}, True),
    "a copy of the parameter": ({"slow": torch.arange(4.0).view(2, 2)}, False),
    "values": ({"momentum": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, True),
    "nothing yet": ({"momentum_buffer": None}, False),
    "without values": ({"momentum": torch.zeros(2, 2, device="meta")}, False),
}


@for_each(name=STATES)
def test_has_stepped_reads_the_state(name):
    state, stepped = STATES[name]
    optimizer, weight = made(torch.optim.SGD)
    optimizer.state[weight] = state
    assert has_stepped(optimizer) is stepped


def test_has_stepped_counts_no_empty_entry():
    optimizer, weight = made(Modes)
    optimizer.train()
    assert weight in optimizer.state
    assert not has_stepped(optimizer)


@for_each(kind=(torch.optim.Adagrad, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Rprop))
def test_has_stepped_after_a_step_of_torch_optimizers(kind):
    optimizer, weight = made(kind)
    assert not has_stepped(optimizer)
    weight.grad = torch.randn(2, 2)
    optimizer.step()
    assert has_stepped(optimizer)


class Plain(torch.optim.SGD):
    def zero_grad(self):
        super().zero_grad()


class Loose(torch.optim.SGD):
    def zero_grad(self, **options):
        super().zero_grad(**options)


@for_each(kind=(Plain, Loose, torch.optim.SGD), joint=(False, True))
def test_zero_grad_is_called_as_its_class_has_it(kind, joint):
    inner, weight = made(kind)
    optimizer = JointOptimizer(inner) if joint else inner
    weight.grad = torch.ones(2, 2)
    zero_grad_(optimizer, True)
    assert weight.grad is None
    weight.grad = torch.ones(2, 2)
    zero_grad_(optimizer, False)
    assert (weight.grad is None) == (kind is Plain)


def test_joint_optimizer_switches_those_that_have_modes():
    modes, plain = made(Modes)[0], made(torch.optim.SGD)[0]
    both = JointOptimizer(modes, plain)
    both.eval()
    assert modes.mode == "eval"
    both.train()
    assert modes.mode == "train"
    assert not hasattr(JointOptimizer(plain), "train")
    assert not hasattr(both, "swap")


def test_drop_reads_removes_the_empty_entries_of_other_tensors():
    optimizer, weight = made(torch.optim.AdamW)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    other = nn.Parameter(torch.zeros(3))
    assert optimizer.state[other] == {}
    with pytest.raises(KeyError):
        optimizer.state_dict()
    drop_reads_(optimizer)
    assert set(optimizer.state) == {weight}
    assert optimizer.state_dict()["state"].keys() == {0}


def test_drop_reads_refuses_state_that_no_step_reads():
    optimizer, _ = made(torch.optim.AdamW)
    optimizer.state[nn.Parameter(torch.zeros(3))]["ema"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"has 'ema' for a tensor of shape \(3,\) that is in none of its param groups"):
        drop_reads_(optimizer)
