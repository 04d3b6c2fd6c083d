"""Seconds of saving and loading, side by side with what else there is, on the disk of TMPDIR and in memory.

Contenders take turns in one run, so that each meets the disk in all its moods; ratios are medians over the turns. Every
save includes fsync, every load ends with the bytes in tensors that were there before. Run as
`python tools/bench/checkpoint.py`; writes docs/benchmarks/checkpoint.md and .json. With the names of cases, it measures
and prints these alone: `python tools/bench/checkpoint.py "1 rank" --place disk --turns 4 --kinds "load,cold load"`.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _table import Section, table, write_sections
from _turns import shuffled
from crc32c import crc32c
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import par_checkpoint
from par_checkpoint.storage.local import LocalWriter
from par_groups import bytes_of

RUNS, WARM_UPS, SELDOM = 10, 1, 2  # turns; those that do not count; every which one is for the slow ones, too
THREADS, CHUNK = 2, 4 << 20
STEP = 0.1  # seconds of compute between a save and the optimizer's step
SHAPES = [(32000, 1024), *[(4096, 1024), (1024, 4096), (1024,)] * 12]
TOTAL = sum(torch.Size(shape).numel() for shape in SHAPES) * 4
CASES = ("1 rank", "2 ranks, rows", "2 ranks, replicas")
PLACES = {"disk": None, "tmpfs": "/dev/shm"}
KINDS = ("save", "blocked", "disk", "load", "cold load")  # of contenders

BASES = {
    "blocked": "save: par-checkpoint",
    "disk": "save: par-checkpoint",
    "step": "step: alone",
    "step on one core": "step on one core: alone",
}
LIMITS = {"load": "load: pread + crc32c", "cold load": "cold load: pread"}

NOTES = {
    "disk": (
        f"The state has {len(SHAPES)} fp32 tensors, {TOTAL / 2**20:.0f} MiB in total. In the case *rows*, each of 2 "
        f"ranks holds half of every tensor. In *replicas*, each rank holds all tensors. There are {RUNS} turns, and "
        f"each turn runs the contenders once, in another order. Slow contenders run in {RUNS // SELDOM} turns. "
        f"par-checkpoint, plain pwrite and plain pread use {THREADS} threads per rank. Every save writes to an empty "
        "folder after earlier writes have reached the disk, and includes fsync. par-checkpoint also computes and "
        "verifies a crc32c of every 4 MiB. A load fills existing tensors from files in the page cache; for a *cold* "
        "load, the files are not in the page cache. The first save allocates the buffer and is not counted.\n\n"
        "- `ours is faster`: the contender's time divided by par-checkpoint's time, as the median over the turns. "
        "Above 1, par-checkpoint is faster.\n"
        "- `disk`: the limit of the disk. One rank writes the same number of bytes from one small buffer into a "
        "preallocated file, and syncs it.\n"
        "- `limit`: the time relative to a plain way to move the same bytes (lower is better), as the median over the "
        "turns. For a save, this is `disk` or pwrite with fsync, whichever has the lower median; for a load, pread "
        "with a crc32c; for a cold load, pread.\n"
        "- `blocked`: the time for which a save with async_=True blocks the trainer, in the call and before the "
        "optimizer's step. Its ratio is relative to the synchronous save of par-checkpoint. Between the call and the "
        f"optimizer's step, forward and backward passes take {STEP} s.\n"
        "- `step`: these passes during a save, relative to the same passes without a save. *On one core*, they "
        "compute in one thread and leave the other cores to the save.\n\n"
        "New pages of the page cache can cost more than the disk on a virtual machine whose host reclaims free "
        "memory. A cold read then takes up to twice as long, with every contender, as the ranges show. O_DIRECT needs "
        "no new pages."
    ),
    "tmpfs": (
        "The same measurements on a file system in memory. There is no disk, and no file is cold. The `limit` of a "
        "save is plain pwrite of the same tensors into a new file, with the same number of threads."
    ),
}

State = dict[str, torch.Tensor]
Seconds = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One case on one rank.

    Args:
        state: Tensors by name, plain or DTensors, that are saved and loaded into.
        folder: The folder that takes the files.
        mirror: A second copy of this rank's bytes, for memcpy.
        step: A training step without the optimizer's part.
        in_memory: Whether the folder is on no disk: then there is nothing to evict, and no disk to measure alone.
        kinds: The kinds of contenders that are measured; other libraries are only where these are all.
        turns: Seconds by contender, a dict a turn.
    """

    state: State
    folder: Path
    mirror: State
    step: Callable[[], None]
    in_memory: bool = False
    kinds: Sequence[str] = KINDS
    turns: list[Seconds] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """Whether this rank could save everything by itself."""
        return not isinstance(next(iter(self.state.values())), DTensor)

    def turn(self, number: int) -> None:
        """Each contender once, in another order each time: what ran right before matters to disk and caches."""
        self.turns.append({})
        slow = number % SELDOM == 0 and set(self.kinds) == set(KINDS)
        for name, act in shuffled(list(self.savers(slow=slow).items()), number):
            self.clear(name)
            if name.startswith("disk") and first():
                allocate(self.folder / name)
            self.measure(name, partial(act, self.folder / name))
        plain = "save: pwrite + fsync"
        sources = {"par-checkpoint": "save: par-checkpoint", "pread": plain, "pread + crc32c": plain}
        for name, act in shuffled(list(self.loaders(slow=slow).items()), number):
            source = self.folder / sources.get(name, f"save: {name}")
            if "load" in self.kinds:
                self.measure(f"load: {name}", partial(act, source), partial(warm, source))
            if "cold load" in self.kinds and name != "memcpy" and not self.in_memory:
                self.measure(f"cold load: {name}", partial(act, source), partial(evict, source))
        for name in self.savers(slow=slow):
            self.clear(name)

    def savers(self, *, slow: bool) -> Mapping[str, Callable[[Path], float | None]]:
        """Savers by name, with those that are not in every turn if `slow`; one may give back the seconds that count."""
        found: dict[str, Callable[[Path], float | None]] = {
            "save: par-checkpoint": self.save,
            "save: pwrite + fsync": self.write_plainly,
        }
        if "blocked" in self.kinds:
            found["blocked: par-checkpoint, async, background copy"] = partial(self.save_async, "background")
        if slow:
            found["blocked: par-checkpoint, async"] = partial(self.save_async, "blocking")
            if world() == 1:
                found["blocked: par-checkpoint, async, beside a step on one core"] = partial(
                    self.save_async, "one core"
                )
            found["save: DCP"] = self.save_dcp
            found["save: DCP, Hugging Face files"] = self.save_hugging_face
        if "disk" in self.kinds and not self.in_memory:
            found |= {f"disk: page cache, threads: {n}": partial(fill_early, n) for n in (2, 4)}
            found |= {f"disk: O_DIRECT, threads: {n}": partial(fill_directly, n) for n in (2, 4)}
        if slow and world() == 1:  # for more ranks the first would do the same
            found["save: safetensors"] = partial(self.save_to, save_file)
            found["save: torch.save"] = partial(self.save_to, torch.save)
        return found

    def loaders(self, *, slow: bool) -> Mapping[str, Callable[[Path], None]]:
        """Loaders by name, with those that are not in every turn if `slow`."""
        found: dict[str, Callable[[Path], None]] = {
            "par-checkpoint": self.load,
            "memcpy": self.copy,
            "pread": self.read_plainly,
            "pread + crc32c": partial(self.read_plainly, checked=True),
        }
        if slow:
            found["DCP"] = self.load_dcp
        if slow and world() == 1:
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
        self.turns[-1][name] = time.perf_counter() - begin if counted is None else counted

    def clear(self, name: str) -> None:
        """An empty folder, and nothing left to write back."""
        if first():
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
            os.sync()
        wait()

    def save(self, path: Path) -> None:
        """Ours."""
        par_checkpoint.save(
            path, model=self.state, overwrite=True, transfer=par_checkpoint.Transfer(threads=THREADS, progress=False)
        )

    def save_async(self, copy: str, path: Path) -> float:
        """Seconds that the trainer is blocked, in the call and before the optimizer's step; ends when all is saved."""
        model = {name: nn.Parameter(each) for name, each in self.state.items()}  # what changes only in a step
        kinds = {
            "blocking": "step: beside async",
            "background": "step: beside async, background copy",
            "one core": "step on one core: beside async, background copy",
        }
        if copy == "background":
            self.measure("step: alone", self.step)
        threads = torch.get_num_threads()
        if copy == "one core":
            torch.set_num_threads(1)
            self.measure("step on one core: alone", self.step)
        wait()
        how = "blocking" if copy == "blocking" else "background"
        saving = par_checkpoint.save(
            path, model=model, async_=True, transfer=par_checkpoint.Transfer(threads=THREADS, progress=False, copy=how)
        )
        begin = time.perf_counter()
        self.step()
        self.turns[-1][kinds[copy]] = time.perf_counter() - begin
        torch.set_num_threads(threads)
        saving.wait_for_copy()
        saving.wait()
        return saving.blocked_seconds

    def load(self, path: Path) -> None:
        """Ours, with all checksums."""
        par_checkpoint.load(path, model=self.state, transfer=par_checkpoint.Transfer(threads=THREADS, progress=False))

    def save_dcp(self, path: Path) -> None:
        """torch.distributed.checkpoint as it comes, which syncs its files."""
        save(self.state, storage_writer=FileSystemWriter(path), no_dist=not dist.is_initialized())

    def save_hugging_face(self, path: Path) -> None:
        """torch.distributed.checkpoint through its Hugging Face writer, up to files that transformers opens."""
        cut = not self.alone
        writer = HuggingFaceStorageWriter(str(path), save_distributed=cut, enable_consolidation=cut)
        save(self.state, storage_writer=writer, no_dist=not dist.is_initialized())
        if first():
            sync(path.rglob("*.safetensors"))

    def save_to(self, save_to: Callable[[State, Path], object], path: Path) -> None:
        """One file, synced."""
        save_to(self.state, path / "all")
        sync([path / "all"])

    def write_plainly(self, path: Path) -> None:
        """Every rank's bytes into one file; of replicas each writes its part."""
        self.each_chunk(path, os.O_CREAT | os.O_WRONLY, os.pwrite)
        sync([path / "all"])

    def read_plainly(self, path: Path, *, checked: bool = False) -> None:
        """Every rank's bytes out of that one file; of replicas each reads everything."""

        def read(file: int, chunk: memoryview, at: int) -> int:
            count = os.preadv(file, [chunk], at)
            return crc32c(chunk) if checked else count

        self.each_chunk(path, os.O_RDONLY, read, whole=True)

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
        """Copies loaded tensors into those that are there, as load_state_dict does."""
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])

    def copy(self, _: Path) -> None:
        """As many bytes from memory to warm memory: the limit of any load."""
        for name, tensor in self.state.items():
            local(tensor).copy_(self.mirror[name])


