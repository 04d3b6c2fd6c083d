"""Steps on a strict accelerator, which raises on races and counts where the host waits for the device."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each, waits_seen

from .helpers import batch, copies, loss_of, mlp, sharded


@for_each(stage=[1, 2])
@pytest.mark.accelerator(races="error")
@pytest.mark.ranks(2, backend="strict")
def test_step_on_an_accelerator_gathers_late_and_waits_nowhere(stage):
    def trained_on(device):
        module = mlp().to(device)
        _, optimizer = sharded(module, stage)
        losses = []
        for step in range(3):
            inputs = batch(step, width=8).to(device)
            waits_seen()
            # Rank 1 has no gradients of the first block, so the ranks exchange flags.
            begin = dist.get_rank() if step else 0
            loss = loss_of(module[begin:], inputs)
            loss.backward()
            optimizer.step()
            assert waits_seen() == {}
            assert any(type(parameter) is not nn.Parameter for parameter in module.parameters())  # in flight
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [each.cpu() for each in (*losses, *copies(module).values())]

    for found, expected in zip(trained_on("strict"), trained_on("cpu"), strict=True):
        assert torch.equal(found, expected)


@for_each(stage=[1, 2])
@pytest.mark.accelerator(races="error")
@pytest.mark.ranks(2, backend="strict")
def test_module_dropped_with_gathers_in_flight_frees_memory_later(stage):
    def in_flight():
        module, optimizer = sharded(mlp().to("strict"), stage)
        loss_of(module, batch(0, width=8).to("strict")).backward()
        optimizer.step()
        assert any(type(parameter) is not nn.Parameter for parameter in module.parameters())

    for _ in range(3):  # each module takes memory of the one before, which is a race if somebody still writes it
        in_flight()
        gc.collect()
