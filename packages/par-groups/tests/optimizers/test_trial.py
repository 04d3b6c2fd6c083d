"""What a trial of an optimizer contradicts, and that it leaves everything as it is."""

import pytest
import torch
from torch import nn

from par_groups import TensorStepper, UpdateScope, draws_numbers, find_scope_violation, state_counter_bytes, state_slots
from par_testing import for_each
from par_testing.optimizers import Drawing, NormScaled, Shampoo

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


def test_trial_finds_numbers_that_a_step_draws():
    before = torch.get_rng_state()
    for kind, draws in ((Drawing, True), (torch.optim.SGD, False)):
        optimizer = kind([nn.Parameter(torch.ones(3, 3))], lr=0.1)
        assert draws_numbers(optimizer, optimizer.param_groups[0]) is draws
    assert torch.equal(torch.get_rng_state(), before)


def test_trial_finds_the_state_of_a_tensor():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3, 3))])
    group = optimizer.param_groups[0]
    assert state_slots(optimizer, group, torch.bfloat16) == dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)
    assert state_counter_bytes(optimizer, group, torch.bfloat16) == 4
    assert not optimizer.state


def test_tensors_stepped_by_themselves_equal_a_step_of_all():
    tensors = [nn.Parameter(torch.full((2,), float(number))) for number in range(3)]
    others = [nn.Parameter(tensor.detach().clone()) for tensor in tensors]
    together, apart = torch.optim.AdamW(tensors), torch.optim.AdamW(others)
    for tensor in (*tensors, *others):
        tensor.grad = torch.ones(2)
    together.step()
    stepper = TensorStepper(apart)
    for other in others:
        stepper.step(other, 0, apart.state[other])
    stepper.apply_changes_()
    assert torch.equal(torch.stack([*tensors]), torch.stack([*others]))


class Counting(torch.optim.SGD):
    """Changes its learning rate by how many tensors it steps."""

    def step(self, closure=None):
        result = super().step(closure)
        self.param_groups[0]["lr"] += self.param_groups[0]["params"][0].sum().item()
        return result


def test_setting_that_depends_on_the_tensor_raises():
    tensors = [nn.Parameter(torch.full((2,), float(number))) for number in range(2)]
    for tensor in tensors:
        tensor.grad = torch.ones(2)
    stepper = TensorStepper(Counting(tensors, lr=0.1))
    stepper.step(tensors[0], 0, {})
    with pytest.raises(RuntimeError, match=r"Counting sets 'lr' in a step by what it steps, so its tensors cannot be"):
        stepper.step(tensors[1], 0, {})
