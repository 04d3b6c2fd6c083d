"""Every operation gives what gloo gives, whenever it completes."""

import gc
import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from par_testing import Strict, count_collectives, wait_until
from par_testing.strict.group import StrictGroup
from par_testing.strict.player import Player


def numbers(*shape, dtype=torch.float32):
    """Small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def every_operation(group):
    """What each operation of torch.distributed gives on a group, by its name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8):
            found["all_reduce", op, dtype] = x = numbers(3, dtype=dtype)
            dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group)
    for op in ("SUM", "MIN", "MAX"):
        found["all_reduce of truths", op] = x = numbers(6) > 2
        dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group)
    found["all_reduce of one"] = x = torch.tensor(1.5 + rank)
    dist.all_reduce(x, group=group)
    found["broadcast"] = x = numbers(2, 3)
    dist.broadcast(x, 1, group=group)
    found["reduce"] = x = numbers(4)
    dist.reduce(x, 1, group=group)
    if rank != 1:
        del found["reduce"]  # gloo leaves a partial sum there
    found["all_gather"] = parts = [torch.empty(2, 2) for _ in range(size)]
    dist.all_gather(parts, numbers(2, 2), group=group)
    found["all_gather_single"] = whole = torch.empty(size * 3)
    group._allgather_base(whole, numbers(3)).wait()
    found["reduce_scatter_single"] = x = torch.empty(2)
    group._reduce_scatter_base(x, numbers(2 * size)).wait()
    found["reduce_scatter"] = x = torch.empty(2)
    dist.reduce_scatter(x, list(numbers(size, 2).unbind()), group=group)
    sends = [rank + 1] * size
    expects = [each + 1 for each in range(size)]
    found["all_to_all_single"] = x = torch.empty(sum(expects), 2)
    dist.all_to_all_single(x, numbers(sum(sends), 2), expects, sends, group=group)
    found["all_to_all_single, even"] = x = torch.empty(size, 3)
    dist.all_to_all_single(x, numbers(size, 3), group=group)
    found["gather"] = parts = [torch.empty(3) for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(3), parts, 0, group=group)
    found["scatter"] = x = torch.empty(3)
    dist.scatter(x, list(numbers(size, 3).unbind()) if rank == 1 else None, 1, group=group)
    found["objects"] = gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    found["message"] = x = numbers(5)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank, group=group, tag=3)
    right, left = (rank + 1) % size, (rank - 1) % size
    found["batch"] = x = torch.empty(4)
    messages = [dist.P2POp(dist.isend, numbers(4), right, group), dist.P2POp(dist.irecv, x, left, group)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    name = group.group_name
    operators = torch.ops._c10d_functional
    for key, started in (
        ("f all_reduce", operators.all_reduce.default(numbers(3), "sum", name)),
        ("f all_gather", operators.all_gather_into_tensor.default(numbers(3), size, name)),
        ("f reduce_scatter", operators.reduce_scatter_tensor.default(numbers(2 * size), "sum", size, name)),
        ("f all_to_all", operators.all_to_all_single.default(numbers(size, 2), [1] * size, [1] * size, name)),
        ("f broadcast", operators.broadcast.default(numbers(3), 1, name)),
    ):
        found[key] = operators.wait_tensor.default(started)
    found["f all_gather out"] = whole = torch.empty(3 * size)
    operators.all_gather_into_tensor_out.default(numbers(3), size, name, out=whole)
    operators.wait_tensor.default(whole)
    found["f coalesced"] = functional.all_reduce_coalesced([numbers(2), numbers(3)], "sum", group)
    found["f coalesced"] = [each + 0 for each in found["f coalesced"]]
    dist.barrier(group=group)
    return found


def both():
    """The world, which is strict, and the same ranks on gloo."""
    return dist.group.WORLD, dist.new_group(backend="gloo")


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=lambda words, key=key: f"{key}: {words}")


def assert_as_on_gloo():
    strict, gloo = both()
    assert_equal(every_operation(strict), every_operation(gloo))


@pytest.mark.ranks([2, 3], backend="strict")
def test_every_operation_gives_what_gloo_gives():
    assert_as_on_gloo()


@pytest.mark.ranks(2, backend="strict", strict=Strict(complete="early", slots=1))
def test_every_operation_that_completes_at_once():
    assert_as_on_gloo()


@pytest.mark.ranks(2, backend="strict", strict=Strict(complete="drawn", draw=7, sums="halves"))
def test_every_operation_whose_completion_is_drawn():
    assert_as_on_gloo()


