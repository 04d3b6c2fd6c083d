"""A training step under par-zero, DDP, torch's ZeroRedundancyOptimizer and FSDP2, on gloo ranks of one machine.

Two models: many tiny layers, where Python and calls are what costs, and a mid-size MLP. Every contender lives in the
same processes and they take turns, each turn in another order; ratios are medians over the turns. Peak memory is taken
in processes of its own. Run as `python tools/bench/zero.py`; writes docs/benchmarks/zero.md and .json.
"""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _ranks import spawned
from _table import write
from _turns import quartile, shuffled
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from par_zero import shard

Trained = tuple[nn.Module, Optimizer]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how often it is measured.

    Args:
        name: The case's name in the table.
        blocks: Number of MLPs in a row, each 4 times wider inside.
        width: Features that go into a block and come out.
        batch: Rows on each rank.
        turns: Number of counted turns of each contender, after one that warms up.
        steps: Number of steps in a turn.
    """

    name: str
    blocks: int
    width: int
    batch: int
    turns: int
    steps: int


Turn = dict[str, dict[str, float]]
"""By contender: milliseconds of a step, "wall" until the slowest rank is done, "cpu" of all threads of all ranks."""

CASES = (
    Case(name="overhead-bound", blocks=16, width=64, batch=8, turns=30, steps=4),
    Case(name="mid-size", blocks=8, width=512, batch=256, turns=10, steps=2),
)
RANKS = (2, 4)
REFERENCES = {
    "stage 0": "DDP",
    "stage 1": "DDP + ZeroRedundancyOptimizer",
    "stage 2": "DDP + ZeroRedundancyOptimizer",
    "stage 3": "FSDP2",
}


def main() -> None:
    """Measures every case on every number of ranks, and writes medians, spread, ratios and peaks."""
    rows = [row for ranks in RANKS for case in CASES for row in rows_of(ranks, case, spawned(ranks, timed, case))]
    shapes = "; ".join(f"{c.name}: {c.blocks} blocks of {c.width}, batch {c.batch}, {c.turns} turns" for c in CASES)
    note = (
        f"{shapes}; fp32, fused AdamW, gloo, one thread per rank. Times are those of the slowest rank, per step. The "
        "contenders run alternately in the same processes, in another order in each turn, each after one warm-up "
        "step. `ratio` is the median over the turns, with quartiles (lower is better). `CPU ms` is the CPU time of "
        "all threads of all ranks. `peak MB` is the growth of resident memory on the rank with the largest growth, "
        "from before the model is created to the peak of later steps. Ratios of the overhead-bound model depend on the "
        "scheduler, since the peers wait for more messages. With real-time priority (`chrt -f 10`), 2 ranks have 0.94 "
        "x DDP at stage 0, 0.68 and 0.71 x ZeroRedundancyOptimizer at stages 1 and 2, and 0.20 x FSDP2 at stage 3. "
        "Ratios of the mid-size model depend on how fast the machine computes, since computing is most of a step and "
        "the same for all. On this day it computed a third slower than on 22 November, when stage 3 had 0.60 x FSDP2. "
        "The code of that day and this code, by turns at real-time priority: 0.80, 0.70, 0.80, 0.79."
    )
    write("zero", "A training step under ZeRO", rows, note)


def rows_of(ranks: int, case: Case, turns: Sequence[Turn]) -> list[dict[str, object]]:
    """The table of a case."""
    rows: list[dict[str, object]] = []
    for name in contenders():
        wall = [turn[name]["wall"] for turn in turns]
        rows.append(
            {
                "ranks": ranks,
                "model": case.name,
                "contender": name,
                "median ms": f"{statistics.median(wall):.1f}",
                "quartiles ms": quartiles(wall, 1),
                "CPU ms": f"{statistics.median(turn[name]['cpu'] for turn in turns):.1f}",
                "ratio": ratio(name, turns),
                "peak MB": round(spawned(ranks, peak, case, name)) if (ranks, case) == (2, CASES[1]) else "",
            }
        )
    return rows


def ratio(name: str, turns: Sequence[Turn]) -> str:
    """How many times as long as its reference a contender takes, if it has one."""
    reference = REFERENCES.get(name)
    if reference is None:
        return ""
    ratios = [turn[name]["wall"] / turn[reference]["wall"] for turn in turns]
    return f"{statistics.median(ratios):.2f} ({quartiles(ratios, 2)}) x {reference}"


def quartiles(values: Sequence[float], digits: int) -> str:
    """The first and the third."""
    return f"{quartile(values, 1):.{digits}f} to {quartile(values, 3):.{digits}f}"


def contenders() -> dict[str, Callable[[nn.Module], Trained]]:
    """Contenders by name: each is a function that makes one out of a model."""
    return {
        "no communication": lambda model: (model, adam(model)),
        "DDP": lambda model: (DistributedDataParallel(model), adam(model)),
        "DDP + ZeroRedundancyOptimizer": zero_redundancy,
        "FSDP2": lambda model: fully_sharded(model, reshard=True),
        "FSDP2 without resharding": lambda model: fully_sharded(model, reshard=False),
        **{f"stage {stage}": ours(stage) for stage in range(4)},
    }


def adam(model: nn.Module) -> Optimizer:
    """The optimizer of all contenders."""
    return AdamW(model.parameters(), lr=1e-4, fused=True)


def zero_redundancy(model: nn.Module) -> Trained:
    """Torch's sharded optimizer."""
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-4, fused=True)


def fully_sharded(model: nn.Module, *, reshard: bool) -> Trained:
    """FSDP2, a unit for each block."""
    for block in model.children():
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model, adam(model)


def ours(stage: int) -> Callable[[nn.Module], Trained]:
    """par-zero with its defaults."""

    def make(model: nn.Module) -> Trained:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("torch.distributed is not initialised")
        optimizer = adam(model)
        shard(model, optimizer, stage=stage, group=group)
        return model, optimizer

    return make


def stack(case: Case) -> nn.Module:
    """The model."""
    torch.manual_seed(0)
    width = case.width
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(case.blocks)
        )
    )


def step(trained: Trained, x: Tensor) -> None:
    """One training step."""
    module, optimizer = trained
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(case: Case) -> list[Turn]:
    """What a step of each contender takes, turn by turn."""
    made = {name: make(stack(case)) for name, make in contenders().items()}
    x = torch.randn(case.batch, case.width)
    orders = [shuffled(list(made), turn) for turn in range(case.turns + 1)]
    return [{name: taken(made[name], x, case.steps) for name in order} for order in orders][1:]


def taken(trained: Trained, x: Tensor, steps: int) -> dict[str, float]:
    """What a step takes, once the caches hold this contender's model."""
    step(trained, x)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(trained, x)
    longest, total = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu]).mul(1e3 / steps).unbind()
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return {"wall": longest.item(), "cpu": total.item()}


def peak(case: Case, name: str) -> float:
    """Megabytes by which resident memory grows at most."""
    x = torch.randn(case.batch, case.width)
    before = kilobytes("VmRSS")
    trained = contenders()[name](stack(case))
    step(trained, x)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark of building
    for _ in range(2):
        step(trained, x)
    grown = torch.tensor(float(kilobytes("VmHWM") - before))
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    return grown.item() / 1000


def kilobytes(field: str) -> int:
    """From what Linux says of this process."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"no {field} here; memory is measured on Linux alone")
    return int(found[1])


if __name__ == "__main__":
    main()
