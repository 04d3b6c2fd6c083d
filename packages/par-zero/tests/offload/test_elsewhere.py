"""Parameters and gradients elsewhere at stage 3: the same losses, parameters and moments as without, bytes as told."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import Offload, memory, residency, shard

from ..helpers import assert_same, batch, loss_of, mlp, sharded, whole
from .cases import BF16, moments, small

FP32 = {}
WIDTH, BLOCKS = 64, 4


@for_each(option=("parameters", "gradients"))
@pytest.mark.ranks(2)
def test_what_units_are_gathered_from_lies_elsewhere_at_stage_3_alone(option, tmp_path):
    for stage in range(3):
        module = mlp()
        optimizer = small(module.parameters())
        for tier in ("host", "disk"):
            text = f"{option}='{tier}' needs stage 3, where units are gathered before they run; this is stage {stage}"
            with pytest.raises(ValueError, match=text):
                offload = Offload(**{option: tier}, path=tmp_path)
                shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload)
        assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in module.parameters()]
    assert not list(tmp_path.iterdir())


def trained(offload, dtypes, steps=3):
    module, optimizer = sharded(mlp(), 3, small, offload=offload, **dtypes)
    losses = []
    for step in range(steps):
        loss = loss_of(module, batch(step, width=8).to(dtypes.get("param_dtype")))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": torch.stack(losses)} | whole(module) | moments(optimizer)


def even(offload, dtypes):
    """A model of four units, and of sizes of which nothing is rounded up: layers of 4096 elements."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    return shard(module, optimizer, stage=3, group=dist.group.WORLD, bucket=1, offload=offload, **dtypes)


@for_each(dtypes=(FP32, BF16))
@pytest.mark.ranks(2)
def test_on_a_cpu_the_host_has_its_part_and_the_device_the_rest(dtypes):
    parts = {"parameters": 0.5, "gradients": 0.75}
    assert_same(trained(Offload(optimizer=0.25, **parts), dtypes), trained(None, dtypes))
    offload = Offload(optimizer=0.25, **parts)
    module, optimizer = even(offload, dtypes)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(2, WIDTH, dtype=dtypes.get("param_dtype"))).square().mean().backward()
        held = residency(module).now
        for tier in ("device", "host", "disk"):
            expected = memory(3, BLOCKS * WIDTH**2, 2, offload=offload, tier=tier, **dtypes)
            assert held[tier]["parameters"] == expected.parameters
            kept = held[tier]["gradients"]
            if dtypes:  # what autograd gives is cast for the optimizer, and the sums stay
                kept /= 3
            assert kept == expected.gradients
        optimizer.step()
