"""The plan's prediction of a step's seconds with an offloaded optimizer, against virtual time of a strict device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_groups import Topology
from par_testing import Accelerator, Costs, device_times, for_each
from par_zero import Offload, shard

from .virtual import count_host_time

plan = pytest.importorskip("par_plan")

SHAPE = plan.Shape(layers=8, width=128, heads=4, context=32, vocabulary=64)
BATCH, STEPS = 20, 4
RATES = {
    "computing": {"link": 4e9, "host": 20e9},
    "link": {"link": 1e9, "host": 20e9},
    "host": {"link": 4e9, "host": 5e9},
}
"""Bytes per second of the link and of the host's step, by what takes the longest in a step with offload."""


def costs(slowest):
    """The plan counts matrix products and attention, so other kernels and launches take no time."""
    return Costs(flops=1e12, memory=1e30, latency=0.0, launch=0.0, **RATES[slowest])


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, shape.mlp), nn.Linear(shape.mlp, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def seconds_of_step(stage, offload, monkeypatch):
    """Virtual time of a step in the steady state, with the host's arithmetic of AdamW."""

    with monkeypatch.context() as patch:
        count_host_time(patch)
        module = GPT(SHAPE).to("strict")
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        policies = {"overlap": {"bucket": 1}, "offload": offload, "units": list(module.blocks)}
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies)
        tokens = torch.randint(SHAPE.vocabulary, (BATCH, SHAPE.context)).to("strict")
        for _ in range(STEPS):
            device_times()
            functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.accelerator.current_stream().synchronize()
            times = device_times()
        return times.total


def check(stage, slowest, monkeypatch):
    rates = RATES[slowest]
    tiers = plan.OffloadTiers(host_memory=1e12, link=rates["link"], host_step=rates["host"])
    machine = plan.Machine(flops=1e12, efficiency=1.0, tiers=tiers)
    for fraction in (0.0, 1.0):
        job = plan.TrainingJob(batch=BATCH, zero=stage, host=fraction)
        predicted = sum(plan.predict(SHAPE, Topology.from_config({}, 1), job, machine).busiest.seconds.values())
        found = seconds_of_step(stage, Offload(optimizer="host") if fraction else None, monkeypatch)
        assert predicted == pytest.approx(found, rel=0.05)


@pytest.mark.storm
@for_each(stage=[0, 2, 3])
@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(costs=costs("computing")))
def test_predicted_seconds_with_offload_are_those_of_a_step(stage, monkeypatch):
    check(stage, "computing", monkeypatch)


@for_each(stage=[0, 2, 3])
@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(costs=costs("link")))
def test_predicted_seconds_on_a_slow_link_are_those_of_a_step(stage, monkeypatch):
    check(stage, "link", monkeypatch)


@pytest.mark.storm
@for_each(stage=[0, 2, 3])
@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(costs=costs("host")))
def test_predicted_seconds_on_a_slow_host_are_those_of_a_step(stage, monkeypatch):
    check(stage, "host", monkeypatch)