def main() -> None:
    """Measures every case in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"cases to measure and print: {'; '.join(CASES)}")
    parser.add_argument("--place", choices=PLACES, help="where the files are; by default, on both")
    parser.add_argument("--turns", type=int, default=RUNS, help="how often every contender runs")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"kinds of contenders, of {','.join(KINDS)}")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of the process that measures
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    kinds = wanted.kinds.split(",")
    if unknown := sorted({*wanted.cases} - {*CASES} | {*kinds} - {*KINDS}):
        parser.error(f"there is no {unknown[0]!r}; cases are {', '.join(CASES)}, kinds are {', '.join(KINDS)}")
    if wanted.rank is not None:
        print(json.dumps(run(wanted.cases[0], wanted.rank, wanted.folder, wanted.place, kinds, wanted.turns)))
        return
    sections = [
        Section(
            title=f"On {'a disk' if place == 'disk' else 'tmpfs'}",
            note=NOTES[place],
            rows=[
                row
                for case in wanted.cases or CASES
                for row in rows_of(case, measured(case, place, wanted.kinds, wanted.turns))
            ],
        )
        for place in ([wanted.place] if wanted.place else PLACES)
    ]
    if sys.argv[1:]:
        print("\n".join(line for section in sections for line in [section.title, *table(section.rows)]))
    else:
        write_sections("checkpoint", "Saving and loading checkpoints", sections)


def measured(case: str, place: str, kinds: str, turns: int) -> list[Seconds]:
    """Seconds by contender, of every turn; one process a rank."""
    with tempfile.TemporaryDirectory(prefix="par-bench-", dir=PLACES[place]) as folder:
        chosen = [case, "--place", place, "--kinds", kinds, "--turns", str(turns), "--folder", folder]
        commands = [[sys.executable, __file__, *chosen, "--rank", str(rank)] for rank in range(int(case[0]))]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        outputs = [each.communicate()[0] for each in running]
    if any(each.returncode for each in running):
        raise RuntimeError(f"{case}: a rank failed")
    found: list[Seconds] = json.loads(outputs[0].splitlines()[-1])
    return found


def rows_of(case: str, turns: Sequence[Seconds]) -> list[dict[str, object]]:
    """The table of a case, against our save, load and cold load."""
    rows: list[dict[str, object]] = []
    names = dict.fromkeys(name for turn in turns for name in turn)
    limits = {**LIMITS, "save": quickest(turns)}
    for name in sorted(names, key=lambda each: each.partition(":")[0]):
        kind = name.partition(":")[0]
        base = BASES.get(kind, f"{kind}: par-checkpoint")
        seconds = [turn[name] for turn in turns if name in turn]
        rows.append(
            {
                "case": case,
                "what": name,
                "median s": f"{statistics.median(seconds):.3f}",
                "range s": f"{min(seconds):.3f} to {max(seconds):.3f}",
                "GiB/s": "" if kind.startswith("step") else f"{TOTAL / 2**30 / statistics.median(seconds):.2f}",
                "ours is faster": ratio(turns, name, base),
                "limit": ratio(turns, name, limits[kind]) if kind in limits else "",
            }
        )
    return rows


def ratio(turns: Iterable[Seconds], name: str, base: str) -> str:
    """The median over the turns in which both were measured; nothing if there are none."""
    ratios = [turn[name] / turn[base] for turn in turns if name in turn and base in turn]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def quickest(turns: Sequence[Seconds]) -> str:
    """The plain way to write whose median over all turns is the least."""
    names = {name for turn in turns for name in turn if name.startswith("disk") or name == "save: pwrite + fsync"}
    return min(names, key=lambda name: statistics.median(turn[name] for turn in turns if name in turn))


def run(case: str, number: int, folder: Path, place: str, kinds: Sequence[str], turns: int) -> list[Seconds]:
    """All turns, on one rank."""
    if case != CASES[0]:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    generator = torch.Generator().manual_seed(0)
    state = {f"layer.{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}
    if case == "2 ranks, rows":
        mesh = init_device_mesh("cpu", (2,))
        state = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in state.items()}
    mirror = {name: local(each).clone() for name, each in state.items()}
    bench = Bench(
        state=state, folder=folder, mirror=mirror, step=training_step(), in_memory=place != "disk", kinds=kinds
    )
    for turn in range(WARM_UPS + turns):
        bench.turn(turn)
    return bench.turns[WARM_UPS:]


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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sync(paths: Iterable[Path]) -> None:
    """Files to the disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def allocate(folder: Path) -> None:
    """A file of the right size that has all its blocks."""
    file = os.open(folder / "all", os.O_CREAT | os.O_WRONLY, 0o666)
    os.posix_fallocate(file, 0, TOTAL)
    os.close(file)


def fill_early(threads: int, folder: Path) -> None:
    """All bytes through the page cache, from which they go to the disk right away."""
    if first():
        writer = LocalWriter(folder / "all")
        fill(threads, writer.write_at)
        writer.finish()


def fill_directly(threads: int, folder: Path) -> None:
    """All bytes past the page cache."""
    if first():
        file = os.open(folder / "all", os.O_WRONLY | os.O_DIRECT)
        fill(threads, lambda begin, memory: os.pwrite(file, memory, begin))
        os.fsync(file)
        os.close(file)


def fill(threads: int, write_at: Callable[[int, memoryview], object]) -> None:
    """Writes one piece of aligned memory all over a file."""
    memory = mmap.mmap(-1, CHUNK)
    memory.write(os.urandom(CHUNK))
    with ThreadPoolExecutor(threads) as pool, memoryview(memory) as view:
        places = range(0, TOTAL, CHUNK)
        list(pool.map(lambda begin: write_at(begin, view[: TOTAL - begin]), places))


def warm(folder: Path) -> None:
    """Files into the page cache, by reading: pages that a write has left there are larger, and copied sooner."""
    if first():
        evict(folder)
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(CHUNK):
                        pass


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
    main()
