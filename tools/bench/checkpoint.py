"""Seconds of saving and loading, side by side with what else there is, on the disk of TMPDIR.

Contenders take turns in one run, so that each meets the disk in all its moods; ratios are medians over the turns. Every
save includes fsync, every load ends with the bytes in tensors that were there before. Run as
`python tools/bench/checkpoint.py`; writes docs/benchmarks/checkpoint.md and .json.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from _table import write
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import par_checkpoint
from par_checkpoint._bytes import bytes_of

RUNS, WARM_UPS, THREADS, CHUNK = 10, 1, 2, 4 << 20
STEP = 0.1  # seconds of compute between a save and the optimizer's step
SHAPES = [(32000, 1024), *[(4096, 1024), (1024, 4096), (1024,)] * 12]
CASES = ("1 rank", "2 ranks, rows", "2 ranks, replicas")

State = dict[str, torch.Tensor]
Act = TypeVar("Act")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One case on one rank.

    Args:
        state: What is saved, and loaded into: plain tensors or DTensors.
        folder: Where to.
        mirror: A second copy of this rank's bytes, for memcpy.
        step: A training step without the optimizer's part.
        samples: By contender, seconds of every turn.
    """

    state: State
    folder: Path
    mirror: State
    step: Callable[[], None]
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether this rank could save everything by itself."""
        return not isinstance(next(iter(self.state.values())), DTensor)

    def turn(self, number: int) -> None:
        """Every contender once, in another order each time: what ran right before matters to disk and caches."""
        for name, act in shuffled(self.savers(), number):
            self.clear(name)
            self.measure(name, partial(act, self.folder / name))
        sources = {"par-checkpoint": "save: par-checkpoint", "pread, as many threads": "save: pwrite + fsync"}
        for name, act in shuffled(self.loaders(), number):
            source = self.folder / sources.get(name, f"save: {name}")
            self.measure(f"load: {name}", partial(act, source))
            if name != "memcpy":
                self.measure(f"cold load: {name}", partial(act, source), partial(evict, source))
        for name in self.savers():
            self.clear(name)

    def savers(self) -> Mapping[str, Callable[[Path], float | None]]:
        """What saves, by name. It may give the seconds that count."""
        found: dict[str, Callable[[Path], float | None]] = {
            "save: par-checkpoint": self.save,
            "save: pwrite + fsync": self.write_plainly,
            "blocked: par-checkpoint, async": partial(self.save_async, "blocking"),
            "blocked: par-checkpoint, async, background copy": partial(self.save_async, "background"),
            "save: DCP": self.save_dcp,
            "save: DCP, Hugging Face files": self.save_hugging_face,
        }
        if self.alone:
            found["save: safetensors"] = partial(self.save_on_first, save_file)
            found["save: torch.save"] = partial(self.save_on_first, torch.save)
        return found

    def loaders(self) -> Mapping[str, Callable[[Path], None]]:
        """What loads, by name."""
        found: dict[str, Callable[[Path], None]] = {
            "par-checkpoint": self.load,
            "memcpy": self.copy,
            "pread, as many threads": self.read_plainly,
            "DCP": self.load_dcp,
        }
        if self.alone:
            found["safetensors"] = lambda path: self.fill_(load_file(path / "all"))
            found["torch.save"] = lambda path: self.fill_(torch.load(path / "all", weights_only=True))
        return found

    def measure(self, name: str, act: Callable[[], float | None], before: Callable[[], object] = lambda: None) -> None:
        """Notes the seconds from the first rank's begin to the last one's end."""
        wait()
        before()
        wait()
        begin = time.perf_counter()
        counted = act()
        wait()
        self.samples.setdefault(name, []).append(time.perf_counter() - begin if counted is None else counted)

    def clear(self, name: str) -> None:
        """An empty folder, and nothing left to write back."""
        if first():
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
            os.sync()
        wait()

    def save(self, path: Path) -> None:
        """Ours."""
        par_checkpoint.save(path, model=self.state, overwrite=True, threads=THREADS, progress=False)

    def save_async(self, copy: str, path: Path) -> float:
        """Seconds that the trainer is blocked, in the call and before the optimizer's step; ends when all is saved."""
        model = {name: nn.Parameter(each) for name, each in self.state.items()}  # what changes only in a step
        kinds = {"blocking": "beside async", "background": "beside async, background copy"}
        if copy == "background":
            self.measure("step: alone", self.step)
        wait()
        saving = par_checkpoint.save(path, model=model, async_=True, copy=copy, threads=THREADS, progress=False)
        begin = time.perf_counter()
        self.step()
        self.samples.setdefault(f"step: {kinds[copy]}", []).append(time.perf_counter() - begin)
        saving.wait_for_copy()
        saving.wait()
        return saving.blocked_seconds

    def load(self, path: Path) -> None:
        """Ours, with all checksums."""
        par_checkpoint.load(path, model=self.state, threads=THREADS, progress=False)

    def save_dcp(self, path: Path) -> None:
        """torch.distributed.checkpoint as it comes, which syncs its files."""
        save(self.state, storage_writer=FileSystemWriter(path), no_dist=not dist.is_initialized())

    def save_hugging_face(self, path: Path) -> None:
        """The same through its Hugging Face writer, up to files that transformers opens."""
        cut = not self.alone
        writer = HuggingFaceStorageWriter(str(path), save_distributed=cut, enable_consolidation=cut)
        save(self.state, storage_writer=writer, no_dist=not dist.is_initialized())
        if first():
            sync(path.rglob("*.safetensors"))

    def save_on_first(self, save_to: Callable[[State, Path], object], path: Path) -> None:
        """One file, from rank 0, synced."""
        if first():
            save_to(self.state, path / "all")
            sync([path / "all"])

    def write_plainly(self, path: Path) -> None:
        """Every rank's bytes into one file; of replicas each writes its part."""
        self.each_chunk(path, os.O_CREAT | os.O_WRONLY, os.pwrite)
        sync([path / "all"])

    def read_plainly(self, path: Path) -> None:
        """The same way back; of replicas each reads everything."""
        self.each_chunk(path, os.O_RDONLY, lambda file, chunk, at: os.preadv(file, [chunk], at), whole=True)

    def each_chunk(
        self, path: Path, flags: int, act: Callable[[int, memoryview, int], int], *, whole: bool = False
    ) -> None:
        """Does something with every chunk of this rank's memory and its place in a file."""
        file = os.open(path / "all", flags, 0o666)
        chunks = list(self.chunks())
        if self.alone and not whole:
            chunks = chunks[rank() :: world()]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda each: act(file, *each), chunks))
        os.close(file)

    def chunks(self) -> Iterable[tuple[memoryview, int]]:
        """This rank's memory, and where it belongs in a file of all tensors."""
        at = 0
        for tensor in self.state.values():
            memory = bytes_of(local(tensor))
            first_byte = at + (0 if self.alone else rank() * len(memory))
            for begin in range(0, len(memory), CHUNK):
                yield memory[begin : begin + CHUNK], first_byte + begin
            at += tensor.numel() * tensor.element_size()

    def load_dcp(self, path: Path) -> None:
        """torch.distributed.checkpoint, into the tensors that are there."""
        load(self.state, storage_reader=FileSystemReader(path), no_dist=not dist.is_initialized())

    def fill_(self, loaded: State) -> None:
        """What load_state_dict does."""
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])

    def copy(self, _: Path) -> None:
        """The same bytes from memory to warm memory."""
        for name, tensor in self.state.items():
            local(tensor).copy_(self.mirror[name])


