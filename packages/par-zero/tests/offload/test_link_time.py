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
STEPS, ROWS, PIECE = 5, 640, 2**17


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
    batches = [torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(n)).to("strict") for n in range(STEPS)]
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


def on_host(stage, monkeypatch, depth=8, **options):
    with monkeypatch.context() as patch:
        count_host_time(patch)
        module = made(depth).to("strict")
        optimizer = adamw(module)
        offload = Offload(optimizer="host", piece=PIECE, **options)
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
    assert ratios(monkeypatch, CASES) == [2.02, 1.11, 1.24, 1.24, 1.22, 1.06, 1.19, 1.15, 1.17]


@pytest.mark.storm
@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(costs=COSTS))
def test_offloaded_step_takes_the_same_time_in_each_run(monkeypatch):
    times = [on_host(2, monkeypatch)[1] for _ in range(5)]
    assert times == pytest.approx(times[:1] * 5, rel=1e-9)


SLOW = Costs(flops=1e12, memory=1e12, link=1e9, latency=5e-6, launch=1e-6, host=20e9)
"""A link that is four times slower: each direction takes a little longer than computing."""


def least_seconds(depth, copies_in, *, in_backward):
    """Seconds of a step on a slow link of the best schedule that copies gradients as backward computes them.

    The first block's gradients leave last. Steps in backward: their last piece is updated and comes back, and then the
    next forward begins. Otherwise the step begins when all gradients have left. The forward of a block follows its
    parameters. If parameters are on the host, both passes gather them. The link into the device is then idle only from
    the backward of the first block until its gradients have left and its first piece is updated.

    Args:
        depth: Number of blocks.
        copies_in: How often parameters are copied in: once by the step, or twice, by both passes.
        in_backward: Whether the step runs in backward.
    """
    block = sum(parameter.numel() for parameter in made(1).parameters())
    link, update, forward = 4 * block / SLOW.link, 28 * block / SLOW.host, 2 * block * ROWS / SLOW.flops
    pieces = -(-4 * block // PIECE)
    filling = 2 * forward + update / pieces  # the backward of one block, and the update of one piece
    if copies_in == 2:
        return filling + link + 2 * depth * link
    if in_backward:
        return filling + depth * (forward + link) + link / pieces
    return filling + 2 * depth * link + forward


@pytest.mark.storm
@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(costs=SLOW))
def test_step_on_a_slow_link_is_near_its_limit(monkeypatch):
    depth = 16
    moved = sum(parameter.nbytes for parameter in made(depth).parameters()) / SLOW.link
    times, limits = [], []
    for stage, options in CASES:
        copies_in = 2 if "parameters" in options else 1
        times.append(on_host(stage, monkeypatch, depth, **options)[1])
        limits.append(least_seconds(depth, copies_in, in_backward="overlap" in options))
    assert [round(limit / moved, 2) for limit in limits] == [*[2.06] * 3, 2.11, *[1.38] * 3, 2.11]
    ratios_to_limits = [round(each / limit, 2) for each, limit in zip(times, limits, strict=True)]
    assert ratios_to_limits == [1.07, 1.11, 1.1, 1.07, 1.06, 1.13, 1.1, 1.06]
