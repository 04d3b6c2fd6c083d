"""A save that copies in the background, beside ZeRO, FSDP2 and mixed precision: what it writes is of the call."""

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import par_checkpoint
from par_checkpoint.transfer import snapshot as _snapshot
from par_precision import mixed
from par_testing import storm
from par_zero import shard

pytest.importorskip("safetensors")

KINDS = ("plain", "FSDP2", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3")
pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning")


def made(kind, *, precision):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(37, 13), nn.Tanh(), nn.Linear(13, 37))
    if kind == "FSDP2":
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    world = dist.group.WORLD
    if kind.startswith("ZeRO"):
        dtype = torch.bfloat16 if precision else None
        shard(module, optimizer, stage=int(kind[-1]), group=world, precision={"param_dtype": dtype})
    return mixed(module, optimizer, "bf16", group=world, replicas=world) if precision else (module, optimizer)


def backward(module, step):
    x = torch.randn(8, 37, generator=torch.Generator().manual_seed(step))
    (module(x) - x.flip(1)).square().mean().backward()


def files(path):
    """Every file's bytes."""
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("precision", [storm(False), True])
@pytest.mark.ranks(2, timeout=120)
def test_what_is_saved_in_the_background_is_of_the_call(precision, tmp_path):
    finish = _snapshot.Snapshot.finish
    for kind in KINDS:
        module, optimizer = made(kind, precision=precision)
        for step in range(2):
            backward(module, step)
            optimizer.step()
            optimizer.zero_grad()
        given = {"model": module, "optimizer": optimizer}
        par_checkpoint.save(tmp_path / kind, **given)
        opened = threading.Event()

        def held(snapshot, opened=opened):
            assert opened.wait(30)
            finish(snapshot)

        with mock.patch.object(_snapshot.Snapshot, "finish", held):
            handle = par_checkpoint.save(
                tmp_path / "background" / kind,
                async_=True,
                transfer=par_checkpoint.Transfer(copy="background"),
                **given,
            )
            backward(module, 2)  # gathers parameters, reduces gradients
            timer = threading.Timer(0.1, opened.set)
            timer.start()
            optimizer.step()  # waits
            timer.join()
            handle.wait()
        assert files(tmp_path / "background" / kind) == files(tmp_path / kind), kind
        dist.barrier()
