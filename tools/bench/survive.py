"""What it costs to be ready to lose a rank, and how long a loss takes.

Each case is a job under a keeper. The first jobs alternate two kinds of steps on the same objects: those of
`Survivors`, and plain steps of its `Strategy`, without `ready`, without copies of buffers and without copies of shards.
Few rows make a step that is all communication. A step of ZeRO 1 to 3 sends 1 / N of the elements to a neighbour, where
the reduction and the gather of N ranks send 2 (N - 1) / N: its bytes are 1 + 1 / (2 (N - 1)) of those of a plain step.
The other jobs kill a rank in one step and measure the seconds from the kill to the end of the next step on another
rank.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _table import Section, write_sections
from _turns import quartile, ratio
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from par_checkpoint import Shadow
from par_train import Strategy, Survivors, TrainState

RANKS, WIDTH, DEPTH, TURNS, KILLS, STEPS = 4, 1024, 8, 41, 8, 30
STAGES = (0, 1)
FEW, MANY = 64, 2048  # rows of a batch
PARTS = ("gradients", "ready", "copy's step")


def main() -> None:
    """Measure both and write the page."""
    costs = []
    for zero, rows in ((0, FEW), (0, MANY), (1, FEW), (1, MANY)):
        times = run({"kill": None, "zero": zero, "rows": rows})[0]
        plain, ready = times["plain"], times["with"]
        costs.append(
            {
                "step": f"with Survivors, ZeRO {zero}",
                "rows of a batch": rows,
                "median ms": f"{1e3 * statistics.median(ready):.1f}",
                "quartiles": f"{1e3 * quartile(ready, 1):.1f} to {1e3 * quartile(ready, 3):.1f}",
                "time relative to a plain step (lower is better)": f"{ratio(ready, plain):.3f}",
                "bytes relative to a plain step, by the formula": f"{1 + bool(zero) / (2 * (RANKS - 1)):.3f}",
                **{f"{name}, ms": f"{1e3 * statistics.median(times[name] or [0]):.1f}" for name in PARTS},
            }
        )
    drawn = random.Random(0)
    seconds = []
    for number in range(KILLS):
        kill = [drawn.randrange(RANKS), drawn.randrange(5, STEPS - 5), drawn.choice(["forward", "reduced", "passed"])]
        found = run({"kill": kill, "zero": STAGES[number % len(STAGES)], "rows": FEW})
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
                f"{RANKS} gloo ranks train {elements / 1e6:.1f} M fp32 parameters with AdamW. {TURNS} turns have a "
                "step of each kind, from a barrier to a barrier. A ratio is the median over the turns. The last "
                "columns are parts of a step with Survivors on one rank: gradients to the neighbour, `ready` with the "
                "wait for other ranks, and the copy's step."
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
    rows = Mortal.rows
    drawn = torch.randn(4 * rows, WIDTH)
    loader = DataLoader(TensorDataset(drawn, drawn), batch_size=rows, drop_last=True)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), loader=loader)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of the rows of a rank."""
    return functional.mse_loss(model(batch[0]), batch[1])


class Mortal(Survivors):
    """Survivors of which one kills itself."""

    kill: list[object] | None = None
    folder = ""
    rows = FEW

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


def between_barriers(act: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks begin together, until all of them have ended it."""
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begin


def timed(act: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that also adds the seconds of each call to a list."""

    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        outcome = act(*args)
        seconds.append(time.perf_counter() - begin)
        return outcome

    return call


def train() -> None:
    """Train on a rank, and write what it has measured."""
    given = json.loads(sys.argv[1])
    Mortal.kill, Mortal.folder, Mortal.rows = given["kill"], given["folder"], given["rows"]
    times: dict[str, list[float]] = {"plain": [], "with": [], **{name: [] for name in PARTS}}
    places = ((Shadow, "exchange_gradients"), (Mortal, "_agree"), (Shadow, "step"))
    for (holder, method), part in zip(places, PARTS, strict=True):
        setattr(holder, method, timed(getattr(holder, method), times[part]))
    ended: float | None = None  # when the first step after the loss ended
    with Mortal(build, timeout=120, zero=given["zero"]) as survivors:
        for step in survivors.steps(STEPS if given["kill"] else TURNS + 3):
            if given["kill"]:
                step.run(loss_of)
            else:
                acts: dict[str, Callable[[], object]]
                acts = {"with": partial(step.run, loss_of), "plain": survivors.plain_step}
                for kind in sorted(acts, reverse=bool(step.number % 2)):
                    seconds = between_barriers(acts[kind])
                    if step.number >= 3:  # the first steps allocate memory
                        times[kind].append(seconds)
            if len(survivors.ranks) < RANKS and ended is None:
                ended = time.time()
        name = Path(given["folder"], str(survivors.number))
    name.write_text(json.dumps(times if not given["kill"] else {"ended": ended}))
    os._exit(0)


if __name__ == "__main__":
    train() if "PAR_KEEPER_LINE" in os.environ else main()
