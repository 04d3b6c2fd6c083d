"""Copies on a strict accelerator, which raises on races and counts waits of the host."""

import pytest
import torch

from par_groups import HostCopies, copy_to_device, copy_to_host, number_on_device
from par_testing import pageable_seen, waits_seen


@pytest.mark.accelerator(races="error")
@pytest.mark.parametrize("ends", ["loaded", "dropped in flight", "dropped on its way back"])
def test_memory_of_a_host_copy_is_free_without_a_race(ends):
    copies, size, device = HostCopies(), 1 << 16, torch.device("strict")
    for number in range(3):
        copy = copies.store(torch.full((size,), float(number), device=device))
        if ends != "dropped in flight":
            copy.release()
            torch.zeros(size, device=device)  # takes the memory
            copy.fetch()
        if ends == "loaded":
            assert torch.equal(copy.load().cpu(), torch.full((size,), float(number)))
        del copy
        torch.zeros(size, device=device)


@pytest.mark.accelerator
def test_small_copies_do_not_make_the_host_wait():
    device = torch.device("strict")
    x = torch.ones(1024, device=device)
    waits_seen()
    pageable_seen()
    one = copy_to_device(torch.arange(3), device)
    two = number_on_device(2.5, device) + number_on_device(torch.tensor(1), device) + number_on_device(x[0], device)
    three, is_there = copy_to_host(x * 2)
    assert waits_seen() == {}
    assert pageable_seen() == {}
    is_there.synchronize()
    assert three.sum() == 2048
    assert one.tolist() == [0, 1, 2]
    assert float(two) == 4.5
    assert copy_to_device(x, torch.device("cpu")).is_cpu