def main() -> None:
    """Measures every case in processes of its own."""
    rows = [row for case in CASES for row in rows_of(case, measured(case))]
    size = sum(torch.Size(shape).numel() for shape in SHAPES) * 4 / 2**20
    note = (
        f"{len(SHAPES)} fp32 tensors, {size:.0f} MiB together; rows: each of 2 ranks holds half of every tensor, "
        f"replicas: each holds all. {RUNS} turns of all contenders, each in an order of its own, every save into an "
        f"empty folder with nothing left to write back, {THREADS} threads a rank for ours and for plain pwrite and "
        "pread. Saves include fsync. Ours makes and checks a crc32c of every 4 MiB. Loads end in tensors that were "
        "there before; cold: the files are "
        "not in the page cache. `ours is faster` is the median of the ratios within a turn: how many times as long the "
        "contender takes as ours does. `blocked` is the time that save keeps the trainer with async_=True, in the call "
        f"and before the optimizer's step, against our synchronous save; between the two are {STEP} s of forward and "
        "backward passes on this machine's cores, `step`, against the same without a save. The first save, which makes "
        "the buffer, is a warm-up."
    )
    write("checkpoint", "Saving and loading", rows, note)


def measured(case: str) -> dict[str, list[float]]:
    """Seconds by contender; one process a rank."""
    with tempfile.TemporaryDirectory(prefix="par-bench-") as folder:
        commands = [[sys.executable, __file__, case, str(rank), folder] for rank in range(int(case[0]))]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        outputs = [each.communicate()[0] for each in running]
    if any(each.returncode for each in running):
        raise RuntimeError(f"{case}: a rank failed")
    found: dict[str, list[float]] = json.loads(outputs[0].splitlines()[-1])
    return found


