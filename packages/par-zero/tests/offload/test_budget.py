"""What is "auto" lies elsewhere as far as budgets ask for: within every tier, with the same bits, or refused in words."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import Offload, memory, residency, shard

from ..helpers import assert_same, sgd, whole
from .cases import BF16, moments, small

WIDTH, BLOCKS = 64, 4
BLOCK = WIDTH * WIDTH * 4  # bytes of a layer in fp32, of which nothing is rounded up


class Model(nn.Module):
    """Layers of equal sizes, a norm that is uneven, a frozen table, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH - 3)
        self.table = nn.Parameter(torch.ones(50), requires_grad=False)
        self.register_buffer("mean", torch.zeros(100))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.norm(x[:, 3:]) * self.table[0] + self.mean[0].to(x.dtype)


def trained(stage, offload, make=small, **options):
    """The module after three steps, all that it has learned, and the fullest that was seen of each tier."""
    module = Model()
    optimizer = make([each for each in module.parameters() if each.requires_grad])
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, bucket=1, inflight=2, offload=offload, **options)
    losses, most = [], dict.fromkeys(("device", "host", "disk"), 0)
    for step in range(3):
        x = torch.full((2, WIDTH), 0.1 * (step + 1 + dist.get_rank()), dtype=options.get("param_dtype"))
        loss = (x + torch.arange(WIDTH).to(x.dtype) / WIDTH).sin()
        loss = module(loss).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        held = residency(module)
        most = {tier: max(size, held.total(tier), held.total(tier, fullest=True)) for tier, size in most.items()}
    return {"loss": torch.stack(losses)} | whole(module) | moments(optimizer), most, module


@pytest.mark.ranks(2)
def test_x(tmp_path):
    for stage in range(4):
        for o in ({}, BF16):
            _, full, m = trained(stage, None, **o)
            print(stage, o, full); print(residency(m))
            for b in (full["device"] - 30_000, 100):
                for rooms in ({"host": "1MB"}, {"disk": "1MB"}, {"host": 40_000, "disk": "1MB"}):
                    auto = ("optimizer", "gradients", "parameters")[:3 if stage == 3 else 1]
                    try:
                        _, full2, m = trained(stage, Offload(**dict.fromkeys(auto, "auto"), path=tmp_path, piece=2048, ahead=2, budget={"device": b, **rooms}), **o)
                        print(b, rooms, full2); print(residency(m))
                    except ValueError as e:
                        print(b, rooms, e)
