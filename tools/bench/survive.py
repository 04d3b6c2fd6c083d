"""What it costs to be ready to lose a rank, and how long a loss takes.

Each case is a job under a keeper. The first jobs, one for each ZeRO stage, alternate two kinds of steps on the same
objects: those of `Survivors`, and plain steps of its `Strategy`, without `ready`, without copies of buffers and without
copies of shards. The other jobs kill a rank in one step and measure the seconds from the kill to the end of the next
step on another rank.
Run as `python tools/bench/survive.py`; writes docs/benchmarks/survive.md and .json.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _table import Section, write_sections
from _turns import quartile, ratio
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from par_train import Strategy, Survivors, TrainState

RANKS, WIDTH, DEPTH, ROWS, TURNS, KILLS, STEPS = 4, 1024, 8, 64, 41, 8, 30
STAGES = (0, 1)


def main() -> None:
    """Measure both and write the page."""
    costs = []
    for zero in STAGES:
        times = run({"kill": None, "zero": zero})[0]
        plain, ready = times["plain"], times["ready"]
        costs.append(
            {
                "step": f"with Survivors, ZeRO {zero}",
                "median ms": f"{1e3 * statistics.median(ready):.1f}",
                "quartiles": f"{1e3 * quartile(ready, 1):.1f} to {1e3 * quartile(ready, 3):.1f}",
                "time relative to a plain step (lower is better)": f"{ratio(ready, plain):.3f}",
            }
        )
    drawn = random.Random(0)
    seconds = []
    for number in range(KILLS):
        kill = [drawn.randrange(RANKS), drawn.randrange(5, STEPS - 5), drawn.choice(["forward", "reduced", "passed"])]
        found = run({"kill": kill, "zero": STAGES[number % len(STAGES)]})
        killed = next(each["killed"] for each in found if "killed" in each)
        seconds.append(min(each["ended"] for each in found if "ended" in each) - killed)
    losses = {
        "kills": KILLS,
        "median seconds": f"{statistics.median(seconds):.2f}",
        "largest": f"{max(seconds):.2f}",
    }
    elements = DEPTH * WIDTH * (WIDTH + 1)
    sections = [
        Section(
            title="A step without a loss",
            note=(
                f"{RANKS} gloo ranks train {elements / 1e6:.1f} M fp32 parameters with AdamW, {ROWS} rows in a "
                f"batch. {TURNS} turns have a step of each kind. The ratio is the median over the turns."
            ),
            rows=costs,
        ),
        Section(
            title="From a kill to the end of the next step",
            note=(
                "One rank kills itself at a drawn step and phase, and the other three ranks continue. The kills "
                "alternate between the stages."
            ),
            rows=[losses],
        ),
    ]
    write_sections("survive", "Survival of a lost rank", sections)


def run(given: dict[str, object]) -> list[dict[str, Any]]:
    """Run a job and return what its ranks wrote."""
    with tempfile.TemporaryDirectory() as folder:
        keep = [sys.executable, "-m", "par_groups.elastic", "--ranks", str(RANKS), "--", sys.executable, __file__]
        command = [*keep, json.dumps({**given, "folder": folder})]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def build(_: Strategy) -> TrainState:
    """Make the objects of an epoch."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    drawn = torch.randn(4 * ROWS, WIDTH)
    loader = DataLoader(TensorDataset(drawn, drawn), batch_size=ROWS, drop_last=True)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), loader=loader)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of the rows of a rank."""
    return functional.mse_loss(model(batch[0]), batch[1])


class Mortal(Survivors):
    """Survivors of which one kills itself."""

    kill: list[object] | None = None
    folder = ""

    def _at(self, phase: str) -> None:
        super()._at(phase)
        if [self.number, int(self._told.steps), phase] == self.kill:
            Path(self.folder, "killed").write_text(json.dumps({"killed": time.time()}))
            os.kill(os.getpid(), 9)

    def plain_step(self) -> None:
        """Do a step that no loss of a rank may disturb."""
        state, strategy = self.state, self.strategy
        assert state is not None and strategy is not None  # noqa: PT018 - set by the first epoch
        batch = next(iter(state.loader))
        rows = len(batch[0])
        self._before_update = lambda number: None  # type: ignore[method-assign]  # noqa: ARG005 - named as the method's
        try:
            strategy.backward(loss_of(state.model, batch), state.optimizer, weight=rows)
            state.optimizer.step()
        finally:
            del self._before_update
        state.optimizer.zero_grad()


def train() -> None:
    """Train on a rank, and write what it has measured."""
    given = json.loads(sys.argv[1])
    Mortal.kill, Mortal.folder = given["kill"], given["folder"]
    times: dict[str, list[float]] = {"plain": [], "ready": []}
    ended: float | None = None  # when the first step after the loss ended
    with Mortal(build, timeout=120, zero=given["zero"]) as survivors:
        for step in survivors.steps(STEPS if given["kill"] else TURNS + 3):
            begin = time.perf_counter()
            step.run(loss_of)
            middle = time.perf_counter()
            if not given["kill"]:
                survivors.plain_step()
                if step.number >= 3:  # the first steps allocate memory
                    times["ready"].append(middle - begin)
                    times["plain"].append(time.perf_counter() - middle)
            if len(survivors.ranks) < RANKS and ended is None:
                ended = time.time()
        name = Path(given["folder"], str(survivors.number))
    name.write_text(json.dumps(times if not given["kill"] else {"ended": ended}))
    os._exit(0)


if __name__ == "__main__":
    train() if "PAR_KEEPER_LINE" in os.environ else main()
