"""What runs again runs as it did: in the mode of then, with the tensors of then, or not at all."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from par_recompute import Drop, checkpoint_layers, saved

from ..models import gpt

POLICIES = {"layers": "layers", "Drop": Drop(lambda name, module: True)}


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_in_another_mode_before_its_backward(policy):
    torch.manual_seed(0)
    model, given = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))), torch.randn(4, 8)
    model(given)  # statistics
    model.eval()
    expected, statistics = gradients(model(given).sum(), model), [buffer.clone() for buffer in model.buffers()]
    checkpoint_layers(model, POLICIES[policy], layers=[model[0]])
    for _ in range(2):
        loss = model.eval()(given).sum()
        model.train()
        assert same(gradients(loss, model), expected)
        assert same(model.buffers(), statistics)
        assert all(module.training for module in model.modules())
    assert saved(model).lines[0].dropped == (("",) if policy == "layers" else ("0", "1"))


@pytest.mark.parametrize("kind", [lambda tensor: tensor, nn.Parameter])
@pytest.mark.parametrize("policy", [*POLICIES, "cheap"])
def test_a_functional_call_has_the_gradients_of_its_own_parameters(policy, kind):
    model, ids = gpt()
    others = {name: kind((1.5 * tensor.detach()).requires_grad_()) for name, tensor in model.named_parameters()}

    def ran():
        out = torch.func.functional_call(model, others, (ids,))
        return torch.autograd.grad(out.square().sum(), list(others.values()))

    expected, own = ran(), list(model.parameters())
    checkpoint_layers(model, POLICIES.get(policy, policy))
    for _ in range(2):
        assert same(ran(), expected)
    assert all(mine is before for mine, before in zip(model.parameters(), own, strict=True))
    assert all(line.dropped for line in saved(model).lines)


class Shifted(nn.Module):
    """Reads a buffer that autograd does not save."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x):
        return F.gelu(x + self.shift)


def test_a_buffer_that_was_changed_since_is_an_error_with_its_place():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), Shifted(), nn.Linear(8, 8)))
    given = torch.randn(4, 8)
    checkpoint_layers(model, POLICIES["Drop"], example=given)
    loss = model(given).sum()
    model[0][1].shift.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[8\], saved in module '0.1'"):
        loss.backward()


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = 0.0

    def forward(self, x):
        return F.dropout(x.sin(), self.part)


def test_a_module_that_begins_to_draw_is_an_error_and_not_another_gradient():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), Dropping(), nn.Linear(8, 8)))
    given = torch.randn(4, 8)
    checkpoint_layers(model, POLICIES["Drop"], example=given)
    model(given).sum().backward()
    model[0][1].part = 0.5
    loss = model(given).sum()
    with pytest.raises(RuntimeError, match=r"module '0.1' draws random numbers, which it did not when it was"):
        loss.backward()
