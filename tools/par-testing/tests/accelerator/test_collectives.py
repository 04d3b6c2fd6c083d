"""Strict groups on tensors of the device: equal to the CPU's, and a stream that does not wait is named."""

import pytest
import torch
import torch.distributed as dist

from par_testing import Accelerator, Costs, Links, RaceError, Strict, device_times

ON_DEVICE = {"backend": "strict", "accelerator": Accelerator()}


def mine(size=8):
    return torch.arange(float(size), device="strict") + 10 * dist.get_rank()


@pytest.mark.ranks(2, **ON_DEVICE)
def test_collectives_on_the_device_equal_the_cpu():
    def results(device):
        x = mine().to(device)
        total, gathered, part = x.clone(), x.new_empty(16), x.new_empty(4)
        dist.all_reduce(total)
        dist.all_gather_single(gathered, x)
        dist.reduce_scatter_single(part, x)
        exchanged, root = x.new_empty(8), x.clone()
        dist.all_to_all_single(exchanged, x)
        dist.broadcast(root, 1)
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        return [each.cpu() for each in (total, gathered, part, exchanged, root, x)]

    assert all(torch.equal(*pair) for pair in zip(results("strict"), results("cpu"), strict=True))


@pytest.mark.ranks(2, **ON_DEVICE)
def test_output_read_before_wait_raises():
    gathered = torch.empty(16, device="strict")
    work = dist.all_gather_single(gathered, mine(), async_op=True)
    with pytest.raises(RaceError, match=r"add on stream 0 reads .*while all_gather on stream \d, issued at test_coll"):
        gathered + 1
    work.wait()
    assert (gathered[:8] + 1).tolist() == list(range(1, 9))


@pytest.mark.ranks(2, **ON_DEVICE)
def test_input_written_before_wait_raises():
    x, gathered = mine(), torch.empty(16, device="strict")
    work = dist.all_gather_single(gathered, x, async_op=True)
    x + 1  # it may be read
    with pytest.raises(RaceError, match=r"add_ on stream 0 writes .*may still read"):
        x.add_(0)
    work.wait()
    x.add_(1)


@pytest.mark.ranks(2, **ON_DEVICE)
def test_own_part_of_an_all_gather_in_place_may_be_read():
    gathered = torch.empty(16, device="strict")
    own = gathered.chunk(2)[dist.get_rank()]
    own.copy_(mine())
    work = dist.all_gather_single(gathered, own, async_op=True)
    assert torch.equal((own + 1).cpu(), mine().cpu() + 1)
    work.wait()
    assert gathered.sum().item() == 136


@pytest.mark.ranks(
    2,
    backend="strict",
    strict=Strict(links=Links(inside=(0.0, 1e9))),
    accelerator=Accelerator(costs=Costs(launch=0.0, memory=1e30)),
)
def test_wait_for_a_collective_takes_its_virtual_time():
    x, gathered = torch.zeros(250_000, device="strict"), torch.empty(500_000, device="strict")
    torch.accelerator.synchronize()
    device_times()
    work = dist.all_gather_single(gathered, x, async_op=True)
    torch.get_device_module("strict")._sleep(600_000)  # 0.4 ms of the 1 ms that a megabyte takes
    work.wait()
    times = device_times()
    assert times.total == pytest.approx(1e-3)
    assert times.exposed == pytest.approx(0.6e-3)
    assert times.computing == pytest.approx(0.4e-3)
