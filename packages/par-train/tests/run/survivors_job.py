"""A training job of a rank under a keeper, in which ranks kill themselves; `test_survive` starts it.

The argument is JSON: "kills" has lists of number, step and phase; "steps" and "zero" are those of the run;
"back" has a step before which the run is saved, and one before which this checkpoint is loaded.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from par_checkpoint import load, save
from par_train import Survivors, TrainState
from par_zero import summon


class Counted(nn.Linear):
    """A layer whose buffer counts its calls, as BatchNorm does."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, given):
        self.calls += 1
        return super().forward(given)


def objects(dtype=torch.float64):
    """The objects of the run, the same in each process and epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(Counted(8, 13), nn.Tanh(), nn.Linear(13, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = torch.randn(50, 11, generator=torch.Generator().manual_seed(1), dtype=dtype)
    loader = DataLoader(TensorDataset(drawn[:, :8], drawn[:, 8:]), batch_size=12, shuffle=True, drop_last=True)
    return model, optimizer, loader, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)


def build(strategy):
    # Canonical numerics take fp32 weights.
    dtype = torch.float64 if strategy.options.lanes is None else torch.float32
    model, optimizer, loader, scheduler = objects(dtype)
    return TrainState(model=model, optimizer=optimizer, loader=loader, schedulers=[scheduler])


def loss_of(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


class Mortal(Survivors):
    """Survivors that kill themselves at the phases of a step that the job lists."""

    kills: tuple = ()

    def _at(self, phase):
        super()._at(phase)
        if (self.number, int(self._told.steps), phase) in self.kills:
            os.kill(os.getpid(), 9)


def main():
    given = json.loads(sys.argv[1])
    Mortal.kills = tuple(map(tuple, given.get("kills", ())))
    with Mortal(build, timeout=60, zero=given.get("zero", 0), **given.get("options", {})) as survivors:
        saved, back = given.get("back", (None, None))
        for step in survivors.steps(given["steps"]):
            parts = {"model": survivors.state.model, "optimizer": survivors.state.optimizer}
            if step.number == saved:
                save(f"{given['lines']}.checkpoint", **parts)
            if step.number == back:
                load(f"{given['lines']}.checkpoint", **parts)
            loss = step.run(loss_of)
            ranks = survivors.ranks
            told = {"number": survivors.number, "step": step.number, "loss": loss, "ranks": ranks, "time": time.time()}
            with Path(given["lines"]).open("a") as lines:
                lines.write(json.dumps(told) + "\n")
            time.sleep(given.get("pause", 0))
        if survivors.state is not None:
            # All ranks have arrived at the end, and stage 3 gathers the parameters from them.
            whole = summon(survivors.state.model) if given.get("zero", 0) else nullcontext()
            with whole:
                state = {name: tensor.clone() for name, tensor in survivors.state.model.state_dict().items()}
            torch.save(state, f"{given['lines']}.{survivors.number}")
    os._exit(0)  # the interpreter takes seconds to end on a busy machine


if __name__ == "__main__":
    main()
