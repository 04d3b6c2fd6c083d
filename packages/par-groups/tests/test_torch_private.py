from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from par_groups import _torch_private


@pytest.mark.ranks(2, backend="gloo")  # which knows the timeout of a group
def test_what_is_used_of_a_running_world_is_there():
    assert _torch_private.can_split(dist.group.WORLD, torch.device("cpu")) in {True, False}  # newer gloos can
    before = _torch_private.number_of_groups()
    group = dist.new_group([0, 1])
    assert _torch_private.number_of_groups() == before + 1
    dist.destroy_process_group(group)
    assert _torch_private.number_of_groups() == before
    assert _torch_private.timeout_of(dist.new_group([0, 1], timedelta(seconds=7)), torch.device("cpu")).seconds == 7
    with _torch_private.group_called("mine"):
        called = dist.new_group([0, 1], use_local_synchronization=True)
    assert called.group_name == "mine"


def test_a_strided_shard_has_a_factor_and_others_have_none():
    assert _torch_private.split_factor(_StridedShard(0, split_factor=3)) == 3
    assert _torch_private.split_factor(Shard(0)) is None
    assert _torch_private.split_factor(Replicate()) is None


@pytest.mark.ranks(2, backend="gloo")
def test_torch_notes_its_collectives_and_counts_those_of_a_group():
    before = _torch_private.operations_begun(dist.group.WORLD)
    dist.barrier()
    assert _torch_private.operations_begun(dist.group.WORLD) == before + 1
    entry = _torch_private.flight_trace()["entries"][-1]
    used = "process_group collective_seq_id p2p_seq_id is_p2p profiling_name input_sizes input_dtypes retired state"
    assert set(f"{used} time_created_ns frames".split()) <= set(entry)
    assert {"filename", "line"} <= set(entry["frames"][0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler warns of torch
@pytest.mark.ranks(1)  # whose process has the compiler imported
def test_a_compiled_module_is_seen_either_way():
    method = nn.Linear(2, 2)
    assert not _torch_private.is_compiled(method)
    method.compile(backend="eager")
    assert _torch_private.is_compiled(method)
    assert _torch_private.is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))
