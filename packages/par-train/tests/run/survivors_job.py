"""A training job of a rank under a keeper, in which ranks kill themselves; `test_survive` starts it.

The argument is JSON: "kills" has lists of number, step and phase; "steps" and "zero" are those of the run;
"back" has a step before which the run is saved, and one before which this checkpoint is loaded; "tiers" has folders to
which each step saves in the background; "norm" makes the run one with BatchNorm and an average of weights; "width" is
that of the layer in the middle; "blind" has lists of number and step, of ranks that do not see the end of `ready`;
"masked" is the number of a rank whose rows have no item; "leaves" is a number and a step at
which this rank ends with exit code 0.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from par_checkpoint import Tiers, Transfer, load, save
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


def objects(dtype=torch.float64, *, norm=False, width=13):
    """The objects of the run, the same in each process and epoch."""
    torch.manual_seed(0)
    # Tanh is in front, because a bias in front of BatchNorm has no gradient but rounding, which Adam scales up.
    middle = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(width)) if norm else nn.Tanh()
    model = nn.Sequential(Counted(8, width), middle, nn.Linear(width, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = torch.randn(50, 11, generator=torch.Generator().manual_seed(1), dtype=dtype)
    if norm:  # 36, 18 and 12 rows, of 1, 2 and 3 ranks, have the same mean and variance
        drawn = drawn[:6].repeat(12, 1)
    data = TensorDataset(drawn[:, :8], drawn[:, 8:])
    loader = DataLoader(data, batch_size=36 if norm else 12, shuffle=not norm, drop_last=True)
    return model, optimizer, loader, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)


def build(strategy):
    # Canonical numerics take fp32 weights.
    dtype = torch.float64 if strategy.options.lanes is None else torch.float32
    model, optimizer, loader, scheduler = objects(dtype, norm=Mortal.norm, width=Mortal.width)
    return TrainState(model=model, optimizer=optimizer, loader=loader, schedulers=[scheduler])


def loss_of(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def masked_loss_of(model, batch):
    """A loss of no item, as of rows whose tokens are all masked."""
    return 0 * loss_of(model, batch), 0


class Mortal(Survivors):
    """Survivors that kill themselves at the phases of a step that the job lists."""

    kills: tuple = ()
    leaves: list | None = None
    norm = False
    width = 13
    tries = 0

    def _at(self, phase):
        super()._at(phase)
        self.tries += phase == "forward"
        if (self.number, int(self._told.steps), phase) in self.kills:
            os.kill(os.getpid(), 9)
        if [self.number, int(self._told.steps)] == self.leaves:
            os._exit(0)

    def save(self, tiers):
        """Begin a save, and die within it or within its copy to the second tier, if that is this rank's end."""
        step = int(self._told.steps)
        state = {"model": self.state.model, "optimizer": self.state.optimizer}
        how = Transfer(timeout=30)
        begun = save(f"step-{step}", **state, tiers=Tiers(tiers), async_=True, transfer=how)
        self._at("saving")
        if any(number == self.number and step >= first for number, first, phase in self.kills if phase == "copying"):
            far = Path(tiers[1])
            # The copy in the second tier has another name until it is whole.
            while not list(far.glob(f"*step-{step}*")):
                time.sleep(0.0005)
            if not Path(far, f"step-{step}").exists():  # else the copy was faster, and the next step tries again
                os.kill(os.getpid(), 9)
        return begun


def outcome_of(saving):
    """Return how a save ended."""
    try:
        saving.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def averaged(average, model):
    """Update an average of weights that is no part of the model."""
    for name, tensor in model.named_parameters():
        average.setdefault(name, torch.zeros_like(tensor)).lerp_(tensor.detach(), 0.1)


def main():
    given = json.loads(sys.argv[1])
    Mortal.leaves = given.get("leaves")
    Mortal.kills, Mortal.norm = tuple(map(tuple, given.get("kills", ()))), given.get("norm", False)
    Mortal.width = given.get("width", Mortal.width)
    saves, average = {}, {}
    mortal = Mortal(build, timeout=60, zero=given.get("zero", 0), **given.get("options", {}))
    barrier = dist.barrier

    def connected():
        mortal._at("connected")  # the first barrier of an epoch shows that all ranks have connected
        barrier()

    dist.barrier = connected
    blind, all_reduce = given.get("blind", ()), dist.all_reduce

    def unseen(tensor, *rest, **options):
        work = all_reduce(tensor, *rest, **options)
        if tensor is mortal._sums and [mortal.number, int(mortal._told.steps)] in blind:
            raise RuntimeError("gloo/transport: Connection closed by peer")
        return work

    dist.all_reduce = unseen
    with mortal as survivors:
        saved, back = given.get("back", (None, None))
        for step in survivors.steps(given["steps"]):
            parts = {"model": survivors.state.model, "optimizer": survivors.state.optimizer}
            if step.number == saved:
                save(f"{given['lines']}.checkpoint", **parts)
            if step.number == back:
                load(f"{given['lines']}.checkpoint", **parts)
            if "tiers" in given:
                saves[step.number] = survivors.save(given["tiers"])
            survivors.tries = 0
            loss = step.run(masked_loss_of if survivors.number == given.get("masked") else loss_of)
            if survivors.state is not None and Mortal.norm:  # a spare would have only the steps since it joined
                averaged(average, survivors.state.model)
            ranks = survivors.ranks
            told = {"number": survivors.number, "step": step.number, "loss": loss, "ranks": ranks, "time": time.time()}
            told |= {"again": survivors.tries - 1, "pid": os.getpid()}
            with Path(given["lines"]).open("a") as lines:
                lines.write(json.dumps(told) + "\n")
            time.sleep(given.get("pause", 0))
        outcomes = {step: outcome_of(saving) for step, saving in saves.items()}
        Path(given["lines"]).with_name(f"saves.{survivors.number}").write_text(json.dumps(outcomes))
        if survivors.state is not None:
            # All ranks have arrived at the end, and stage 3 gathers the parameters from them.
            whole = summon(survivors.state.model) if given.get("zero", 0) else nullcontext()
            with whole:
                state = {name: tensor.clone() for name, tensor in survivors.state.model.state_dict().items()}
            state.update({f"average.{name}": tensor for name, tensor in average.items()})
            torch.save(state, f"{given['lines']}.{survivors.number}")
    os._exit(0)  # the interpreter takes seconds to end on a busy machine


if __name__ == "__main__":
    main()
