"""Seconds that a save to tiers keeps the trainer, and seconds until a lost host is back, beside those of the disk.

Two ranks stand for two hosts, each with a folder of its own in /dev/shm for memory; the disk is that of TMPDIR. All
ways take turns in one run. Run as `python tools/bench/tiers.py`; writes docs/benchmarks/tiers.md and .json.
"""

import os
import shutil
import socket
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from _ranks import spawned
from _table import write
from _turns import ratio, shuffled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import par_checkpoint

TURNS, WARM_UPS = 7, 1
SHAPES = [(32000, 1024), *[(4096, 1024), (1024, 4096)] * 12]
TOTAL = sum(torch.Size(shape).numel() for shape in SHAPES) * 4

Seconds = dict[str, float]

SAVES = {
    "disk": "to the disk, and nothing else",
    "tiers": "to memory; then, meanwhile, to the neighbour's and to the disk",
    "tiers, async": "the same with async_=True: the copy of this rank's state",
}
LOADS = {
    "own memory": "nothing is lost: each host reads its memory",
    "neighbour's memory": "a host is lost: the neighbour reads its copy and sends it",
    "disk, cold": "both read the disk, whose files are in no page cache",
    "disk, warm": "both read the disk, whose files are in the page cache",
}


def main() -> None:
    """Measures, and writes the page."""
    with (
        tempfile.TemporaryDirectory(prefix="par-bench-") as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        turns: list[Seconds] = spawned(2, measure, disk, memory)
    rows = [row(turns, "save", name, what, "disk") for name, what in SAVES.items()]
    rows += [row(turns, "behind", f"behind {name}", what, "disk") for name, what in BEHIND.items()]
    rows += [row(turns, "load", name, what, "disk, cold") for name, what in LOADS.items()]
    note = (
        f"The state has {len(SHAPES)} fp32 tensors, {TOTAL / 2**20:.0f} MiB in total. Each of 2 ranks holds half of "
        "the rows. Each rank stands for one host, with its own folder in /dev/shm. `save` is the time for which the "
        "call blocks the trainer. `behind` is the time from the call until all tiers have the checkpoint. `load` is "
        "the time until the tensors are filled and all checksums verified. Each time runs from the first rank's begin "
        f"to the last rank's end. Values are medians of {TURNS} turns; each turn runs the contenders in another order. "
        "`of the disk's` is the time relative to a save to the disk, or to a load from a cold disk, as the median "
        "over the turns (lower is better). The two ranks communicate over the loopback of one machine, and background "
        "work of a save uses the same cores."
    )
    write("tiers", "Checkpoint tiers", rows, note)


BEHIND = {name: SAVES[name] for name in ("tiers", "tiers, async")}


def row(turns: list[Seconds], kind: str, name: str, what: str, base: str) -> dict[str, object]:
    """A line of the table."""
    seconds = [turn[name] for turn in turns]
    return {
        "what": kind,
        "way": name.removeprefix("behind "),
        "which means": what,
        "median s": f"{statistics.median(seconds):.3f}",
        "range s": f"{min(seconds):.3f} to {max(seconds):.3f}",
        "of the disk's": f"{ratio(seconds, [turn[base] for turn in turns]):.2f}",
    }


def measure(disk: str, memory: str) -> list[Seconds]:
    """All turns, on one rank."""
    host = f"host{dist.get_rank()}"
    with mock.patch.object(socket, "gethostname", return_value=host):
        generator = torch.Generator().manual_seed(0)
        state = {f"layer.{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}
        mesh = init_device_mesh("cpu", (2,))
        model = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in state.items()}
        del state
        bench = Bench(model, Path(disk), Path(memory) / host)
        return [bench.turn(number) for number in range(WARM_UPS + TURNS)][WARM_UPS:]


class Bench:
    """The state of one rank.

    Args:
        model: What is saved and loaded.
        disk: A folder on the disk, which both hosts see.
        memory: This host's folder in memory.
    """

    def __init__(self, model: dict[str, DTensor], disk: Path, memory: Path) -> None:
        self.model, self.disk, self.memory = model, disk, memory
        self.tiers = [str(memory), str(disk)]

    def turn(self, number: int) -> Seconds:
        """Each way once."""
        found: Seconds = {}
        for name in shuffled(list(SAVES), number):
            self.clear()
            self.save(name, found)
        for name in shuffled(list(LOADS), number):  # of what was saved last, in all tiers or on the disk alone
            self.load(name, found)
        return found

    def save(self, name: str, found: Seconds) -> None:
        """Saves in one way, and notes the seconds."""
        begin = started()
        if name == "disk":
            par_checkpoint.save(self.disk / "c", model=self.model, transfer=par_checkpoint.Transfer(progress=False))
            found[name] = ended(begin)
            return
        handle = par_checkpoint.save(
            "c",
            model=self.model,
            async_=name.endswith("async"),
            transfer=par_checkpoint.Transfer(progress=False),
            tiers=par_checkpoint.Tiers(self.tiers, copies=2),
        )
        found[name] = ended(begin)
        handle.wait()
        found[f"behind {name}"] = ended(begin)

    def load(self, name: str, found: Seconds) -> None:
        """Loads in one way, and notes the seconds."""
        if not self.memory.exists():  # the disk was saved to last
            self.clear()
            par_checkpoint.save(
                "c",
                model=self.model,
                transfer=par_checkpoint.Transfer(progress=False),
                tiers=par_checkpoint.Tiers(self.tiers, copies=2),
            ).wait()
        dist.barrier()
        away = self.memory.with_name(f"{self.memory.name}-away")
        if name == "neighbour's memory" and dist.get_rank() == 1:
            self.memory.rename(away)
        if name.startswith("disk"):
            touch(self.disk, keep=name.endswith("warm"))
        tiers = self.tiers[1:] if name.startswith("disk") else self.tiers[:1]
        begin = started()
        par_checkpoint.load(
            "c", model=self.model, transfer=par_checkpoint.Transfer(progress=False), tiers=par_checkpoint.Tiers(tiers)
        )
        found[name] = ended(begin)
        if away.exists() and dist.get_rank() == 1:
            away.rename(self.memory)
        dist.barrier()

    def clear(self) -> None:
        """Nothing in memory and nothing on the disk, and nothing left to write back."""
        shutil.rmtree(self.memory, ignore_errors=True)
        if dist.get_rank() == 0:
            shutil.rmtree(self.disk / "c", ignore_errors=True)
            os.sync()
        dist.barrier()


def started() -> float:
    """The moment at which all ranks begin."""
    dist.barrier()
    return time.perf_counter()


def ended(begin: float) -> float:
    """Seconds until all ranks are here."""
    dist.barrier()
    return time.perf_counter() - begin


def touch(folder: Path, *, keep: bool) -> None:
    """Brings files into the page cache, or out of it."""
    for path in folder.rglob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        while keep and os.read(file, 4 << 20):
            pass
        os.close(file)


if __name__ == "__main__":
    main()
