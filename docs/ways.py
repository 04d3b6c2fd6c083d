"""Draws through which modules a call passes, measured on two ranks. `docs/figures.py` calls it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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

OURS = ("par_groups", "par_layers", "par_pipeline", "par_precision", "par_checkpoint", "par_zero", "par_train")

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
    "par_train": "#f7dcdc",
    "par_layers": "#f4f0c8",
}


def draw_ways(images: Path) -> dict[str, list[str]]:
    """A picture a way: `way-save.svg` and so on. Gives back the modules of each, for the text."""
    ways = measure()
    for name, modules in ways.items():
        draw_way(TITLES[name], modules, images / f"way-{name}.svg")
    return ways


def measure() -> dict[str, list[str]]:
    """The modules that the first rank of two passes through, by way."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder,), nprocs=2)
        ways: dict[str, list[str]] = torch.load(f"{folder}/ways.pt")
    return ways


def run_rank(rank: int, folder: str) -> None:
    """Takes all ways; rank 0 writes what it passed through."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    ways = dict([*files(folder), *zero_step(world), *pipeline_step(world), *strategy_step()])
    if rank == 0:
        torch.save(ways, f"{folder}/ways.pt")
    dist.barrier()
    dist.destroy_process_group()


def make_model() -> nn.Sequential:
    """A small model, alike on both ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


@contextmanager
def way(name: str, ways: dict[str, list[str]]) -> Iterator[None]:
    """Notes the modules that are called meanwhile."""
    with modules_called(*OURS) as modules:
        yield
    ways[name] = modules


def files(folder: str) -> Iterator[tuple[str, list[str]]]:
    """A save and a load."""
    ways: dict[str, list[str]] = {}
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 8)).backward()
    optimizer.step()
    with way("save", ways):
        save(f"{folder}/checkpoint", model=model, optimizer=optimizer)
    with way("load", ways):
        load(f"{folder}/checkpoint", model=model, optimizer=optimizer)
    yield from ways.items()


def zero_step(world: dist.ProcessGroup) -> Iterator[tuple[str, list[str]]]:
    """The second step at stage 2; the first one makes what later ones use."""
    ways: dict[str, list[str]] = {}
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, stage=2, group=world)
    for _ in range(2):
        with way("zero-step", ways):
            mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    yield from ways.items()


def pipeline_step(world: dist.ProcessGroup) -> Iterator[tuple[str, list[str]]]:
    """The second step of a pipeline of two stages."""
    ways: dict[str, list[str]] = {}
    stage = make_model()
    pipeline = Pipeline(stage, one_f_one_b(2, 4), world, loss_fn=mse_loss)
    for _ in range(2):
        with way("pipeline-step", ways):
            inputs = (torch.ones(8, 8),) if world.rank() == 0 else ()
            pipeline.step(*inputs, target=torch.zeros(8, 8) if world.rank() == 1 else None)
    yield from ways.items()


def strategy_step() -> Iterator[tuple[str, list[str]]]:
    """The second step of a Strategy, the batch's way out of the loader included."""
    ways: dict[str, list[str]] = {}
    with Strategy(precision="bf16", zero=1, clip_norm=1.0, device="cpu") as strategy:
        model: nn.Module = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.ones(8, 8), torch.zeros(8, 8)), batch_size=4)
        model, optimizer, loader = strategy.initialize(model, optimizer, loader)
        batches = iter(loader)
        for _ in range(2):
            with way("strategy-step", ways):
                inputs, targets = next(batches)
                strategy.backward(mse_loss(model(inputs).float(), targets), optimizer)
                optimizer.step()
                optimizer.zero_grad()
    yield from ways.items()


def draw_way(title: str, modules: list[str], path: Path) -> None:
    """Modules from left to right and top to bottom, in the order in which they are met."""
    columns, wide, high = 3, 2.75, 0.42
    rows = -(-len(modules) // columns)
    figure = Figure(figsize=(columns * wide + 0.2, rows * high + 0.55))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, columns * wide + 0.2)
    axes.set_ylim(0, rows * high + 0.55)
    axes.set_axis_off()
    count = f"{len(modules)} modules"
    axes.text(0.15, rows * high + 0.33, f"{title}: {count}", weight="bold", fontsize=10, va="center")
    for number, module in enumerate(modules):
        x, y = 0.15 + number % columns * wide, (rows - 1 - number // columns) * high + 0.1
        package, _, inner = module.partition(".")
        axes.add_patch(
            mpl.patches.FancyBboxPatch(
                (x, y),
                wide - 0.2,
                high - 0.14,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=COLOURS[package],
                edgecolor="#777777",
                linewidth=0.8,
            )
        )
        name = f"{number + 1}  {package.removeprefix('par_')}/{inner.replace('.', '/')}"
        axes.text(x + 0.07, y + (high - 0.14) / 2, name, va="center", fontsize=7.5, family="monospace")
    figure.savefig(path)
