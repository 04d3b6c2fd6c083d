"""One number of each rank a step: the largest of all, without a wait for a device."""

import pytest
import torch
import torch.distributed as dist

from par_groups import Vote
from par_testing import Accelerator, waits_seen


@pytest.mark.ranks(2)
def test_vote_on_the_host_returns_the_largest_number_of_this_step():
    vote, rank = Vote(torch.device("cpu")), dist.get_rank()
    assert [vote.cast(number) for number in (0, rank, 15 * (1 - rank), 0)] == [0, 1, 15, 0]


@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_vote_on_a_device_returns_the_number_of_the_step_before():
    vote, rank = Vote(torch.device("strict")), dist.get_rank()
    assert [vote.cast(number) for number in (rank, 15 * (1 - rank), 0, 0)] == [0, 1, 15, 0]
    assert not waits_seen()


@pytest.mark.ranks(1, backend="gloo")
def test_vote_of_one_rank_is_its_own_number_and_communicates_nothing():
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=1)
    assert Vote(torch.device("meta")).cast(3) == 3
