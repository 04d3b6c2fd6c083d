"""State on a disk and checkpoints: files do not know of it, and training goes on with it, without it and elsewhere."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import par_checkpoint
from par_groups import slots_of
from par_zero import Offload, shard

pytest.importorskip("safetensors")


def sharded(stage, group, offload, *, seed=0, abstract=False):
    torch.manual_seed(seed)
    with torch.device("meta" if abstract else "cpu"):
        module = nn.Sequential(nn.Linear(37, 13), nn.Tanh(), nn.Linear(13, 37), nn.LayerNorm(37))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    shard(module, optimizer, stage=stage, group=group, offload=offload, overlap={"bucket": 1000})
    return module, optimizer


def losses(module, optimizer, group, first, count):
    """Losses of some steps. Every group of ranks sees the same 12 rows in all, cut evenly."""
    found = []
    for step in range(first, first + count):
        rows = torch.randn(12, 37, generator=torch.Generator().manual_seed(step))
        loss = module(rows.chunk(dist.get_world_size(group))[dist.get_rank(group)]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), group=group)
        found.append(loss.item() / dist.get_world_size(group))
    return found


def files(folder):
    """What lies in a checkpoint, byte by byte."""
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir()) if each.is_file()}


@pytest.mark.ranks(3)
def test_a_checkpoint_of_state_on_a_disk_is_one_of_state_in_memory(tmp_path):
    world = dist.group.WORLD
    scratch = tmp_path / "scratch"
    if dist.get_rank() == 0:
        scratch.mkdir()
    dist.barrier()
    disk = Offload(optimizer={"host": 0.2, "disk": 0.6}, path=scratch, piece=1024, ahead=2)
    module, optimizer = sharded(1, world, None)
    losses(module, optimizer, world, 0, 2)
    par_checkpoint.save(tmp_path / "memory", model=module, optimizer=optimizer, step=2).wait()
    expected = losses(module, optimizer, world, 2, 5)

    module, optimizer = sharded(1, world, disk)
    losses(module, optimizer, world, 0, 2)
    path = tmp_path / "disk"
    saving = par_checkpoint.save(path, model=module, optimizer=optimizer, step=2)  # amid the last writes
    assert losses(module, optimizer, world, 2, 5) == expected
    saving.wait()
    assert files(path) == files(tmp_path / "memory")

    late = replace(disk, overlap=True)
    whole = replace(disk, parameters="disk", gradients="disk")
    host = Offload(optimizer="host")
    for stage, offload in ((1, disk), (2, host), (3, late), (3, None), (3, whole), (3, replace(whole, overlap=True))):
        module, optimizer = sharded(stage, world, offload, seed=1, abstract=offload is whole)
        par_checkpoint.load(path, model=module, optimizer=optimizer)
        for tensor in optimizer.param_groups[0]["params"]:
            assert all(optimizer.state[tensor][slot] is view for slot, view in slots_of(tensor).items())
        assert losses(module, optimizer, world, 2, 5) == expected
        if stage == 3:
            folder = tmp_path / f"stage 3, {len(list(tmp_path.glob('stage 3*')))}"
            dist.barrier()
            saving = par_checkpoint.save(folder, model=module, optimizer=optimizer, step=5)  # amid the last step
            losses(module, optimizer, world, 7, 2)  # while it is written
            saving.wait()
    saved = [files(each) for each in sorted(tmp_path.glob("stage 3*"))]
    assert all(each == saved[0] for each in saved)

    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    module, optimizer = sharded(2, alone, disk, seed=2)
    par_checkpoint.load(path, model=module, optimizer=optimizer, group=alone)
    assert losses(module, optimizer, alone, 2, 5) == pytest.approx(expected, rel=1e-5)  # means of means
    found = []
    for offload in (whole, None):
        module, optimizer = sharded(3, alone, offload, seed=3)
        par_checkpoint.load(tmp_path / "stage 3, 2", model=module, optimizer=optimizer, group=alone)
        found.append(losses(module, optimizer, alone, 7, 3))
    assert found[0] == found[1]
    assert not list(scratch.iterdir())
