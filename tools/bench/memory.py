"""A step of a small GPT at several budgets of its device: what is away, what is computed again, and how long it takes.

One process on a CPU, whose state may lie on a disk. Budgets take turns. Run as `tools/bench/memory.py [rounds]`; it
writes docs/benchmarks/memory.md and .json, and needs a folder on a disk, by default the current one; `OFFLOAD_PATH`
names another.
"""

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from _table import write
from _turns import shuffled
from torch import Tensor

from par_plan import TooSmallError
from par_recompute import saved
from par_train import Strategy
from par_train.jobs.byte_gpt import fill_, make_gpt
from par_train.jobs.options import ModelOptions
from par_zero import disk_usage

SIZES = ModelOptions(layers=6, width=192, heads=4, context=128)
ROWS = 12
PARTS = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0)


@dataclass
class Run:
    """A model under a budget, and its batch."""

    strategy: Strategy
    model: Any
    optimizer: Any

    def step(self, text: Tensor) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        inputs, targets = text[:, :-1], text[:, 1:]
        loss = self.strategy.layers.cross_entropy(self.model(inputs), targets, classes=256)

        self.strategy.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def begin(memory: dict[str, Any]) -> Run:
    """A model that is ready for its first step."""
    strategy = Strategy(memory=memory, device="cpu")
    torch.manual_seed(0)
    model = fill_(make_gpt(SIZES, strategy.layers), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = strategy.initialize(model, optimizer)
    return Run(strategy, model, optimizer)


def main(rounds: int = 5) -> None:
    """Finds the most and the least, and measures budgets between them."""
    text = torch.randint(256, (ROWS, SIZES.context + 1), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory(dir=os.environ.get("OFFLOAD_PATH", ".")) as folder, ExitStack() as open_until_end:
        room = {"disk": "1GB", "path": folder}
        all_of_it = begin({"device": 2**40, **room})
        for _ in range(2):
            all_of_it.step(text)
        spent = all_of_it.strategy.spent
        assert spent is not None
        most = spent.state + sum(line.predicted or 0 for line in saved(all_of_it.model).lines)
        try:
            tight = begin({"device": spent.state - spent.recalled + 1, **room})
            tight.step(text)
            least: float = tight.strategy.spent.state  # type: ignore[union-attr]
        except TooSmallError as error:
            least = spent.state - spent.recalled + 1 + error.missing
        runs: dict[int, Run] = {}
        for part in PARTS:
            device = int(least + part * (most - least)) + 2**12
            runs[device] = begin({"device": device, **room})
            open_until_end.callback(runs[device].strategy.close)
        times: dict[int, list[float]] = {device: [] for device in runs}
        for turn in range(rounds + 2):
            for device in shuffled(list(runs), turn):
                seconds = runs[device].step(text)
                if turn > 1:  # the first is safe, and the second plans
                    times[device].append(seconds)
        fastest = median(times[max(times)])
        rows = [row(device, runs[device], times[device], fastest) for device in runs]
    note = (
        f"A training step of a GPT with {SIZES.layers} layers of width {SIZES.width} and {ROWS} sequences of "
        f"{SIZES.context} bytes, AdamW in fp32, in one process on a CPU. Each row has a smaller device budget, from "
        "the memory of the unrestricted step down to the minimum. The offload tier is a disk. `away` is the fraction "
        "of the optimizer state that each step reads from the disk and writes back. `kept` counts the activations "
        f"that layers saved in the latest step; backward recomputes the rest. Times are medians of {rounds} rounds, "
        "and each round runs all budgets."
    )
    write("memory", "A training step within a memory budget", rows, note)


def row(device: float, run: Run, times: list[float], fastest: float) -> dict[str, object]:
    """A line of the table."""
    spent = run.strategy.spent
    assert spent is not None
    there = sum(disk_usage(run.model).pieces)
    state = sum(value.nbytes for one in run.optimizer.state.values() for value in one.values() if value.numel() > 1)
    report = saved(run.model)
    whole = sum("" in line.dropped for line in report.lines)
    parts = sum(bool(line.dropped) and "" not in line.dropped for line in report.lines)
    return {
        "device (MB)": f"{device / 1e6:.1f}",
        "away": f"{there / state:.0%}",
        "kept (MB)": f"{(report.counted or 0) / 1e6:.1f}",
        "layers again": whole,
        "in parts": parts,
        "seconds a step": f"{median(times):.3f}",
        "by everything there": f"{median(times) / fastest:.2f}",
    }


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