def rows_of(case: str, samples: Mapping[str, list[float]]) -> list[dict[str, object]]:
    """The table of a case, against our save, load and cold load."""
    size = sum(torch.Size(shape).numel() for shape in SHAPES) * 4 / 2**30
    rows: list[dict[str, object]] = []
    for name, seconds in sorted(samples.items(), key=lambda each: each[0].partition(":")[0]):
        kind = name.partition(":")[0].replace("blocked", "save")
        base = "step: alone" if kind == "step" else f"{kind}: par-checkpoint"
        ratios = [it / ours for it, ours in zip(seconds, samples[base], strict=True)]
        rows.append(
            {
                "case": case,
                "what": name,
                "median s": f"{statistics.median(seconds):.3f}",
                "range s": f"{min(seconds):.3f} to {max(seconds):.3f}",
                "GiB/s": "" if kind == "step" else f"{size / statistics.median(seconds):.2f}",
                "ours is faster": f"{statistics.median(ratios):.2f}",
            }
        )
    return rows


def run(case: str, number: int, folder: Path) -> dict[str, list[float]]:
    """All turns, on one rank."""
    if case != CASES[0]:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    generator = torch.Generator().manual_seed(0)
    state = {f"layer.{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}
    if case == "2 ranks, rows":
        mesh = init_device_mesh("cpu", (2,))
        state = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in state.items()}
    mirror = {name: local(each).clone() for name, each in state.items()}
    bench = Bench(state=state, folder=folder, mirror=mirror, step=training_step())
    for turn in range(WARM_UPS + RUNS):
        bench.turn(turn)
    return {name: seconds[WARM_UPS:] for name, seconds in bench.samples.items()}


def training_step() -> Callable[[], None]:
    """Forward and backward passes of about `STEP` seconds on all ranks at a time."""
    inputs, layer = torch.randn(1024, 1024), nn.Linear(1024, 1024)

    def passes(count: int) -> None:
        for _ in range(count):
            layer(inputs).square().mean().backward()

    passes(10)
    wait()
    begin = time.perf_counter()
    passes(10)
    return partial(passes, max(1, round(10 * STEP / (time.perf_counter() - begin))))


def shuffled(items: Mapping[str, Act], turn: int) -> list[tuple[str, Act]]:
    """All items in an order of this turn, the same on all ranks."""
    return random.Random(turn).sample(list(items.items()), len(items))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sync(paths: Iterable[Path]) -> None:
    """Files to the disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def evict(folder: Path) -> None:
    """Files out of the page cache; they are on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def rank() -> int:
    """This rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def first() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def wait() -> None:
    """Until all ranks are here."""
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        print(json.dumps(run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
