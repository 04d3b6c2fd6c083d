"""Who counts what, from what tensors say of themselves."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_groups import Segment, Segments, set_segments, set_sharding, whole
from par_precision.norm.counted import EVERYTHING
from par_precision.norm.ownership import Ownership, tensors_in


@pytest.mark.ranks(2)
def test_what_was_found_holds_for_one_group_and_one_record_alone():
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor = torch.zeros(3)
    set_sharding(tensor, whole((3,), (0, 1)))
    for _ in range(2):
        assert (Ownership(dist.group.WORLD).of(tensor) is EVERYTHING) is (dist.get_rank() == 0)
        assert Ownership(alone).of(tensor) is EVERYTHING
    set_sharding(tensor, whole((3,), (1,)))
    assert (Ownership(dist.group.WORLD).of(tensor) is EVERYTHING) is (dist.get_rank() == 1)


@pytest.mark.ranks(2)
def test_a_group_of_one_is_not_no_group():
    """Alone, a part is all that is asked for; without a group it is a mistake."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor = torch.zeros(3)
    set_segments(tensor, Segments([Segment("w", whole((3,), (dist.get_rank(),)))]))
    assert Ownership(alone).of(tensor) is Ownership(None).of(tensor) is EVERYTHING
    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
    assert Ownership(alone).of(part) is EVERYTHING
    with pytest.raises(ValueError, match="pass the group"):
        Ownership(None).of(part)


@pytest.mark.ranks(2)
def test_dtensors_of_two_meshes_are_told_apart():
    """Equal placements, but one mesh is this rank's alone."""
    rank = dist.get_rank()
    both = init_device_mesh("cpu", (2,))
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    ownership = Ownership(dist.group.WORLD)
    tensors = [distribute_tensor(torch.zeros(4), mesh, [Replicate()]) for mesh in (both, own)]
    for _ in range(2):
        assert [ownership.of(each) is EVERYTHING for each in tensors] == [rank == 0, True]


@pytest.mark.ranks(2)
def test_what_was_found_of_a_dtensor_holds_for_one_group_alone():
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Replicate()])
    for _ in range(2):
        assert (Ownership(dist.group.WORLD).of(tensor) is EVERYTHING) is (dist.get_rank() == 0)
        assert Ownership(alone).of(tensor) is EVERYTHING
    for again in (copy.deepcopy(tensor), tensor.clone()):
        assert (Ownership(dist.group.WORLD).of(again).of(again) == []) is (dist.get_rank() == 1)


def test_without_a_world_everything_is_counted():
    assert Ownership(None).of(nn.Parameter(torch.zeros(3))) is EVERYTHING


def test_a_tensor_stands_for_itself():
    tensor = torch.zeros(3)
    assert [each is tensor for each in tensors_in(tensor)] == [True]
