"""`backend="strict"`, made known to torch in the process of a rank."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from .devices import DeviceOfRank
from .group import StrictGroup, device_types
from .options import Strict
from .player import Player, _players
from .step import refuse_in_step

_libraries: list[torch.library.Library] = []  # of this process; a library's kernels end with it


def register(folder: Path, rank: int, strict: Strict, device: DeviceOfRank | None = None) -> Player:
    """Makes `backend="strict"` known to torch, in the process of a rank.

    Args:
        folder: Of the referee.
        rank: The number of this process: its rank of the world, unless it stands for others, too.
        strict: What is enforced.
        device: Its device, if it has one.

    Returns:
        This rank's line to the referee.
    """
    player = Player(folder, rank * strict.alike, strict, device)
    _players[:] = [player]

    def make(options: Any, _: Any) -> StrictGroup:
        refuse_in_step("a new communicator")
        members = options.global_ranks_in_group or range(options.group_size)
        return StrictGroup(list(members), options.group_id, player)

    dist.Backend.register_backend("strict", make, extended_api=True, devices=device_types(device))
    _lead_to_python(device)
    return player


def _lead_to_python(device: DeviceOfRank | None) -> None:
    """Two functional operators call methods that C++ cannot override in Python (torch 2.11 to 2.13)."""

    def all_gather_out(given: Tensor, _: int, name: str, *, out: Tensor) -> Tensor:
        group = _resolve_process_group(name)  # type: ignore[arg-type]
        _register_work(out, group._allgather_base(out, given))
        return out

    def reduce_scatter_out(given: Tensor, op: str, _: int, name: str, *, out: Tensor) -> Tensor:
        group = _resolve_process_group(name)  # type: ignore[arg-type]
        options = dist.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        _register_work(out, group._reduce_scatter_base(out, given, options))
        return out

    for key in ("CPU",) if device is None else ("CPU", "PrivateUse1"):
        library = torch.library.Library("_c10d_functional", "IMPL", key)
        library.impl("all_gather_into_tensor_out", all_gather_out)
        library.impl("reduce_scatter_tensor_out", reduce_scatter_out)
        _libraries.append(library)
