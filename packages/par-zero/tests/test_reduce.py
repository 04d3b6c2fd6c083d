"""In which order reductions begin and are waited for."""

import pytest
import torch
import torch.distributed as dist

from par_testing import count_collectives
from par_zero._collectives import reduce_scatter
from par_zero._reduce import Groups, Reducer
from par_zero.layout.buffers import Buffers


class Noted:
    """A collective that notes when it begins and when it is waited for."""

    def __init__(self, notes, name):
        self.notes, self.name = notes, name
        notes.append(f"begin {name}")

    def wait(self):
        self.notes.append(f"wait {self.name}")


def launched(names, collectives):
    """What happens when chunks of these names are launched, each with several collectives."""
    notes = []
    reducer = Reducer([], 0, Groups(shards=None, replicas=None, mean=True))
    reducer._reduction = lambda name: (Noted(notes, f"{name}{number}") for number in range(collectives))
    for name in names:
        reducer._launch(name)
    return reducer, notes


def test_two_first_collectives_are_under_way_and_the_second_ones_beside_them():
    _, notes = launched("abcd", 2)
    assert notes == [
        *("begin a0", "begin b0", "wait a0", "begin a1", "begin c0"),
        *("wait a1", "wait b0", "begin b1", "begin d0"),
    ]


def test_at_the_end_the_last_chunks_are_brought_on_in_turn():
    reducer, notes = launched("ab", 2)
    notes.clear()
    while reducer._moving:
        reducer._advance(reducer._moving)
    assert notes == ["wait a0", "begin a1", "wait b0", "begin b1", "wait a1", "wait b1"]


def test_a_third_chunk_waits_for_the_first_alone():
    _, notes = launched("abc", 1)
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
    flat, into = torch.full((6,), 2.0), torch.empty(3)
    with count_collectives() as counted:
        reduce_scatter(flat, into, dist.group.WORLD, scale=0.5, buffers=Buffers()).wait()
    assert [event.op for event in counted.events] == ["all_to_all"]
    assert into.tolist() == [2.0] * 3
    dist.destroy_process_group()
