"""Who counts what, from what tensors say of themselves."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_groups import Segment, Segments, set_segments, set_sharding, whole
from par_precision import grad_norm


def with_gradient(tensor):
    """Gradients of 1 on the first rank and of 2 on the second say in the norm which ranks counted."""
    tensor.grad = torch.full_like(tensor, dist.get_rank() + 1.0)
    return tensor


def squares(tensors, group):
    return round(grad_norm(tensors, group).item() ** 2, 9)


def alone():
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@pytest.mark.ranks(2)
def test_what_was_found_holds_for_one_group_and_one_record_alone():
    own, mine = alone(), 3 * (dist.get_rank() + 1) ** 2
    tensor = with_gradient(torch.zeros(3))
    set_sharding(tensor, whole((3,), (0, 1)))
    for _ in range(2):
        assert squares(tensor, dist.group.WORLD) == 3  # the first rank's
        assert squares(tensor, own) == mine
    set_sharding(tensor, whole((3,), (1,)))
    assert squares(tensor, dist.group.WORLD) == 12  # the second rank's


@pytest.mark.ranks(2)
def test_a_group_of_one_is_not_no_group():
    """Alone, a part is all that is asked for; without a group it is a mistake."""
    own, mine = alone(), (dist.get_rank() + 1) ** 2
    tensor = with_gradient(torch.zeros(3))
    set_segments(tensor, Segments([Segment("w", whole((3,), (dist.get_rank(),)))]))
    assert squares(tensor, own) == squares(tensor, None) == 3 * mine
    mesh = init_device_mesh("cpu", (2,))
    part = with_gradient(distribute_tensor(torch.zeros(5), mesh, [Shard(0)]))
    assert squares(part, own) == (3 - dist.get_rank()) * mine
    with pytest.raises(ValueError, match="pass the group"):
        grad_norm(part, None)


@pytest.mark.ranks(2)
def test_dtensors_of_two_meshes_are_told_apart():
    """Equal placements, but one mesh is this rank's alone."""
    both = init_device_mesh("cpu", (2,))
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    tensors = [with_gradient(distribute_tensor(torch.zeros(4), mesh, [Replicate()])) for mesh in (both, own)]
    for given in (tensors, tensors[::-1]):
        assert squares(given, dist.group.WORLD) == 4 + (4 + 16)  # the first rank's, and each rank's own


@pytest.mark.ranks(2)
def test_what_was_found_of_a_dtensor_holds_for_one_group_alone():
    own, mine = alone(), 4 * (dist.get_rank() + 1) ** 2
    tensor = with_gradient(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Replicate()]))
    for _ in range(2):
        assert squares(tensor, dist.group.WORLD) == 4
        assert squares(tensor, own) == mine
    for again in (copy.deepcopy(tensor), tensor.clone()):
        assert squares(with_gradient(again), dist.group.WORLD) == 4


def test_without_a_world_everything_is_counted():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    assert grad_norm(parameter, None) == math.sqrt(3)
