"""States of four times the room that the operating system leaves train, are killed, go on, and fill the disk.

Four processes, each a world of its own: one without a limit, one that runs out of memory, one that is killed, and one
that goes on from the checkpoint of that and then fills the disk.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import par_checkpoint
from par_zero import Offload, shard

pytest.importorskip("safetensors")

WIDTH, BLOCKS, ROOM = 1024, 16, 32 * 2**20
"""64 MiB of parameters, as much again for each of Adam's slots, and a quarter of these for everything that comes."""

SAVED_AT, KILLED_AT, FULL_AT, STEPS = 2, 3, 4, 6


@pytest.fixture
def disk(tmp_path):
    """A folder on a file system of 704 MiB of its own; where none can be mounted, on that of all tests."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(704 * 2**20)
    made = None
    for command in (["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        with suppress(FileNotFoundError):  # no such command
            made = subprocess.run(command, capture_output=True, check=False)
        if made is None or made.returncode:
            yield folder, False
            return
    try:
        yield folder, True
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def status(name):
    """Bytes that the kernel says of this process, such as "VmData", all private memory, or "RssAnon", what is there."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Training:
    """A model in a world of its own, and its losses by step."""

    def __init__(self, folder, dtype, *, offloaded, seed=0):
        torch.manual_seed(seed)
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=True)
        offload = Offload(optimizer="disk", path=folder, piece="1MiB", ahead=3) if offloaded else None
        policies = {"precision": {"param_dtype": dtype}, "overlap": {"bucket": 4 * WIDTH * WIDTH}, "offload": offload}
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        shard(self.module, self.optimizer, stage=0, group=group, **policies)
        self.dtype, self.group, self.losses = dtype, group, {}
        self.most = sys.maxsize  # bytes of private memory that may be there

    def limit(self):
        """Has the operating system leave room for gradients and `ROOM`: the ring, threads, activations, and state."""
        gradients = (
            (4 if self.dtype == torch.float32 else 6) * WIDTH * WIDTH * BLOCKS
        )  # and as the optimizer takes them
        self.most = status("RssAnon") + gradients + ROOM
        limit = status("VmData") + gradients + ROOM
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def steps(self, *numbers):
        for number in numbers:
            rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = self.module(rows.to(self.dtype)).square().mean()
            loss.backward()
            self.optimizer.step()
            assert status("RssAnon") < self.most
            self.optimizer.zero_grad()
            self.losses[str(number)] = loss.item().hex()

    def save(self, path):
        options = {"model": self.module, "optimizer": self.optimizer, "group": self.group}
        par_checkpoint.save(path, transfer=par_checkpoint.Transfer(budget="8MiB", threads=1), **options).wait()

    def load(self, path):
        options = {"model": self.module, "optimizer": self.optimizer, "group": self.group}
        par_checkpoint.load(path, transfer=par_checkpoint.Transfer(budget="8MiB", threads=1), **options)


def fill(folder):
    """Takes all that is left of a disk; gives the file back."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(2**20)):
                pass
        with suppress(OSError):
            while file.write(bytes(512)):
                pass
    return filler


def when(path, gone_of=None):
    """Waits for a file, and for the end of a process."""
    while not path.exists():
        time.sleep(0.01)
    text = path.read_text()
    while gone_of is not None and Path(f"/proc/{text}").exists():
        with suppress(FileNotFoundError):
            if Path(f"/proc/{text}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        time.sleep(0.01)
    return text


def tell(path, text):
    """Writes a file that is there as a whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.rename(path)


def on_a_full_disk(training, folder, *, can_be_filled):
    """Goes on, is told that neither another model nor a checkpoint has room, and has lost nothing."""
    before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    filler = fill(folder) if can_be_filled else None
    if filler is None:  # the kernel refuses to make as much room for one file
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    weights = module.weight.detach().clone()
    with pytest.raises(ValueError, match=r"the disk at .* free and 8\.4 MB are needed; free some, or offload less"):
        shard(module, optimizer, stage=0, group=training.group, offload=Offload(optimizer="disk", path=folder))
    assert torch.equal(module.weight, weights)
    assert optimizer.param_groups[0]["params"] == [module.weight]
    if filler is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    else:
        with pytest.raises(par_checkpoint.CheckpointError, match=r"bytes are needed in .*, 0 are free: free some"):
            training.save(folder / "another")
    training.steps(FULL_AT)
    if filler is not None:
        assert os.statvfs(folder).f_bavail == 0
        filler.unlink()
    training.save(folder / "another")
    training.steps(5)


@pytest.mark.storm
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.storm)])
@pytest.mark.skipif(sys.platform != "linux", reason="this limit leaves out memory that lies in files on Linux alone")
@pytest.mark.ranks(4, dies=(2,), timeout=120)
def test_state_of_four_times_the_room_trains_is_killed_goes_on_and_fills_its_disk(dtype, disk, tmp_path):
    folder, can_be_filled = disk
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD: a heap that keeps what was given back would count against the limit
    libc.mallopt(-8, 1)  # M_ARENA_MAX
    threading.stack_size(2**20)  # the limit counts 8 MiB for a thread, of which next to nothing is ever touched
    rank, dtype = dist.get_rank(), getattr(torch, dtype)
    if rank == 3:
        when(tmp_path / "killed", gone_of=2)
        assert {each.name for each in folder.iterdir()} - {"lost+found"} == {"saved"}  # and no scratch file
    training = Training(folder, dtype, offloaded=rank > 1, seed=rank == 3)
    if rank:
        training.limit()
    if rank == 0:
        training.steps(*range(STEPS))
        found = json.loads(when(tmp_path / "before")) | json.loads(when(tmp_path / "after"))
        assert found == training.losses
    if rank == 1:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            training.steps(0)
    if rank == 2:
        training.steps(*range(SAVED_AT + 1))
        training.save(folder / "saved")
        tell(tmp_path / "before", json.dumps(training.losses))
        tell(tmp_path / "killed", str(os.getpid()))
        training.optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        training.steps(KILLED_AT)
    if rank == 3:
        training.load(folder / "saved")
        training.steps(KILLED_AT)
        on_a_full_disk(training, folder, can_be_filled=can_be_filled)
        for name, number in (("saved", KILLED_AT), ("another", 5)):
            losses = dict(training.losses)
            training.load(folder / name)
            training.steps(number)
            assert training.losses == losses
        tell(tmp_path / "after", json.dumps(training.losses))
