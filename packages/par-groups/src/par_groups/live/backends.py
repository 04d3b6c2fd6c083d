"""Capabilities of a group's backend, for each kind of device."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

Collective = Literal["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]

_COMPLETE = ("gloo", "nccl", "xccl", "fake")
"""Backends of torch that can do all of them."""

_CPU_BACKENDS = ("gloo", "mpi", "fake")
"""Backends that accept tensors of an accelerator and are not made for it."""

_METHODS: dict[Collective, tuple[str, ...]] = {
    "all_reduce": ("allreduce",),
    "broadcast": ("broadcast",),
    "all_gather": ("all_gather_single", "_allgather_base"),
    "reduce_scatter": ("reduce_scatter_single", "_reduce_scatter_base"),
    "all_to_all": ("all_to_all_single", "alltoall_base"),
}
"""What torch calls on a process group for each of them, since 2.13 and before."""


def backend_of(group: dist.ProcessGroup | None, kind: str) -> str | None:
    """Return the backend of a group for a kind of device.

    Args:
        group: Group; None is the world.
        kind: Kind of device, such as "cpu" or "cuda".

    Returns:
        A name such as "gloo" or "nccl"; None if the group cannot send tensors of such a device, as NCCL on the CPU.
    """
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return next((backend for device, _, backend in pairs if device == kind), None)


def accelerator_of(group: dist.ProcessGroup | None) -> torch.device | None:
    """Return this process's accelerator if a group has a backend of its own for it, such as NCCL; else None.

    gloo also accepts tensors of a GPU, but copies them through the CPU. A group of gloo shows that a job computes on
    CPUs, or that several ranks share an accelerator.

    Args:
        group: Group; None is the world.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or backend_of(group, accelerator.type) in (None, *_CPU_BACKENDS):
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def check_collectives(
    group: dist.ProcessGroup, device: torch.device, collectives: Sequence[Collective], what: str
) -> None:
    """Raise an error if a group does not support a collective, before a step fails half-way. Collective over the group.

    torch's own backends, and a process group in Python that has all the methods, are accepted without communication.
    With any other backend, the ranks try each collective on one number per rank.

    Args:
        group: Group.
        device: Device of the tensors.
        collectives: Collectives that will be called.
        what: Name of the caller, such as "stage 2".

    Raises:
        ValueError: The group does not support one of the collectives. Every rank raises, because all ranks have the
            same backend.
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
        # A process group in Python that overrides the method implements the collective, and needs no trial.
        own, base = type(group), dist.ProcessGroup
        if any(getattr(own, name, None) is not getattr(base, name, None) for name in _METHODS[collective]):
            continue
        try:
            _try(collective, group, device)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"{what} needs {collective}, which the backend {name!r} of ranks {dist.get_process_group_ranks(group)} "
                f"cannot do ({str(error).splitlines()[0]}); pass a group of another backend, such as 'gloo' or 'nccl'"
            ) from error


def _try(collective: Collective, group: dist.ProcessGroup, device: torch.device) -> None:
    """Run a collective on one number per rank."""
    number, numbers = torch.zeros(1, device=device), torch.zeros(dist.get_world_size(group), device=device)
    if collective == "all_reduce":
        dist.all_reduce(number, group=group)
    elif collective == "broadcast":
        dist.broadcast(number, group=group, group_src=0)
    elif collective == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(numbers, number, group=group)
    elif collective == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before 2.13
        scatter(number, numbers, group=group)
    else:
        dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)


def sendable(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return a tensor in a form that a group can send from rank to rank: itself, or a copy on the CPU.

    gloo accepts tensors on a GPU in its collectives, but only CPU tensors in its sends and receives. Receive into a
    tensor that is like the returned one, and move it with `.to(tensor.device)`.

    Args:
        tensor: Tensor to send.
        group: Group whose `isend` or `batch_isend_irecv` sends the tensor; None is the world.
    """
    if not tensor.is_cpu and backend_of(group, tensor.device.type) == "gloo":
        return tensor.cpu()
    return tensor
