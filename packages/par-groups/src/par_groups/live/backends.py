"""What the backend of a group can do, which differs between kinds of device."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

Collective = Literal["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]

_COMPLETE = ("gloo", "nccl", "xccl", "fake")
"""Backends of torch that can do all of them."""

_METHODS: dict[Collective, tuple[str, ...]] = {
    "all_reduce": ("allreduce",),
    "broadcast": ("broadcast",),
    "all_gather": ("all_gather_single", "_allgather_base"),
    "reduce_scatter": ("reduce_scatter_single", "_reduce_scatter_base"),
    "all_to_all": ("all_to_all_single", "alltoall_base"),
}
"""What torch calls on a process group for each of them, since 2.13 and before."""


def backend_of(group: dist.ProcessGroup | None, kind: str) -> str | None:
    """The backend that a group has for a kind of device.

    Args:
        group: The group; None stands for the world.
        kind: The kind of device, such as "cpu" or "cuda".

    Returns:
        A name such as "gloo" or "nccl"; None if the group cannot send tensors of such a device, as NCCL on the CPU.
    """
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return next((backend for device, _, backend in pairs if device == kind), None)


def check_collectives(
    group: dist.ProcessGroup, device: torch.device, collectives: Sequence[Collective], what: str
) -> None:
    """Raises unless a group can do what it will be asked for, before a step stops half-way. Collective over the group.

    Nothing is sent where that is known: torch's own backends can do all of it, and so can a process group in Python
    that has all the methods. Another one tries each collective, with a number for each rank.

    Args:
        group: The group.
        device: Where the tensors lie.
        collectives: What is needed.
        what: Who needs it, such as "stage 2".

    Raises:
        ValueError: The group cannot do one of them; on every rank, as all have the same backend.
    """
    name = backend_of(group, device.type)
    if name is None:
        raise ValueError(
            f"{what} has tensors on {str(device)!r}, but the backend of ranks {dist.get_process_group_ranks(group)} is "
            f"{str(dist.get_backend_config(group))!r}, which sends none of them; pass a group of another backend"
        )
    if name in _COMPLETE or dist.get_world_size(group) == 1:
        return
    for collective in collectives:
        if _has_method(group, collective):
            continue
        try:
            _TRIALS[collective](group, device)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"{what} needs {collective}, which the backend {name!r} of ranks {dist.get_process_group_ranks(group)} "
                f"cannot do ({str(error).splitlines()[0]}); pass a group of another backend, such as 'gloo' or 'nccl'"
            ) from error


def _has_method(group: dist.ProcessGroup, collective: Collective) -> bool:
    """Whether the class of a process group in Python says itself how a collective is done."""
    own, base = type(group), dist.ProcessGroup
    return any(getattr(own, name, None) is not getattr(base, name, None) for name in _METHODS[collective])


def _numbers(group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    return torch.zeros(dist.get_world_size(group), device=device)


def _try_reduce_scatter(group: dist.ProcessGroup, device: torch.device) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13
    scatter(torch.zeros(1, device=device), _numbers(group, device), group=group)


def _try_all_gather(group: dist.ProcessGroup, device: torch.device) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(_numbers(group, device), torch.zeros(1, device=device), group=group)


_TRIALS: dict[Collective, Callable[[dist.ProcessGroup, torch.device], object]] = {
    "all_reduce": lambda group, device: dist.all_reduce(_numbers(group, device), group=group),
    "broadcast": lambda group, device: dist.broadcast(_numbers(group, device), group=group, group_src=0),
    "all_gather": _try_all_gather,
    "reduce_scatter": _try_reduce_scatter,
    "all_to_all": lambda group, device: dist.all_to_all_single(
        _numbers(group, device), _numbers(group, device), group=group
    ),
}


def sendable(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The tensor as a group can send it from rank to rank: itself, or a copy on the CPU.

    gloo takes tensors of a GPU in its collectives, but its sends and receives are of the CPU alone. Receive into a
    tensor that is like the returned one, and bring that back with `.to(tensor.device)`.

    Args:
        tensor: What will be sent.
        group: The group whose `isend` or `batch_isend_irecv` sends it; None stands for the world.
    """
    if not tensor.is_cpu and backend_of(group, tensor.device.type) == "gloo":
        return tensor.cpu()
    return tensor
