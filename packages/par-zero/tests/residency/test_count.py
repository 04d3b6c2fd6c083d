"""`residency` says how many bytes lie where: as many as live storages have, and as the formulas say."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import settle_
from par_testing import for_each, live_bytes, peak_bytes, storm
from par_zero import MixedPrecision, Offload, Residency, memory, no_sync, residency, shard, summon

from ..helpers import policies, predicted_tiers

WIDTH, BLOCKS = 64, 4
CHUNK = WIDTH * WIDTH + WIDTH
PARAMETERS = BLOCKS * CHUNK  # divisible by 16 x 4, so that nothing is padded
SLACK = 4096  # step counters, flags and the loss: some bytes each
FP32, BF16 = {}, {"param_dtype": torch.bfloat16}
BF16_FP32_SUMS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES = ((0, BF16), storm(1, FP32), (2, FP32), storm(2, BF16), storm(3, FP32), (3, BF16_FP32_SUMS))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


def step(module, optimizer, dtype):
    module(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
    optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(("stage", "dtypes"), CASES)
def test_all_live_bytes_are_told_by_kind(stage, dtypes):
    """Now, before, within and after steps; and at the fullest moment, which is counted operator by operator."""

    def grown(expected):
        return live_bytes(lambda total: abs(total - before - expected) < SLACK) - before

    def check(beside=0):
        told = residency(module).total() + beside
        assert abs(grown(told) - told) < SLACK, (grown(told), told, residency(module).now)

    dtype = dtypes.get("param_dtype", torch.float32)
    before = live_bytes()
    module = blocks()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(bucket=4 * WIDTH * WIDTH, **dtypes))
    check()
    step(module, optimizer, dtype)
    check()
    optimizer.zero_grad()
    check()
    with no_sync(module):
        module(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
    check()
    with summon(module):  # which tells by a copy of parameters of fewer digits what is written
        check(beside=bool(dtypes) * PARAMETERS * 2 // (1 if stage == 0 else 2))
    peak = peak_bytes(lambda: step(module, optimizer, dtype)) - before
    fullest = residency(module).total(fullest=True)
    passing = 4 * CHUNK * 2  # what operators make and drop by themselves, and activations
    assert fullest - SLACK < peak < fullest + passing + SLACK, (fullest, peak, str(residency(module)))
    optimizer.zero_grad()
    held = residency(module).now
    expected = memory(stage, PARAMETERS, 2, chunk=CHUNK, precision=MixedPrecision(**dtypes))
    assert held["device"]["parameters"] == expected.parameters
    assert held["device"]["gradients"] == expected.gradients
    assert math.isclose(held["device"]["optimizer"] + held["device"]["copies"], expected.optimizer, abs_tol=SLACK)
    assert held["device"]["units"] == 0
    assert sum(held["host"].values()) == sum(held["disk"].values()) == 0


@for_each(dtypes=(FP32, BF16), stage=(0, 3))
@pytest.mark.ranks(2, backend="gloo")
def test_tiers_have_what_the_formulas_say(dtypes, stage, tmp_path):
    """Sizes of which nothing is rounded up: layers of 4096 elements, pieces of 1024 of them."""
    offload = Offload(optimizer={"host": 0.25, "disk": 0.5}, path=tmp_path, piece=4096, ahead=2)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    tiers = predicted_tiers(module, optimizer, stage, offload, bucket=1, **dtypes)
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, **policies(bucket=1, **dtypes))
    for _ in range(2):
        step(module, optimizer, dtypes.get("param_dtype", torch.float32))
        optimizer.zero_grad()
        for _ in range(2):  # with writes under way, and without
            held = residency(module).now
            for tier in ("device", "host", "disk"):
                state = held[tier]["optimizer"] + held[tier]["copies"]
                assert state == tiers[tier]["optimizer"], (tier, str(residency(module)))
                assert held[tier]["parameters"] == tiers[tier]["parameters"]
            assert held["host"]["buffers"] == tiers["host"]["buffers"]
            settle_(optimizer.param_groups[0]["params"])


def test_a_table_has_a_row_for_each_kind_and_a_column_for_each_tier_in_use():
    kinds = ("parameters", "units", "gradients", "optimizer", "copies", "buffers")
    empty = dict.fromkeys(kinds, 0)
    now = {"device": empty | {"parameters": 2_000_000}, "host": empty, "disk": empty | {"optimizer": 8_000_000}}
    told = Residency(now=now, fullest=now | {"device": empty | {"parameters": 2_000_000, "units": 500_000}})
    lines = str(told).splitlines()
    assert lines[0].split() == ["device", "device", "at", "fullest", "disk"]
    assert lines[1].split() == ["parameters", "2.0", "MB", "2.0", "MB", "0", "B"]
    assert lines[-1].split() == ["all", "together", "2.0", "MB", "2.5", "MB", "8.0", "MB"]
    assert (told.total(), told.total(fullest=True), told.total("disk")) == (2_000_000, 2_500_000, 8_000_000)
    with pytest.raises(ValueError, match="tier is 'nvme'; it can be one of device, host, disk"):
        told.total("nvme")


def test_a_module_that_is_not_sharded_is_named():
    with pytest.raises(ValueError, match="this Linear is not sharded"):
        residency(nn.Linear(2, 2))
