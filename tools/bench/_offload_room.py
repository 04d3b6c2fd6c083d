"""Training in a process that the operating system gives a quarter of the room its state takes, killed and gone on."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _offload_bare import moving
from _turns import ratio
from torch import nn

import par_checkpoint
from par_groups import launch, settle_
from par_zero import Offload, shard

WIDTH, BLOCKS, PIECE, AHEAD, THREADS = 2048, 24, 2**22, 4, 2
PARAMETERS = WIDTH * WIDTH * BLOCKS
STATE = 8 * PARAMETERS
ROOM = STATE // 4
STEPS, KILLED_AT = 13, 7

NOTE = (
    f"A model of {PARAMETERS / 1e6:.0f}e6 fp32 parameters, whose state takes {STATE / 1e6:.0f} MB. RLIMIT_DATA limits "
    f"the process to {ROOM / 1e6:.0f} MB, a quarter of the state, in addition to parameters and gradients. With state "
    "in memory, allocation fails under this limit. The process saves a checkpoint and is killed in step "
    f"{KILLED_AT + 1}, and a new process resumes under the same limit. The table has seconds of `optimizer.step()` "
    "until all writes are complete, and of the whole step with forward and backward (lower is better). After each "
    f"step, the same process repeats only the reads and writes. Pieces have {PIECE >> 20} MiB per slot, and {AHEAD} "
    "pieces are prefetched. Times are medians, and ratios are medians of the ratios within a step. The first step of "
    "each process, which creates state or buffers, is not counted."
)


def rows(folder: str) -> list[dict[str, object]]:
    """Runs all processes, and compares their losses bit by bit.

    Args:
        folder: A folder on a disk with room for three times the state, and for a checkpoint.
    """
    memory = _run("memory", folder, 0, STEPS)
    refused = _run("limited memory", folder, 0, 1)
    killed = _run("disk", folder, 0, STEPS)
    resumed = _run("disk", folder, KILLED_AT, STEPS)
    assert not refused, "state in memory has found room"
    assert len(killed) == KILLED_AT, "killed in the midst of a step"
    losses = [step["loss"] for step in (*killed, *resumed)]
    same = "equal, bit by bit" if losses == [step["loss"] for step in memory] else "DIFFERENT"
    timed = {
        "state in memory, no limit": memory,
        "state on the disk, a quarter of the room": killed,
        "gone on from the checkpoint": resumed,
    }
    return [
        {
            "process": name,
            "optimizer.step()": f"{median(step['step'] for step in steps):.2f}",
            "the whole step": f"{median(step['whole'] for step in steps):.2f}",
            "reads and writes alone": f"{median(step['bare'] for step in steps):.2f}" if "bare" in steps[0] else "",
            "optimizer.step() by these": _by("step", steps),
            "the whole step by these": _by("whole", steps),
            "losses": "" if found is memory else same,
        }
        for name, found in timed.items()
        for steps in [found[1:]]
    ]


def _by(what: str, steps: list[dict[str, Any]]) -> str:
    """How many times what the same reads and writes take a part of a step has taken."""
    if "bare" not in steps[0]:
        return ""
    return f"{ratio([step[what] for step in steps], [step['bare'] for step in steps]):.2f}"


def _run(where: str, folder: str, first: int, last: int) -> list[dict[str, Any]]:
    """The steps of one process; none, if it was refused memory."""
    command = [sys.executable, __file__, where, folder, str(first), str(last)]
    # A heap that keeps what was given back would count against the limit.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode not in (0, -signal.SIGKILL) and "can't allocate memory" not in ended.stderr:
        raise RuntimeError(ended.stderr)
    return [json.loads(line) for line in ended.stdout.splitlines()]


def _train(where: str, folder: str, first: int, last: int) -> None:
    """Trains some steps, prints a line for each, and is killed in one of them where it has begun with the first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    offload, bare, limit = None, None, "limited" in where
    if where == "disk":
        offload = Offload(optimizer="disk", path=folder, piece=PIECE, ahead=AHEAD, threads=THREADS)
        _, bare = moving(PARAMETERS, folder, PIECE, AHEAD, THREADS)
        limit = True
    group = dist.group.WORLD
    assert group is not None
    shard(model, optimizer, stage=0, group=group, offload=offload, overlap={"bucket": 4 * WIDTH * WIDTH})
    if limit:
        lines = Path("/proc/self/status").read_text().splitlines()
        [private] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData")]
        most = private + 4 * PARAMETERS + ROOM
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    saved = Path(folder) / "saved"
    if first:
        par_checkpoint.load(
            saved, model=model, optimizer=optimizer, transfer=par_checkpoint.Transfer(budget="32MiB", threads=1)
        )
    for number in range(first, last):
        if where == "disk" and not first and number == KILLED_AT:
            par_checkpoint.save(
                saved, model=model, optimizer=optimizer, transfer=par_checkpoint.Transfer(budget="32MiB", threads=1)
            ).wait()
            optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number))
        begun = time.perf_counter()
        loss = model(rows).square().mean()
        loss.backward()
        computed = time.perf_counter()
        optimizer.step()
        settle_(optimizer.param_groups[0]["params"])
        stepped = time.perf_counter()
        optimizer.zero_grad()
        told: dict[str, object] = {"loss": loss.item().hex(), "step": stepped - computed, "whole": stepped - begun}
        if bare is not None:
            begun = time.perf_counter()
            bare()
            told["bare"] = time.perf_counter() - begun
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    with launch():
        _train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
