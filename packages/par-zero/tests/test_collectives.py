"""Collectives on flat buffers."""

import pytest
import torch
import torch.distributed as dist

from par_zero._collectives import all_gather


@pytest.mark.ranks(1)
def test_all_gather_in_a_world_of_one_sends_nothing(monkeypatch):
    monkeypatch.setattr(dist, "broadcast", None)  # a call would fail
    monkeypatch.setattr(dist, "all_gather_into_tensor", None)
    flat, own = torch.zeros(6), torch.arange(6.0)
    all_gather(flat, own, dist.group.WORLD).wait()
    assert flat.tolist() == own.tolist()
    # A tensor that is not on the CPU takes the path of accelerators.
    all_gather(flat.to("meta"), own.to("meta"), dist.group.WORLD).wait()
