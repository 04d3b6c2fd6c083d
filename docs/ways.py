"""Draws through which modules a call and its tensor go, measured on two ranks. `docs/figures.py` calls it."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from par_checkpoint import load, save
from par_pipeline import Pipeline, one_f_one_b
from par_testing import modules_called
from par_train import Strategy
from par_zero import shard

OURS = (
    "par_groups",
    "par_layers",
    "par_pipeline",
    "par_precision",
    "par_checkpoint",
    "par_zero",
    "par_data",
    "par_train",
)

TITLES = {
    "save": "par_checkpoint.save: a model and its optimizer, two ranks",
    "load": "par_checkpoint.load: the same, back",
    "zero-step": "A ZeRO step: forward, backward and optimizer step at stage 2",
    "pipeline-step": "A pipeline step: 1F1B, four microbatches",
    "strategy-step": "A Strategy step: bf16, ZeRO 1, clipped",
}

COLOURS = {
    "par_groups": "#eeeeee",
    "par_pipeline": "#fde3c8",
    "par_precision": "#e4dcf2",
    "par_checkpoint": "#dce9f7",
    "par_zero": "#d8efdc",
    "par_data": "#d6eef0",
    "par_train": "#f7dcdc",
    "par_layers": "#f4f0c8",
}


Ways = dict[str, tuple[list[str], list[str]]]
"""By name of a way: the modules whose functions are called, and those whose functions are handed one of its tensors."""


def draw_ways(images: Path) -> None:
    """A picture a way: `way-save.svg` and so on."""
    for name, (called, handed) in measure().items():
        draw_way(TITLES[name], called, handed, images / f"way-{name}.svg")


def measure() -> Ways:
    """The modules that the first rank of two passes through, by way."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder,), nprocs=2)
        ways: Ways = torch.load(f"{folder}/ways.pt")
    return ways


def run_rank(rank: int, folder: str) -> None:
    """Takes all ways; rank 0 writes what it passed through."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    ways = {**files(folder), "zero-step": zero_step(world), "pipeline-step": pipeline_step(world)}
    ways["strategy-step"] = strategy_step()
    if rank == 0:
        torch.save(ways, f"{folder}/ways.pt")
    dist.barrier()
    dist.destroy_process_group()


def make_model() -> nn.Sequential:
    """A small model, alike on both ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def take(act: Callable[[], object], tensor: torch.Tensor | None = None) -> tuple[list[str], list[str]]:
    """Takes a way: which modules are called and, on a second turn, which of them are handed this tensor or its bytes.

    Without a tensor all that are called count: a step makes and drops tensors on its way.
    """
    with modules_called(*OURS) as called:
        act()
    if tensor is None:
        return called, called
    with modules_called(*OURS, handed=tensor) as handed:
        act()
    return called, handed


def files(folder: str) -> Ways:
    """A save and a load; the tensor is a weight."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 8)).backward()
    optimizer.step()
    weight = next(model.parameters())
    return {
        "save": take(lambda: save(f"{folder}/weights", model=model, optimizer=optimizer, overwrite=True), weight),
        "load": take(lambda: load(f"{folder}/weights", model=model, optimizer=optimizer), weight),
    }


def zero_step(world: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """A step at stage 2, after a first one that makes what later ones use."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, stage=2, group=world)

    def step() -> None:
        mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return take(step)


def pipeline_step(world: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """A step of two stages, after a first one."""
    pipeline = Pipeline(make_model(), one_f_one_b(2, 4), world, loss_fn=mse_loss)
    inputs = (torch.ones(8, 8),) if world.rank() == 0 else ()
    target = torch.zeros(8, 8) if world.rank() == 1 else None
    pipeline.step(*inputs, target=target)
    return take(lambda: pipeline.step(*inputs, target=target))


def strategy_step() -> tuple[list[str], list[str]]:
    """A step of a Strategy, after a first one, the batch's way out of the loader included."""
    with Strategy(precision="bf16", zero=1, clip_norm=1.0, device="cpu") as strategy:
        model: nn.Module = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.ones(16, 8), torch.zeros(16, 8)), batch_size=4)
        model, optimizer, loader = strategy.initialize(model, optimizer, loader)
        batches = iter(loader)

        def step() -> None:
            inputs, targets = next(batches)
            strategy.backward(mse_loss(model(inputs).float(), targets), optimizer)
            optimizer.step()
            optimizer.zero_grad()

        step()
        return take(step)


def draw_way(title: str, called: list[str], handed: list[str], path: Path) -> None:
    """Modules from left to right and top to bottom, in the order in which they are met.

    Those that the tensor passes through have a number and the colour of their package; the others are grey.
    """
    columns, wide, high = 3, 2.75, 0.36
    rows = -(-len(called) // columns)
    figure = Figure(figsize=(columns * wide + 0.2, rows * high + 0.75))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, columns * wide + 0.2)
    axes.set_ylim(0, rows * high + 0.75)
    axes.set_axis_off()
    passed = [module for module in called if module in handed]
    summary = f"{len(called)} modules"
    if len(passed) < len(called):
        summary = f"a weight passes through {len(passed)} modules; {len(called)} have a part in it"
    axes.text(0.15, rows * high + 0.55, title, weight="bold", fontsize=10, va="center")
    axes.text(0.15, rows * high + 0.3, summary, fontsize=8.5, va="center")
    for place, module in enumerate(called):
        x, y = 0.15 + place % columns * wide, (rows - 1 - place // columns) * high + 0.1
        package, _, inner = module.partition(".")
        passes = module in passed
        axes.add_patch(
            mpl.patches.FancyBboxPatch(
                (x, y),
                wide - 0.2,
                high - 0.1,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=COLOURS[package] if passes else "white",
                edgecolor="#555555" if passes else "#cccccc",
                linewidth=0.8,
            )
        )
        number = f"{passed.index(module) + 1:2}" if passes else "  "
        name = f"{number} {package.removeprefix('par_')}/{inner.replace('.', '/')}"
        axes.text(
            x + 0.07,
            y + (high - 0.1) / 2,
            name,
            va="center",
            fontsize=7.5,
            family="monospace",
            color="black" if passes else "#777777",
        )
    figure.savefig(path)