@pytest.mark.ranks(4, backend="strict", strict=Strict(sums="halves"))
def test_sums_by_halves_are_added_in_another_order():
    x = torch.tensor([1e8, -1e8, 1.0, -1.0][dist.get_rank()])
    y = torch.tensor([1e8, 1.0, -1e8, -1.0][dist.get_rank()])
    dist.all_reduce(x)
    dist.all_reduce(y)
    assert (x.item(), y.item()) == (0.0, 0.0)  # in the order of the ranks y is -1: 1e8 + 1 is 1e8 in float32


@pytest.mark.ranks(2, backend="strict")
def test_every_operation_is_counted_as_on_gloo():
    counts = []
    for group in both():
        with count_collectives() as counted:
            every_operation(group)
        counts.append(Counter((event.op, event.elements, event.dtype) for event in counted.events))
    assert counts[0] - counts[1] == counts[1] - counts[0] == Counter()


@pytest.mark.ranks(2, backend="strict")
def test_operations_on_fake_tensors_send_nothing():
    """Rank 0 alone learns shapes in a fake run; a rank without fakes would wait for what it sends."""
    if dist.get_rank() == 0:
        group, other = dist.group.WORLD, 1
        with FakeTensorMode():
            x = torch.ones(4)
            group.allreduce([x]).wait()
            group.send([x], other, 0).wait()
            messages = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(4), other)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
    dist.all_reduce(torch.ones(1))


def test_no_way_of_communicating_is_left_to_another_backend():
    """What torch adds to its process groups must be added here."""
    silent = {  # which ask, or name, and bring nothing to another rank
        "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "bound_device_id", "boxed",
        "get_group_store", "group_desc", "group_name", "merge_remote_group", "name", "rank", "set_timeout", "shutdown",
        "size", "split_group", "unbox", "use_pg_for_symm_mem_rendezvous",
    }  # fmt: skip
    names = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")} - silent
    assert names <= vars(StrictGroup).keys()
    bases = {name for name in dir(dist.ProcessGroup) if name.endswith("_base")}
    assert bases <= vars(StrictGroup).keys()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def trained(wrap):
    """The parameters after two steps of training on each rank's own data."""
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(numbers(4, 6, dtype=torch.float64) + step).square().mean().backward()
        optimizer.step()
    parameters = (getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters())
    return [each.detach().clone() for each in parameters]


@pytest.mark.ranks(2, backend="strict")
def test_ddp_and_fsdp_train_as_on_gloo():
    strict, gloo = both()
    mesh = {group: init_device_mesh("cpu", (2,)) for group in (strict,)}
    torch.testing.assert_close(
        trained(lambda net: DistributedDataParallel(net, process_group=strict, bucket_cap_mb=1e-4)),
        trained(lambda net: DistributedDataParallel(net, process_group=gloo, bucket_cap_mb=1e-4)),
        rtol=1e-12, atol=1e-12,
    )  # fmt: skip
    torch.testing.assert_close(
        trained(lambda net: fully_shard(net, mesh=mesh[strict])),
        trained(lambda net: DistributedDataParallel(net, process_group=gloo)),
        rtol=1e-12, atol=1e-12,  # float64; the order of two sums
    )  # fmt: skip


@pytest.mark.ranks(2, backend="strict")
def test_finalizer_that_waits_where_operations_run_does_not_hang(monkeypatch):
    # The garbage collector runs in any thread, also in that of the player.
    values, issued, waited = [torch.ones(2), torch.ones(3)], threading.Event(), threading.Event()
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    works, note = [], Player.note

    def finalize(player, work):
        monkeypatch.setattr(Player, "note", note)
        issued.wait()
        for each in works:  # of which the first one is running
            each.wait()
        waited.set()
        note(player, work)

    monkeypatch.setattr(Player, "note", finalize)
    works += [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(values, groups, strict=True)]
    issued.set()
    for each in works:
        each.wait()
    assert waited.wait(20)
    assert [x.tolist() for x in values] == [[2, 2], [2, 2, 2]]


@pytest.mark.ranks(2, backend="strict")
def test_operation_runs_without_collection_of_garbage(monkeypatch):
    # A finalizer there may wait for a later operation of the communicator, which begins when this one has run.
    collected, note = [], Player.note

    def noted(player, work):
        collected.append(gc.isenabled())
        note(player, work)

    monkeypatch.setattr(Player, "note", noted)
    for _ in range(2):
        dist.all_reduce(torch.ones(2))
    wait_until(gc.isenabled)
    assert collected == [False, False]
