"""One process in place of ranks that all do the same takes the same time as they, also in worlds too large for here."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from par_testing import Compute, Links, Strict, StrictError, on_strict_ranks, strict_time, virtual_streams

WIDTH, BLOCKS, ROWS = 32, 3, 16
LINKS = Links(inside=(1e-7, 2e11), across=(3e-7, 5e10), ranks_per_host=2)
COMPUTE = Compute(flops=1e11, memory=1e12)


def virtual(alike=1):
    return Strict(links=LINKS, compute=COMPUTE, alike=alike)


def last_of_three(step):
    """Total, computing and exposed time of the last of three steps."""
    for _ in range(3):
        strict_time()
        step()
        times = strict_time()
    return [times.total, times.computing, times.exposed]


def collectives():
    """Every kind of collective, over the world and over every second rank of it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    halves = [dist.new_group(list(range(first, world, 2))) for first in range(2)]

    def step():
        for group in (dist.group.WORLD, halves[rank % 2]):
            ranks = dist.get_world_size(group)
            whole, own = torch.ones(ranks * 8), torch.ones(8)
            work = dist.all_reduce(whole, group=group, async_op=True)
            _ = torch.ones(64, 64) @ torch.ones(64, 64)
            work.wait()
            assert torch.equal(whole, torch.full_like(whole, ranks))
            dist.all_gather_into_tensor(whole, own, group=group)
            dist.reduce_scatter_tensor(own, whole, group=group)
            dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
            dist.broadcast(own, group=group, group_src=ranks - 1)

    return last_of_three(step)


def sharded():
    """A step of FSDP2, with its streams."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with virtual_streams():
        return last_of_three(step)


def in_line():
    """Messages up a line of processes, and a sum over the ranks that each of them stands for, if it does."""
    world, rank, each = dist.get_world_size(), dist.get_rank(), dist.get_world_size() // 2
    lines = [dist.new_group(list(range(first, world, each))) for first in range(each)]
    beside = [dist.new_group(list(range(first, first + each))) for first in (0, each)]
    line, mine = lines[rank % each], beside[rank // each]

    def step():
        message = torch.ones(256)
        if dist.get_rank(line) == 0:
            _ = torch.ones(64, 64) @ torch.ones(64, 64)
            dist.send(message, group=line, group_dst=1)
        else:
            dist.recv(message, group=line, group_src=0)
        dist.all_reduce(message, group=mine)

    return last_of_three(step)


STARTED = pytest.mark.usefixtures("warm_python")  # with the forkserver that has imported torch


@STARTED
@pytest.mark.parametrize("measure", [collectives, sharded])
def test_one_process_takes_the_time_of_four(measure):
    four = on_strict_ranks(4, measure, strict=virtual(), start_method="forkserver")
    (one,) = on_strict_ranks(1, measure, strict=virtual(alike=4), start_method="forkserver")
    for times in four:
        assert times == pytest.approx(one, rel=1e-9)  # sums of seconds
    assert one[2] > 0


@STARTED
def test_two_processes_take_the_time_of_two_lines():
    four = on_strict_ranks(4, in_line, strict=virtual(), start_method="forkserver")
    two = on_strict_ranks(2, in_line, strict=virtual(alike=2), start_method="forkserver")
    assert four[0] == pytest.approx(two[0], rel=1e-9)
    assert four[2] == pytest.approx(two[1], rel=1e-9)


@pytest.mark.ranks(1, backend="strict", strict=Strict(alike=64))
def test_a_process_has_the_ranks_that_it_stands_for():
    assert (dist.get_rank(), dist.get_world_size()) == (0, 64)
    gathered = [torch.empty(1) for _ in range(64)]
    dist.all_gather(gathered, torch.ones(1))
    assert torch.cat(gathered).sum() == 64
    with pytest.raises(StrictError, match=re.escape("send: rank 3 has no process, as it does what rank 0 does")):
        dist.send(torch.ones(1), 3)


@pytest.mark.ranks(2, backend="strict", strict=Strict(alike=2))
def test_a_group_has_whom_its_ranks_are_like():
    assert dist.get_rank() in (0, 2)
    if dist.get_rank() == 0:
        with pytest.raises(
            StrictError, match=re.escape("rank 3 does what rank 2 does (Strict(alike=2)), which is not")
        ):
            dist.new_group([0, 3], use_local_synchronization=True)
