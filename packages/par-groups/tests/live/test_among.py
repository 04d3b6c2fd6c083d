import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology, group_among


@pytest.mark.ranks(3)
def test_communicators_of_the_same_ranks_are_made_while_groups_come_and_go():
    """torch would name them by the number of groups that there are, which here goes down, and differs between ranks."""
    rank = dist.get_rank()
    if rank == 2:
        return
    between = group_among([rank]) if rank == 0 else None
    first = group_among([0, 1])
    if between is not None:
        dist.destroy_process_group(between)
    for group in (first, group_among([0, 1]), group_among([0, 1], description="a third one")):
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == 2


@pytest.mark.ranks(2)
def test_a_group_of_this_rank_alone_is_made_whatever_groups_have_ended():
    topology = Topology({"data": 2, "tensor": 1})
    between = dist.new_group()
    with ProcessGroups(topology) as first:
        alone = first["tensor"]
        dist.destroy_process_group(between)
        with ProcessGroups(topology) as second:
            assert dist.get_world_size(second["tensor"]) == dist.get_world_size(alone) == 1


@pytest.mark.ranks(1, init=False)
def test_without_a_world_there_is_no_group_of_its_ranks():
    with pytest.raises(RuntimeError, match="could be; call launch"):
        group_among([0])
