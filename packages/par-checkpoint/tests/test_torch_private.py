"""Every underscore API of torch that the package uses is there, and does what it is used for."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from par_checkpoint import _torch_private as private

TIMEOUT = timedelta(seconds=30)


@pytest.mark.ranks(2, backend="gloo")
def test_communicators_of_gloo():
    rank = dist.get_rank()
    gloo = private.gloo_among(private.store_of_world("a name of its own"), rank, 2, TIMEOUT)
    every = torch.zeros(4, dtype=torch.uint8)
    private.all_gather_into(gloo, every, torch.full((2,), rank + 1, dtype=torch.uint8), TIMEOUT)
    assert every.tolist() == [1, 1, 2, 2]


@pytest.mark.ranks(2)
def test_a_store_of_the_world_is_seen_by_all_ranks():
    rank, store = dist.get_rank(), private.store_of_world("a prefix")
    store.set(f"{rank}", "there")
    store.wait([f"{1 - rank}"], TIMEOUT)
    assert not store.check(["2"])


@pytest.mark.ranks(2, backend="gloo")
def test_collectives_of_a_communicator_wait_as_long_as_they_are_told():
    rank = dist.get_rank()
    gloo = private.gloo_among(private.store_of_world("another name"), rank, 2, TIMEOUT)
    gloo.allreduce([torch.ones(1)]).wait()  # the ranks are connected
    private.set_timeout_of(gloo, timedelta(milliseconds=200))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
            gloo.allreduce([torch.ones(1)]).wait()
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_dtensor_keeps_its_part_inside():
    whole = torch.arange(4.0)
    cut = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    assert private.local_of(cut).tolist() == [[0, 1], [2, 3]][dist.get_rank()]
    assert private.local_of(whole) is whole


def test_changes_are_counted():
    tensor = torch.zeros(3)
    before = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) == before + 1


def test_a_module_tells_its_own_buffers():
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(2))
    module.register_buffer("derived", torch.ones(2), persistent=False)
    module.register_buffer("later", None)
    assert private.non_persistent_buffers(module) == {"derived"}
    assert private.buffers_of(module) == {"kept": module.kept, "derived": module.derived, "later": None}


def test_what_is_not_compiled_runs_as_it_is_with_all_that_it_calls():
    compiling = []

    def inner():
        compiling.append(torch.compiler.is_compiling())

    def note(x):
        compiling.append(torch.compiler.is_compiling())
        inner()
        return x

    noted = private.not_compiled(note)
    compiled = torch.compile(lambda x: noted(x + 1) * 2, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [4, 4]
    assert compiling == [False] * 4


def test_an_outline_tells_where_data_lies_in_its_file(tmp_path):
    values = torch.arange(64.0)
    torch.save({"w": values}, tmp_path / "w.pt")
    outline = torch.load(tmp_path / "w.pt", map_location="meta", weights_only=True)["w"]
    begin = private.checkpoint_offset(outline)
    assert (tmp_path / "w.pt").read_bytes()[begin : begin + values.nbytes] == values.numpy().tobytes()


def test_the_cache_of_pinned_memory_can_be_emptied():
    private.empty_pinned_cache()
