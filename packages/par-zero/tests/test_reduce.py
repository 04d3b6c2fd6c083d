"""In which order reductions begin and are waited for."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import count_collectives
from par_zero import shard
from par_zero._collectives import Groups
from par_zero._reduce import Reductions


class Noted:
    """A collective that notes when it begins and when it is waited for."""

    def __init__(self, notes, name):
        self.notes, self.name = notes, name
        notes.append(f"begin {name}")

    def wait(self):
        self.notes.append(f"wait {self.name}")


def begun(names, collectives):
    """What happens when reductions of these names begin, each of several collectives."""
    notes, reductions = [], Reductions()

    def steps(name):
        for number in range(collectives):
            yield Noted(notes, f"{name}{number}")

    for name in names:
        reductions.begin(steps(name))
    return reductions, notes


def test_two_first_collectives_are_under_way_and_the_second_ones_beside_them():
    _, notes = begun("abcd", 2)
    assert notes == [
        *("begin a0", "begin b0", "wait a0", "begin a1", "begin c0"),
        *("wait a1", "wait b0", "begin b1", "begin d0"),
    ]


def test_at_the_end_the_last_chunks_are_brought_on_in_turn():
    reductions, notes = begun("ab", 2)
    notes.clear()
    reductions.finish()
    assert notes == ["wait a0", "begin a1", "wait b0", "begin b1", "wait a1", "wait b1"]


def test_a_third_chunk_waits_for_the_first_alone():
    _, notes = begun("abc", 1)
    assert notes == ["begin a0", "begin b0", "wait a0", "begin c0"]


def test_flags_go_by_a_device_that_all_groups_have(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group)
    cuda, both, nccl = torch.device("cuda"), "cpu:gloo,cuda:nccl", "cuda:nccl"
    cases = ((both, None, "cpu"), (nccl, None, "cuda"), (both, both, "cpu"), (both, nccl, "cuda"))
    for shards, replicas, expected in cases:
        assert Groups(shards=shards, replicas=replicas, mean=True).device_of_flags(cuda).type == expected


@pytest.mark.ranks(2, init=False)
def test_gloo_is_known_by_what_serves_the_cpu_however_the_group_was_made():
    dist.init_process_group()  # of no named backend: torch then calls it undefined
    assert dist.get_backend() != "gloo"
    module, _ = shard(nn.Linear(4, 4), stage=2, group=dist.group.WORLD)
    with count_collectives() as counted:
        module(torch.ones(2, 4)).sum().backward()
    assert [event.op for event in counted.events if event.dtype == torch.float32] == ["all_to_all"]
    dist.destroy_process_group()
