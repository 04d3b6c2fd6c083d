"""What the backend of a group can do, which differs between kinds of device."""

import torch
import torch.distributed as dist


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
