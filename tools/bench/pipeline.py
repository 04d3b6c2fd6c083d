"""A training step in a pipeline: par-pipeline and torch.distributed.pipelining, on gloo ranks of one machine.

Two models: tiny layers, where Python and messages are what costs, and a mid-size MLP. The same stages and microbatches.
Contenders take turns, in a random order each time, and each turn is in processes of its own, made for it, as a user
has them: on which core gloo's thread runs makes a quarter of a tiny step, and what ran before in the same processes
would decide that. Whatever is compared is compared within a turn, so that a machine that slows down slows both. Run as
`python tools/bench/pipeline.py`; takes ten minutes, and writes docs/benchmarks/pipeline.md and .json.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _ranks import spawned, world
from _table import write
from _turns import quartile, ratio, shuffled
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.optim import AdamW
from tqdm import tqdm

from par_pipeline import (
    Costs,
    Pipeline,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how often it is measured.

    Args:
        name: The case's name in the table.
        blocks: Number of MLPs in a row, each 4 times wider inside.
        width: Features that go into a block and come out.
        microbatches: Number of microbatches in a step.
        rows: Rows of a microbatch.
    """

    name: str
    blocks: int
    width: int
    microbatches: int
    rows: int


class Turn(NamedTuple):
    """One contender in a world of its own.

    Args:
        milliseconds: Time of a step.
        expected: Milliseconds of a step as simulated; None where nothing is simulated.
        waits: Milliseconds in a step that ranks wait beyond the simulation.
    """

    milliseconds: float
    expected: float | None = None
    waits: float | None = None


CASES = (
    Case(name="tiny", blocks=8, width=32, microbatches=32, rows=2),
    Case(name="mid-size", blocks=8, width=256, microbatches=8, rows=64),
)
TURNS = {2: 12, 4: 4}  # by ranks; four of them share two cores, and say less
WARM_UP = 8  # steps of a turn that are not counted
STEPS = 12  # and those that are: the first rank may begin with the next while the last one is busy with this one
OURS: dict[str, Callable[[int, int], Schedule]] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "ZB-H1": zb_h1,
    "ZB-H2": zb_h2,
    "interleaved": interleaved,
    "ZB-V": zb_v,
}
TORCHS: dict[str, tuple[Any, str]] = {
    "GPipe": (pipelining.ScheduleGPipe, "one"),
    "1F1B": (pipelining.Schedule1F1B, "one"),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, "loop"),
    "interleaved ZB": (pipelining.ScheduleInterleavedZeroBubble, "loop"),
    "ZB-V": (pipelining.ScheduleZBVZeroBubble, "v"),
}


def main() -> None:
    """Measures every case on every number of ranks, and writes medians, spread and ratios."""
    torch.multiprocessing.set_forkserver_preload(["par_pipeline", "torch.distributed.pipelining"])
    rows = []
    for ranks, case in product(TURNS, CASES):
        turns = measured(ranks, case)
        for name in turns:
            figures = row(name, turns)
            rows.append({"ranks": ranks, "model": case.name, "contender": name} | figures)
    shapes = "; ".join(
        f"{c.name}: {c.blocks} blocks of {c.width}, {c.microbatches} microbatches of {c.rows} rows" for c in CASES
    )
    counts = " and ".join(f"{turns} turns on {ranks} ranks" for ranks, turns in TURNS.items())
    note = (
        f"{shapes}; fp32, fused AdamW, gloo, one thread per rank. {counts}, with the contenders in a random order. "
        f"Each contender runs in new processes, for {STEPS} steps after {WARM_UP} warm-up steps. Times are those of "
        "the slowest rank, per step. `x torch's same` and `x torch's 1F1B` are medians over the turns of the ratio to "
        "torch's schedule (lower is better). The simulation uses the median time of each action in the turn's last "
        "step and adds the optimizer's time. It is missing if ranks share cores. `beyond simulation` is the excess of "
        "the measured step over the simulated step. A part of it are actions that take longer than their median, such "
        "as the first backward, which allocates the gradients. `waits beyond` is the excess of the waiting time on "
        "the rank that waits longest, as a fraction of the simulated step."
    )
    write("pipeline", "A training step in a pipeline", rows, note)


def measured(ranks: int, case: Case) -> dict[str, list[Turn]]:
    """The turns of every contender."""
    names = [f"torch {name}" for name in TORCHS] + [f"par-pipeline {name}" for name in OURS]
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    with tqdm(total=TURNS[ranks] * len(names), desc=f"{case.name} on {ranks} ranks", unit="turn") as progress:
        for number in range(TURNS[ranks]):
            for name in shuffled(names, number):
                turns[name].append(Turn(*spawned(ranks, timed, case, name, start_method="forkserver")))
                progress.update()
    return turns


