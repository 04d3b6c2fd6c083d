"""A step of AdamW whose moments lie on a disk, beside what the disk itself takes for the same bytes.

One process, so that nothing but the disk and the arithmetic takes part. Contenders take turns. Run as
`python tools/bench/offload.py [parameters] [rounds]`, or with `room` for the second table alone, of a process that the
operating system gives a quarter of the room that its state takes; writes docs/benchmarks/offload.md and .json. It needs
a folder on a disk with room for six times the state, by default the current one; `OFFLOAD_PATH` names another.
DeepSpeed takes part where it is installed (`pip install deepspeed`, with libaio-dev and a compiler for its extensions).
"""

import importlib.util
import json
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from _offload_bare import Contender, moving
from _offload_room import NOTE as ROOM_NOTE
from _offload_room import rows as rows_of_room
from _table import FOLDER, Section, write_sections
from _turns import ratio, shuffled
from torch import nn

from par_groups import launch, settle_
from par_zero import Offload, shard

PIECE, AHEAD, THREADS = 2**24, 4, 2

IN_MEMORY, ON_DISK, BARE = "state in memory", "state on the disk", "the same reads and writes alone"
STEP = "A step"
RETURNS = "state on the disk, a half read ahead, until it returns"


def main(*what: str) -> None:
    """Measures both tables, or that of the room alone: then the other one stays as it was measured."""
    if what == ("room",):
        sections = json.loads((FOLDER / "offload.json").read_text())["sections"]
        section = next(Section(**each) for each in sections if each["title"] == STEP)
    else:
        section = step(*map(int, what))
    with tempfile.TemporaryDirectory(dir=os.environ.get("OFFLOAD_PATH", ".")) as folder:
        room = Section(title="With a quarter of the memory", note=ROOM_NOTE, rows=rows_of_room(folder))
    write_sections("offload", "Optimizer state on a disk", [section, room])


