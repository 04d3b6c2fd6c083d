"""What a group keeps between calls, and what is of one call alone."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import _save as saving
from par_checkpoint import load, save
from par_checkpoint.transfer import ranks as transfer


@pytest.mark.ranks(2)
def test_calls_with_other_timeouts_use_the_same_communicators_plans_and_memory(tmp_path):
    model = {"w": torch.ones(3 << 20)}
    made, planned = transfer.gloo_among, saving.Planner
    with (
        mock.patch.object(transfer, "gloo_among", side_effect=made) as communicators,
        mock.patch.object(saving, "Planner", side_effect=planned) as planners,
    ):
        memories = set()
        for number in range(4):
            timeout = 100.0 + number % 2
            save(tmp_path / f"{number}", model=model, async_=True, timeout=timeout)
            memories.add(transfer.session_of(None, 50.0).memory.memory[0].data_ptr())
            load(tmp_path / f"{number}", model=model, timeout=300.0)
    assert communicators.call_count <= 2  # one for the calls, if the world is not of gloo, and one for the background
    assert planners.call_count == 1
    assert len(memories) == 1


@pytest.mark.ranks(2)
def test_a_call_waits_for_its_own_timeout(tmp_path):
    group = dist.new_group(backend="gloo")
    save(tmp_path / "a", model={"w": torch.ones(3)}, group=group, timeout=1800.0)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]ime"):
            save(tmp_path / "b", model={"w": torch.ones(3)}, group=group, timeout=0.3)
    dist.barrier()
