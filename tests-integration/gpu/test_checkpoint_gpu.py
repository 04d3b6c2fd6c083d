"""par-checkpoint on a GPU: a copy to pinned memory, on a stream of its own, while training goes on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from par_checkpoint import CheckpointError, Transfer, load, save, verify
from par_checkpoint.transfer.sessions import session_of
from par_testing import accelerator_type

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]
LARGE = 1 << (26 if DEVICE == "cuda" else 16)  # floats; on a GPU a copy of them takes a while


def training(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1023, 2047), nn.BatchNorm1d(2047), nn.Linear(2047, 15)).to(DEVICE)
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())  # not in one piece on the disk
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def backward(model):
    model(torch.randn(64, 1023, device=DEVICE)).square().mean().backward()


def everything(model, optimizer):
    slots = {
        f"{number}.{slot}": value
        for number, state in optimizer.state_dict()["state"].items()
        for slot, value in state.items()
    }
    return {name: each.detach().clone() for name, each in {**model.state_dict(), **slots}.items()}


@pytest.mark.parametrize("copy", ["blocking", "background"])
def test_what_is_saved_is_of_the_call_although_the_gpu_is_behind_and_training_goes_on(tmp_path, copy):
    model, optimizer = training()
    for number in range(3):
        backward(model)
        torch.get_device_module(DEVICE)._sleep(100_000_000)  # the step is still to come when `save` is called
        optimizer.step()
        expected = everything(model, optimizer)
        handle = save(
            tmp_path / f"{number}", model=model, optimizer=optimizer, async_=True, transfer=Transfer(copy=copy)
        )
        for _ in range(3):
            backward(model)
            optimizer.step()
        handle.wait()
        kept = session_of(None).take_memory()
        assert all(chunk.is_pinned() for chunk in kept.memory)
        session_of(None).keep_memory(kept)
        assert verify(tmp_path / f"{number}") == []
        other, its = training(seed=1)
        load(tmp_path / f"{number}", model=other, optimizer=its)
        found = everything(other, its)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].cpu(), expected[name].cpu()) for name in expected)


def test_what_is_freed_at_once_is_saved_whole(tmp_path):
    """Its memory is not given to others before it is copied."""
    weight = nn.Parameter(torch.ones(LARGE, device=DEVICE))
    handle = save(tmp_path / "c", model={"w": weight}, async_=True, transfer=Transfer(copy="background"))
    del weight
    for _ in range(10):
        torch.zeros(LARGE, device=DEVICE)
    handle.wait()
    found = torch.empty(LARGE)
    load(tmp_path / "c", model={"w": found})
    assert bool((found == 1).all())


def test_training_on_another_stream_is_waited_for(tmp_path):
    with torch.Stream(DEVICE):
        weight = nn.Parameter(torch.zeros(LARGE // 4, device=DEVICE))
        torch.get_device_module(DEVICE)._sleep(100_000_000)
        weight.data.fill_(1)
        handle = save(tmp_path / "c", model={"w": weight}, async_=True, transfer=Transfer(copy="background"))
        handle.wait_for_copy()
        weight.data.fill_(2)
    handle.wait()
    found = torch.empty(LARGE // 4)
    load(tmp_path / "c", model={"w": found})
    assert bool((found == 1).all())


@pytest.mark.skipif(DEVICE == "strict", reason="its RaceError comes before the save sees the change")
def test_a_change_before_the_copy_is_refused(tmp_path):
    weight = nn.Parameter(torch.ones(4 * LARGE, device=DEVICE))
    torch.accelerator.synchronize()
    handle = save(tmp_path / "c", model={"w": weight}, async_=True, transfer=Transfer(copy="background"))
    with torch.no_grad():
        weight.zero_()  # a gigabyte takes longer to copy than this takes to be told
    with pytest.raises(CheckpointError, match="'w' was changed while the save copied it"):
        handle.wait()


@pytest.mark.parametrize("async_", [False, True])
def test_a_save_and_a_load_inside_a_stream_wait_for_what_it_has_still_to_compute(tmp_path, async_):
    """Threads write and read: their streams know nothing of the trainer's."""
    with torch.Stream(DEVICE):
        weight = torch.zeros(LARGE // 4, device=DEVICE)
        for step in range(3):
            torch.get_device_module(DEVICE)._sleep(200_000_000)
            weight.fill_(step + 1)
            save(tmp_path / f"{step}", model={"w": weight}, async_=async_).wait()
        other = torch.zeros(LARGE // 4, device=DEVICE)
        for step in range(3):
            torch.get_device_module(DEVICE)._sleep(200_000_000)
            other.fill_(-1)  # still to come when `load` is called
            load(tmp_path / f"{step}", model={"w": other})
            assert bool((other == step + 1).all())


def test_a_model_of_dtensors_on_the_meta_device_is_made_on_the_gpu_of_its_mesh(tmp_path):
    dist.init_process_group(dist.get_default_backend_for_device(DEVICE), store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        save(tmp_path / "c", model={"w": torch.arange(6.0)})
        part = nn.Parameter(DTensor.from_local(torch.empty(6, device="meta"), mesh, [Shard(0)], run_check=False))
        load(tmp_path / "c", model={"w": part})
        assert part.device == torch.device(DEVICE, torch.accelerator.current_device_index())
        assert part.to_local().tolist() == [0, 1, 2, 3, 4, 5]
    finally:
        dist.destroy_process_group()
