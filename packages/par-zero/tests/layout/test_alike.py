"""What is in no chunk becomes the first rank's: frozen parameters and buffers, unless the ranks mean them to differ."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import Box, Sharding, set_sharding
from par_testing import for_each
from par_zero import DataParallelGroup, shard, sync_module_states_

from ..helpers import KINDS_OF_STAGES


class Drawn(nn.Module):
    """A layer that is trained, behind random features that are not; each rank draws its own."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.features = nn.Linear(5, 7).requires_grad_(False)
        self.trained = nn.Linear(7, 3)
        self.low = nn.Parameter(torch.randn(9).to(torch.bfloat16), requires_grad=False)
        self.single = nn.Parameter(torch.randn(()), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(4, 6).t(), requires_grad=False)
        self.register_buffer("complex", torch.randn(2, 3, dtype=torch.complex64))
        self.register_buffer("mask", torch.rand(11) < 0.5)
        self.register_buffer("expanded", torch.randn(1).expand(4), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("memory", torch.randn(2 + rank))  # of another shape on each rank


def shared(module):
    return {name: value for name, value in module.state_dict().items() if name != "memory"}


def is_first(module, expected):
    return [name for name, value in shared(module).items() if not torch.equal(value, expected[name])] == []


@pytest.mark.ranks(2)
@for_each(stage=KINDS_OF_STAGES)
def test_frozen_parameters_and_buffers_become_the_first_ranks(stage):
    expected, own = shared(Drawn(0)), Drawn(dist.get_rank())
    memory, pointer = own.memory.clone(), own.mask.data_ptr()
    expanded = Drawn(0).expanded
    optimizer = torch.optim.SGD(own.trained.parameters(), 0.1)
    shard(own, optimizer, stage=stage, group=dist.group.WORLD)
    if stage < 3:
        assert is_first(own, expected)
    assert torch.equal(own.mask, expected["mask"])
    assert torch.equal(own.expanded, expanded)
    assert torch.equal(own.memory, memory)
    assert own.mask.data_ptr() == pointer  # written in place


@pytest.mark.ranks(2)
def test_a_module_that_is_only_run_becomes_the_first_ranks():
    teacher = Drawn(dist.get_rank()).requires_grad_(False)
    assert sync_module_states_(teacher, group=dist.group.WORLD) is teacher
    assert is_first(teacher, shared(Drawn(0)))


@pytest.mark.ranks(4)
def test_replicas_of_a_group_have_the_first_ranks_too():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    own = Drawn(rank)
    optimizer = torch.optim.SGD(own.trained.parameters(), 0.1)
    shard(own, optimizer, stage=1, group=pairs[rank // 2], replicas=across[rank % 2])
    assert is_first(own, shared(Drawn(0)))


@pytest.mark.ranks(4)
def test_frozen_experts_stay_those_of_the_ranks_that_hold_them():
    rank = dist.get_rank()
    holders = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = Drawn(rank)
    box = Box((7 * (rank % 2), 0), (7, 5), 0, (5, 1), (rank % 2, rank % 2 + 2))
    set_sharding(own.features.weight, Sharding((14, 5), (box,)))
    optimizer = torch.optim.SGD(own.trained.parameters(), 0.1)
    shard(own, optimizer, stage=1, group=dist.group.WORLD, expert_groups=[DataParallelGroup(holders[rank % 2])])
    assert torch.equal(own.features.weight, Drawn(rank % 2).features.weight)
    assert torch.equal(own.features.bias, Drawn(0).features.bias)