def row(name: str, turns: dict[str, list[Turn]]) -> dict[str, object]:
    """A contender's figures."""
    times = {each: [turn.milliseconds for turn in turns[each]] for each in turns}
    mine, same = times[name], name.replace("par-pipeline", "torch")
    has_same = same != name and same in times
    expected = [turn.expected for turn in turns[name] if turn.expected is not None]
    waits = [turn.waits for turn in turns[name] if turn.waits is not None]
    return {
        "median ms": round(statistics.median(mine), 1),
        "quartiles ms": f"{quartile(mine, 1):.1f} to {quartile(mine, 3):.1f}",
        "x torch's same": f"{ratio(mine, times[same]):.2f}" if has_same else "",
        "x torch's 1F1B": f"{ratio(mine, times['torch 1F1B']):.2f}",
        "beyond simulation": f"{ratio(mine, expected) - 1:+.1%}" if expected else "",
        "waits beyond": f"{ratio(waits, expected):+.1%}" if expected else "",
    }


def stages_of(case: Case, number: int) -> list[nn.Module]:
    """The model, in so many parts."""
    torch.manual_seed(0)
    width = case.width
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(case.blocks)
    ]
    each = case.blocks // number
    return [nn.Sequential(*blocks[i * each : (i + 1) * each]) for i in range(number)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return (output - target).square().mean()


class Contender:
    """A pipeline with its optimizer.

    Args:
        modules: This rank's.
        step: Forward and backward.
        pipeline: Ours.
    """

    def __init__(self, modules: Sequence[nn.Module], step: Step, pipeline: Pipeline | None = None) -> None:
        self.optimizer = AdamW([each for module in modules for each in module.parameters()], lr=1e-4, fused=True)
        self.step, self.pipeline = step, pipeline
        self.seconds: list[float] = []

    def train(self, x: Tensor, y: Tensor) -> None:
        """One training step."""
        self.step(x, y)
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def ours(name: str, case: Case) -> Contender:
    """par-pipeline."""
    schedule = OURS[name](dist.get_world_size(), case.microbatches)
    stages = stages_of(case, schedule.stages)
    modules = [stages[number] for number in schedule.stage_of(dist.get_rank())]
    pipeline = Pipeline(modules, schedule, world(), loss_fn=loss_fn)
    return Contender(modules, lambda x, y: pipeline.step(x, target=y), pipeline)


def torchs(name: str, case: Case) -> Contender:
    """torch.distributed.pipelining."""
    kind, placement = TORCHS[name]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numbers = {"one": [rank], "loop": [rank, rank + ranks], "v": [rank, 2 * ranks - 1 - rank]}[placement]
    count = ranks * len(numbers)
    modules = [stages_of(case, count)[number] for number in numbers]
    stages = [
        pipelining.PipelineStage(module, number, count, torch.device("cpu"), group=dist.group.WORLD)
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = kind(stages[0] if placement == "one" else stages, case.microbatches, loss_fn=loss_fn)
    last = count - 1 in numbers

    def step(x: Tensor, y: Tensor) -> object:
        args = (x,) if 0 in numbers else ()
        return schedule.step(*args, target=y) if last else schedule.step(*args)

    return Contender(modules, step)


def timed(case: Case, name: str) -> tuple[float, ...]:
    """The numbers of a contender's `Turn`; plain ones, since no more is read back from another process."""
    kind, _, schedule = name.partition(" ")
    contender = torchs(schedule, case) if kind == "torch" else ours(schedule, case)
    ranks, rows = dist.get_world_size(), case.microbatches * case.rows
    x, y = torch.randn(rows, case.width), torch.randn(rows, case.width)
    for _ in range(WARM_UP):
        contender.train(x, y)
    contender.seconds.clear()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        contender.train(x, y)
    milliseconds = 1e3 * slowest(time.perf_counter() - start) / STEPS
    if contender.pipeline is None or ranks > (os.cpu_count() or 1):
        return (milliseconds,)
    return (milliseconds, *simulated(contender, contender.pipeline))


def simulated(contender: Contender, pipeline: Pipeline) -> tuple[float, float]:
    """Milliseconds of a step, from the medians of its actions in the last one, and the turn's optimizer.

    And those that the rank that waits longest waited beyond the simulation in that last one.
    """
    optimizer = slowest(statistics.median(contender.seconds))
    measured = pipeline.timeline()
    expected = simulate(pipeline.schedule, Costs.measured(measured))
    waits = [
        measured.makespan - measured.busy(rank) - (expected.makespan - expected.busy(rank))
        for rank in range(measured.ranks)
    ]
    return 1e3 * (expected.makespan + optimizer), 1e3 * max(waits)


def slowest(seconds: float) -> float:
    """The largest of all ranks; all-reduce of one number."""
    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


if __name__ == "__main__":
    main()
