"""Every way in which torch communicates is counted, with the full size of the operation."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from par_testing import Collective, count_collectives

N = 12  # elements of the full tensor
GROUP = 4

# torch 2.13 has new names for two collectives and a FutureWarning for the old; older ones have the old alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


def one(size=N):
    return torch.ones(size)


def parts():
    return [one(N // dist.get_world_size()) for _ in range(dist.get_world_size())]


def part():
    return one(N // dist.get_world_size())


C10D = {
    "all_reduce": ("all_reduce", lambda: dist.all_reduce(one())),
    "all_reduce async": ("all_reduce", lambda: dist.all_reduce(one(), async_op=True).wait()),
    "all_gather": ("all_gather", lambda: dist.all_gather(parts(), part())),
    "all_gather_into_tensor": ("all_gather", lambda: dist.all_gather_into_tensor(one(), part())),
    "reduce_scatter_tensor": ("reduce_scatter", lambda: dist.reduce_scatter_tensor(part(), one())),
    "all_to_all_single": ("all_to_all", lambda: dist.all_to_all_single(one(), one())),
    "broadcast": ("broadcast", lambda: dist.broadcast(one(), 0)),
    "reduce": ("reduce", lambda: dist.reduce(one(), 0)),
    "gather": ("gather", lambda: dist.gather(part(), parts() if dist.get_rank() == 0 else None)),
    "scatter": ("scatter", lambda: dist.scatter(part(), parts() if dist.get_rank() == 0 else None)),
}

FUNCTIONAL = {
    "all_reduce": ("all_reduce", lambda: functional.all_reduce(one(), "sum", dist.group.WORLD)),
    "all_gather": ("all_gather", lambda: functional.all_gather_tensor(part(), 0, dist.group.WORLD)),
    "reduce_scatter": (
        "reduce_scatter",
        lambda: functional.reduce_scatter_tensor(one(), "sum", 0, dist.group.WORLD),
    ),
    "all_to_all": ("all_to_all", lambda: functional.all_to_all_single(one(), None, None, dist.group.WORLD)),
    "broadcast": ("broadcast", lambda: functional.broadcast(one(), 0, dist.group.WORLD)),
}

# What gloo lacks, or does only with a device of its own; the fake backend takes all.
FAKE_ONLY = {
    "reduce_scatter": ("reduce_scatter", lambda: dist.reduce_scatter(part(), parts())),
    "all_to_all": ("all_to_all", lambda: dist.all_to_all(parts(), parts())),
}


def check(op, call):
    with count_collectives() as counted:
        result = call()
    if isinstance(result, torch.Tensor):
        functional.wait_tensor(result)
    world = tuple(range(dist.get_world_size()))
    assert counted.events == (Collective(op, world, N, 4 * N, torch.float32),)


@pytest.mark.ranks(2)
def test_every_form_on_gloo():
    for op, call in [*C10D.values(), *FUNCTIONAL.values()]:
        check(op, call)


@pytest.mark.ranks(GROUP, backend="fake")
def test_every_form_on_the_fake_backend():
    for op, call in [*C10D.values(), *FUNCTIONAL.values(), *FAKE_ONLY.values()]:
        check(op, call)


@pytest.mark.ranks(2, backend="gloo")  # NCCL cannot receive from any rank
def test_point_to_point_and_barrier():
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    with count_collectives() as counted:
        if rank == 0:
            dist.send(one(), other)
            dist.recv(one(), other)
        else:
            dist.recv(one())  # from any source
            dist.send(one(), other)
        operations = [dist.P2POp(dist.isend, one(3), other), dist.P2POp(dist.irecv, one(3), other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        dist.barrier()
    assert sorted(event.op for event in counted.events) == ["barrier", "recv", "recv", "send", "send"]
    assert counted.received() == N + 3
    assert counted.elements("send") == N + 3
    assert counted.elements("barrier") == 0


@pytest.mark.ranks(GROUP, backend="fake")
def test_coalesced_forms_are_one_call():
    world = dist.group.WORLD
    with count_collectives() as counted:
        with dist._coalescing_manager():
            dist.all_reduce(one(3))
            dist.all_reduce(one(9))
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(one(4), one(1))
            dist.all_gather_into_tensor(one(8), one(2))
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(one(1), one(4))
            dist.reduce_scatter_tensor(one(2), one(8))
        results = functional.all_reduce_coalesced([one(3), one(9)], "sum", world)
        results += functional.all_gather_into_tensor_coalesced([one(1), one(2)], world)
        results += functional.reduce_scatter_tensor_coalesced([one(4), one(8)], "sum", [0, 0], world)
    for result in results:
        functional.wait_tensor(result)
    assert [event.op for event in counted.events] == ["all_reduce", "all_gather", "reduce_scatter"] * 2
    assert {event.elements for event in counted.events} == {N}


@pytest.mark.ranks(GROUP, backend="fake")
def test_coalesced_dtypes_are_kept_apart():
    with count_collectives() as counted, dist._coalescing_manager():
        dist.all_gather_into_tensor(one(4), one(1))
        dist.all_gather_into_tensor(one(8).bfloat16(), one(2).bfloat16())
    assert [(event.elements, event.bytes) for event in counted.events] == [(4, 16), (8, 16)]


@pytest.mark.ranks(GROUP, backend="fake")
def test_group_and_sums():
    group = dist.new_group([0, 2])
    if dist.get_rank() not in (0, 2):
        return
    with count_collectives() as counted:
        dist.all_reduce(one().bfloat16(), group=group)
        functional.wait_tensor(functional.all_reduce(one(5), "sum", group))
        dist.broadcast(one(3), 0)
    assert [event.ranks for event in counted.events] == [(0, 2), (0, 2), (0, 1, 2, 3)]
    assert counted.calls() == 3
    assert counted.calls("all_reduce") == 2
    assert counted.elements("all_reduce") == N + 5
    assert counted.bytes("all_reduce") == 2 * N + 4 * 5
    assert counted.received("all_reduce") == N + 5
    assert counted.received() == N + 5 + Fraction(9, 4)


@pytest.mark.ranks(2)
def test_backward():
    tensor = torch.ones(N // 2, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(tensor, 0, dist.group.WORLD)
    with count_collectives() as counted:
        gathered.sum().backward()
    assert [(event.op, event.elements) for event in counted.events] == [("reduce_scatter", N)]


@pytest.mark.ranks(2)
def test_distributed_data_parallel():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # DDP finds the order of its buckets in the first step, and agrees on it in the second
        parallel(torch.ones(4, 3)).sum().backward()
    with count_collectives() as counted:
        parallel(torch.ones(4, 3)).sum().backward()
    assert {event.op for event in counted.events} == {"all_reduce"}
    assert counted.elements() == parameters


@pytest.mark.ranks(2)
def test_fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(3, 4))
    with count_collectives() as counted:
        model(torch.ones(1, 3)).sum().backward()
    assert {event.op for event in counted.events} == {"all_gather", "reduce_scatter"}
    assert counted.elements("all_gather") == counted.elements("reduce_scatter") == 16


@pytest.mark.ranks(2)
def test_inside_of_dtensor():
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(one(), mesh, [Shard(0)])
    with count_collectives() as counted:
        tensor.redistribute(mesh, [Replicate()]).to_local().sum().item()
    assert [(event.op, event.elements) for event in counted.events] == [("all_gather", N)]


def test_unknown_operator_is_no_silent_zero():
    from par_testing.counting.c10d_ops import communications

    class Unknown:
        namespace, _opname = "c10d", "teleport_"

        class _schema:
            arguments = ()

    with pytest.raises((NotImplementedError, ValueError)):
        list(communications(Unknown, (), {}))


def test_every_operator_of_torch_is_known():
    """A new release of torch with a new way to communicate fails here, not in a count that is too low."""
    from par_testing.counting.c10d_ops import _READERS, _SILENT

    operators = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for space, readers in _READERS.items():
        names = {name.removeprefix(f"{space}::") for name in operators if name.startswith(f"{space}::")}
        assert names - _SILENT - {"batch_p2p_ops"} <= readers.keys()
