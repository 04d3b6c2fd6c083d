"""Seconds of a step with the optimizer on the host of an accelerator, in virtual time.

Rates are such that computing, the link in each direction and the host's step take 5 : 2 : 2, about as with 13e9
parameters on one GPU. Virtual times are the same in each run, so the ratios are those that docs/concepts lists.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import Accelerator, Costs, device_times
from par_zero import Offload, shard

from .virtual import count_host_time, host_step

COSTS = Costs(flops=1e12, memory=1e12, link=4e9, latency=5e-6, launch=1e-6, host=20e9)
STEPS = 5


class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.last = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.last(nn.functional.gelu(self.first(self.norm(x))))


def made(depth=8):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


def seconds_of(module, optimizer, after_step=lambda: None):
    """Losses, and virtual time of the last step. The first steps learn in which order modules run."""
    batches = [torch.randn(640, 128, generator=torch.Generator().manual_seed(n)).to("strict") for n in range(STEPS)]
    losses, steps = [], []
    for batch in batches:
        device_times()
        loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        after_step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        # As a program does that prints its loss: the host waits for the passes, and not for the copies.
        torch.accelerator.current_stream().synchronize()
        steps.append(device_times())
    return [loss.item() for loss in losses], steps[-1].total


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def on_device(stage):
    module = made().to("strict")
    optimizer = adamw(module)
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 1})
    return seconds_of(module, optimizer)


def on_host(stage, monkeypatch, **options):
    with monkeypatch.context() as patch:
        count_host_time(patch)
        module = made().to("strict")
        optimizer = adamw(module)
        offload = Offload(optimizer="host", **options)
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 1}, offload=offload)
        return seconds_of(module, optimizer)


def by_fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    module, mesh = made(), init_device_mesh("strict", (1,))
    size = sum(parameter.nbytes for parameter in module.parameters())
    for each in (*module, module):
        fully_shard(each, mesh=mesh, offload_policy=CPUOffloadPolicy())
    return seconds_of(module, adamw(module), lambda: host_step(size))


def ratios(monkeypatch, cases):
    """Seconds of FSDP2, and of each stage and options, as a multiple of those without offload."""
    losses, alone = on_device(2)
    fsdp_losses, fsdp = by_fsdp()
    assert fsdp_losses == losses
    found = [fsdp / alone]
    for stage, options in cases:
        offloaded_losses, seconds = on_host(stage, monkeypatch, **options)
        assert offloaded_losses == losses
        found.append(seconds / alone)
    return [round(each, 2) for each in found]


IN_BACKWARD = {"overlap": "backward"}
CASES = (
    (0, {}),
    (2, {}),
    (3, {}),
    (3, {"parameters": "host"}),
    (0, IN_BACKWARD),
    (2, IN_BACKWARD),
    (3, IN_BACKWARD),
    (3, {"parameters": "host", **IN_BACKWARD}),
)


@pytest.mark.storm
@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(costs=COSTS))
def test_offloaded_step_takes_little_longer_than_without(monkeypatch):
    assert ratios(monkeypatch, CASES) == [2.02, 1.11, 1.23, 1.24, 1.2, 1.08, 1.2, 1.2, 1.19]


@pytest.mark.storm
@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(costs=COSTS))
def test_offloaded_step_takes_the_same_time_in_each_run(monkeypatch):
    times = [on_host(2, monkeypatch)[1] for _ in range(5)]
    assert times == pytest.approx(times[:1] * 5, rel=1e-9)


SLOW = Costs(flops=1e12, memory=1e12, link=1e9, latency=5e-6, launch=1e-6, host=20e9)
"""A link that is four times slower: each direction takes as long as computing, or longer."""


@pytest.mark.storm
@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(costs=SLOW))
def test_step_on_a_slow_link_is_shorter_with_steps_in_backward(monkeypatch):
    moved = sum(parameter.nbytes for parameter in made().parameters()) / SLOW.link
    times = [on_host(stage, monkeypatch, **options)[1] / moved for stage, options in CASES]
    assert [round(each, 2) for each in times] == [2.23, 2.33, 2.39, 2.39, 1.55, 1.64, 1.75, 2.39]
