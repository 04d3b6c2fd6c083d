"""Measuring on gloo ranks of this machine, one thread each."""

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def spawned(ranks: int, measure: Callable[..., Any], *arguments: object, start_method: str = "spawn") -> Any:
    """Measures something on ranks started for it, and gives back what the first of them measured.

    Args:
        ranks: Number of ranks.
        measure: The function that every rank calls.
        arguments: Its arguments.
        start_method: How multiprocessing starts the ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        arguments = (ranks, folder, result, measure, arguments)
        start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
        start(run, arguments, nprocs=ranks, start_method=start_method)
        return torch.load(result)


def run(
    rank: int, ranks: int, folder: str, result: Path, measure: Callable[..., Any], arguments: Sequence[object]
) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    measured = measure(*arguments)
    if rank == 0:
        torch.save(measured, result)
    dist.barrier()
    dist.destroy_process_group()


def world() -> dist.ProcessGroup:
    """All ranks."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised")
    return group