def step(parameters: int = 200_000_000, rounds: int = 7) -> Section:
    """Measures all contenders, in turns."""
    torch.manual_seed(0)
    pieces = -(-parameters // (PIECE // 4))
    with launch(), tempfile.TemporaryDirectory(dir=os.environ.get("OFFLOAD_PATH", ".")) as folder:
        contenders: dict[str, Contender] = {
            IN_MEMORY: training(parameters, None),
            "state on the host": training(parameters, Offload(optimizer="host")),
            ON_DISK: training(parameters, on_disk(folder, AHEAD)),
            BARE: moving(parameters, folder, PIECE, AHEAD, THREADS),
            "memory-mapped state, not cached": mapped(parameters, folder),
            RETURNS: training(parameters, on_disk(folder, pieces // 2), waits=False),
        }
        if importlib.util.find_spec("deepspeed") is None:
            print("DeepSpeed's ZeRO-Infinity is left out: deepspeed is not installed")
        else:
            contenders["DeepSpeed's ZeRO-Infinity"] = infinity(parameters, folder)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):
            for name in shuffled(list(contenders), turn):
                prepare, step = contenders[name]
                prepare()
                start = time.perf_counter()
                step()
                if turn:  # the first one makes state, buffers and pages
                    times[name].append(time.perf_counter() - start)
    bare, stepped = times[BARE], times[ON_DISK]
    left = 1 - (pieces // 2) / pieces
    # What it may take: what the arithmetic takes, and the disk for the part that is not read ahead.
    allowed = [own + left * moved for own, moved in zip(times[IN_MEMORY], bare, strict=True)]
    rows = [
        {
            "contender": name,
            "seconds a step": f"{median(own):.2f}",
            "by the same reads and writes": f"{ratio(own, bare):.2f}",
            "by state in memory": f"{ratio(own, times[IN_MEMORY]):.2f}",
            "state on the disk by it": f"{ratio(stepped, own):.2f}",
        }
        for name, own in times.items()
    ]
    note = (
        f"Time of `optimizer.step()` of fused AdamW with {parameters / 1e6:.0f}e6 fp32 parameters, in seconds, until "
        f"all writes are complete (lower is better). A step reads {8 * parameters / 1e9:.1f} GB and writes "
        f"{8 * parameters / 1e9:.1f} GB, in pieces of {PIECE >> 20} MiB per slot. It prefetches {AHEAD} pieces, with "
        f"{THREADS} threads that read and {THREADS} that write. Times are medians of {rounds} rounds, and ratios are "
        "medians of the ratios within a round. Each round runs every row once. Memory-mapped state uses the same "
        "optimizer call. Its pages are dropped from the page cache before each step, as if memory were too small for "
        'the state. In the row "a half read ahead", backward has prefetched half of the state, and the time ends when '
        f"`step()` returns. This time is {ratio(times[RETURNS], allowed):.2f} of the computation plus the disk time "
        "for the other half. ZeRO-Infinity also keeps fp32 parameters on the disk, and so moves 1.5 times as many "
        "bytes."
    )
    return Section(title=STEP, note=note, rows=rows)


class Weight(nn.Module):
    """One parameter, whose gradient costs a pass over it."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(parameters))

    def forward(self, factor: float) -> torch.Tensor:
        """A number that each element takes part in."""
        return self.weight.sum() * factor


def on_disk(folder: str, ahead: int) -> Offload:
    """All state on the disk."""
    return Offload(optimizer="disk", path=folder, piece=PIECE, ahead=ahead, threads=THREADS)


def training(parameters: int, offload: Offload | None, *, waits: bool = True) -> Contender:
    """A step of a sharded module, and the backward pass before it.

    Args:
        parameters: Number of elements.
        offload: Where state lies.
        waits: Whether the step is measured until everything is written, and nothing is read before it. Else until it
            returns, after a backward pass that leaves time to read ahead.
    """
    module = Weight(parameters)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    shard(module, optimizer, stage=1, group=group, offload=offload)

    def prepare() -> None:
        optimizer.zero_grad()
        settle_(optimizer.param_groups[0]["params"])
        module(0.5).backward()
        if waits:
            settle_(optimizer.param_groups[0]["params"])  # forgets what was read ahead
        else:
            time.sleep(8 * parameters / 5e8)

    def step() -> None:
        optimizer.step()
        if waits:
            settle_(optimizer.param_groups[0]["params"])

    return prepare, step


def infinity(parameters: int, folder: str) -> Contender:
    """A step of DeepSpeed at stage 3 with the optimizer on the disk, reads and writes pipelined, on a CPU."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    import deepspeed  # noqa: PLC0415 - an optional contender

    class Weights(nn.Module):
        """Parameters of as many elements as a piece has."""

        def __init__(self) -> None:
            super().__init__()
            count = PIECE // 4
            sizes = [min(count, parameters - start) for start in range(0, parameters, count)]
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])

        def forward(self, factor: float) -> torch.Tensor:
            """A number that each element takes part in."""
            return torch.stack([weight.sum() for weight in self.weights]).sum() * factor

    on_nvme = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "sub_group_size": PIECE, "offload_optimizer": on_nvme},
        "aio": {"block_size": 2**22, "queue_depth": 8, "thread_count": THREADS, "overlap_events": True},
    }
    engine, *_ = deepspeed.initialize(model=Weights(), config=config, dist_init_required=False)
    return lambda: engine.backward(engine(0.5)), engine.step


def mapped(parameters: int, folder: str) -> Contender:
    """A step of the same kernel on state that lies in a file which is mapped into memory."""
    with (Path(folder) / "mapped").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * parameters)
        memory = mmap.mmap(file.fileno(), 8 * parameters)
        number = os.dup(file.fileno())
    state = torch.frombuffer(memory, dtype=torch.float32)
    parameter = nn.Parameter(torch.randn(parameters))
    parameter.grad = torch.randn(parameters)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.state[parameter] = {
        "step": torch.zeros(()),
        "exp_avg": state[:parameters],
        "exp_avg_sq": state[parameters:],
    }

    def prepare() -> None:
        memory.madvise(mmap.MADV_DONTNEED)  # what is mapped stays in the kernel's copy
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)

    def step() -> None:
        optimizer.step()
        os.fdatasync(number)

    return prepare, step


if __name__ == "__main__":
    main(*sys.argv[1:])
