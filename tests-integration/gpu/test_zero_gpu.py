"""par-zero on a GPU: the weights of training without it, over NCCL alone, and over gloo with two ranks on that GPU."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import launch
from par_testing import accelerator_type, for_each
from par_zero import shard, summon

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]


def model():
    """Its largest weight alone is more than what gloo's ranks send each other point to point."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 12_000), nn.GELU(), nn.Linear(12_000, 15)).to(DEVICE)


def batch(step):
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def trained(module, optimizer, rows):
    for step in range(3):
        module(batch(step)[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(module, **options):
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3, fused=True, **options)


def check(stage, group, rows):
    """Sums of products and of ranks in another order differ in the last digits of fp32; eps is far above those."""
    module = model()
    reference = copy.deepcopy(module)
    trained(reference, adamw(reference), slice(None))
    optimizer = adamw(module)
    shard(module, optimizer, stage=stage, group=group)
    trained(module, optimizer, rows)
    with summon(module):
        torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_over_nccl_trains_as_without(stage):
    with launch(timeout=60):
        check(stage, dist.group.WORLD, slice(None))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_filled_on_the_cpu_comes_to_the_gpu_unit_by_unit(stage):
    """And real parameters too, where `device` is another than theirs."""
    reference = model()
    whole = {name: value.cpu() for name, value in reference.state_dict().items()}

    def fill(unit, prefix):
        unit.to_empty(device="cpu")
        own = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
        unit.load_state_dict(own, strict=False)

    trained(reference, adamw(reference), slice(None))
    with launch(timeout=60):
        for start in ("meta", "cpu"):
            module = nn.Sequential(nn.Linear(256, 12_000), nn.GELU(), nn.Linear(12_000, 15)).to(start)
            if start == "cpu":
                module.load_state_dict(whole)
            optimizer = adamw(module)
            shard(
                module,
                optimizer,
                stage=stage,
                group=dist.group.WORLD,
                init={"init_fn": fill, "device": torch.device(DEVICE, 0)},
            )
            assert {each.device.type for group in optimizer.param_groups for each in group["params"]} == {DEVICE}
            trained(module, optimizer, slice(None))
            with summon(module):
                torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_capturable_optimizer_is_sharded_too():
    with launch(timeout=60):
        module = model()
        optimizer = adamw(module, capturable=True)
        shard(module, optimizer, stage=1, group=dist.group.WORLD)
        before = module[0].weight.detach().clone()
        trained(module, optimizer, slice(None))
        assert not torch.equal(module[0].weight, before)


@for_each(stage=[0, 1, 2, 3])
@pytest.mark.ranks(2, timeout=120)
def test_two_ranks_may_share_a_gpu_over_gloo(stage):
    rank = dist.get_rank()
    check(stage, dist.group.WORLD, slice(4 * rank, 4 * rank + 4))
