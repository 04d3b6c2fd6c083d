"""Draws which rank loads which sample while a job resumes on other numbers of ranks. `docs/figures.py` calls it."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.utils.data import DataLoader, TensorDataset

from par_data import ShardedDataLoader

BATCH, RUNS = 6, (2, 1, 3)
"""Samples of a global batch, and the numbers of ranks of three runs of two steps each."""

COLORS = ("#1f5fa8", "#e0a030", "#5a9b6a")


def draw_shards(path: Path) -> None:
    """A row of cells for each run, each cell a sample in the order of consumption."""
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.add_subplot()
    position: dict[str, int] = {"samples": 0}
    for row, ranks in enumerate(RUNS):
        plain = DataLoader(TensorDataset(torch.arange(100)), batch_size=BATCH, shuffle=True)
        loaders = [ShardedDataLoader(plain, rank=rank, num_replicas=ranks, seed=0) for rank in range(ranks)]
        for rank, loader in enumerate(loaders):
            loader.load_state_dict(position)
            for step, (samples,) in zip(range(2), loader, strict=False):
                first = position["samples"] + step * BATCH + rank * len(samples)
                for place, sample in enumerate(samples.tolist(), first):
                    axes.add_patch(Rectangle((place, -row), 0.94, 0.8, facecolor=COLORS[rank]))
                    axes.text(place + 0.47, 0.4 - row, str(sample), ha="center", va="center", color="w", fontsize=8)
        axes.text(-0.4, 0.4 - row, f"{ranks} rank{'s' if ranks > 1 else ''}", ha="right", va="center")
        position = loaders[0].state_dict()
    for rank, color in enumerate(COLORS):
        axes.add_patch(Rectangle((0, 0), 0, 0, facecolor=color, label=f"rank {rank}"))
    axes.set_xlim(-4, 2 * BATCH * len(RUNS))
    axes.set_ylim(0.1 - len(RUNS), 1.0)
    axes.set_yticks([])
    axes.set_xticks(range(0, 2 * BATCH * len(RUNS) + 1, BATCH))
    axes.set_xlabel("samples consumed by all ranks; a tick is a step")
    axes.legend(frameon=False, loc="lower left", fontsize=8, bbox_to_anchor=(0.1, -0.05))
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.savefig(path)
