"""Frozen parameters and buffers, which a rank may have drawn after `initialize` gave each rank a seed of its own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_train import Strategy


def drawn():
    """A frozen layer, a trained one, and a buffer."""
    model = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 2))
    model.register_buffer("noise", torch.randn(3))
    return model


def outputs_of(model):
    with torch.no_grad():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, [*model(torch.ones(1, 4)).flatten().tolist(), *model.noise.tolist()])
    return every


@pytest.mark.ranks(2)
@for_each(zero=(0, 1, 2, 3))
def test_initialize_second_model_is_the_same_on_every_rank(zero):
    torch.manual_seed(0)
    with Strategy(zero=zero) as strategy:
        first = drawn()
        strategy.initialize(
            first, torch.optim.SGD(first[1].parameters(), 0.1)
        )  # torch's seed is the rank's from here on
        second, _ = strategy.initialize(model := drawn(), torch.optim.SGD(model[1].parameters(), 0.1))
        teacher = strategy.initialize(drawn().requires_grad_(False))
        for model in (second, teacher):
            outputs = outputs_of(model)
            assert outputs[0] == outputs[1]
