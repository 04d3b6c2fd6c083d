"""Clipping in the next step, for trainers that pass the norm before it."""

import math

import pytest
import torch
from torch import nn

from par_precision import DeferredClipping, mixed


def make():
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return mixed(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp32")


def test_deferred_clip_reports_the_norm_after_the_step():
    model, optimizer = make()
    clipping = DeferredClipping(optimizer, None, torch.device("cpu"))
    optimizer.backward(model(torch.tensor([3.0, 4.0, 0.0])).sum())
    norm = clipping.clip(1.0, 2)
    assert math.isnan(norm)
    optimizer.step()
    assert norm == 5.0
    assert torch.allclose(model.weight, torch.tensor([[1 - 3 / 5, 1 - 4 / 5, 1.0]]))
    assert optimizer.clip_norm is None


def test_deferred_clip_of_another_norm_or_optimizer_raises():
    model, optimizer = make()
    with pytest.raises(ValueError, match="norm_type=1"):
        DeferredClipping(optimizer, None, torch.device("cpu")).clip(1.0, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"this SGD is not from par_precision\.mixed"):
        DeferredClipping(plain, None, torch.device("cpu")).clip(1.0, 2)
