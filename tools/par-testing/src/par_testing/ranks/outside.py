"""Strict ranks for a program that is not a test, such as a benchmark in virtual time."""

import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ..strict.options import Strict
from ..strict.referee import Referee
from .rank import strict_backend

_TIMEOUT = timedelta(minutes=10)


def on_strict_ranks(
    processes: int, measure: Callable[..., Any], *arguments: object, strict: Strict, start_method: str = "spawn"
) -> list[Any]:
    """Start strict ranks, call a function on each of their processes, and return its results.

    Args:
        processes: Number of processes. Each process stands for `strict.alike` ranks that do identical work.
        measure: Function to call. The processes must be able to import it.
        arguments: Arguments of the function; they must be picklable.
        strict: Rules of NCCL to enforce, and the virtual clock.
        start_method: Start method of multiprocessing. Default: "spawn".

    Returns:
        Results of the function, one per process.

    Raises:
        torch.multiprocessing.ProcessRaisedException: The function raised in a process. All other processes are killed.
    """
    with Referee(processes, strict) as referee, tempfile.TemporaryDirectory(prefix="par-testing-") as name:
        place = _Place(processes=processes, folder=Path(name), referee=referee.folder, strict=strict)
        start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
        start(_run, (place, measure, arguments), nprocs=processes, start_method=start_method)
        return [pickle.loads(place.result_of(rank).read_bytes()) for rank in range(processes)]  # noqa: S301 - as written below


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What all processes know.

    Args:
        processes: How many there are.
        folder: Where they meet, and leave what they found.
        referee: The folder of the referee.
        strict: What is enforced.
    """

    processes: int
    folder: Path
    referee: Path
    strict: Strict

    def result_of(self, rank: int) -> Path:
        """The file of what a process found."""
        return self.folder / f"result-{rank}"


def _run(rank: int, place: _Place, measure: Callable[..., Any], arguments: Sequence[object]) -> None:
    """The life of one process."""
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    processes, alike = place.processes, place.strict.alike
    store = FileStore(str(place.folder / "store"), processes)
    with strict_backend(place.referee, rank, place.strict):
        dist.init_process_group(
            "strict", store=store, rank=rank * alike, world_size=processes * alike, timeout=_TIMEOUT
        )
        place.result_of(rank).write_bytes(pickle.dumps(measure(*arguments)))
        store.add("par_testing/done", 1)
        while store.add("par_testing/done", 0) < processes:  # one that leaves closes what others may still use
            time.sleep(0.01)
        dist.destroy_process_group()
