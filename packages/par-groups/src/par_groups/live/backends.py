"""Which backend of a group works on which kind of device."""

import torch.distributed as dist


def backend_of(group: dist.ProcessGroup | None, kind: str) -> str | None:
    """The backend that a group has for a kind of device; None if tensors there cannot be sent, as with NCCL on the CPU.

    Args:
        group: None: the world.
        kind: Such as "cpu" or "cuda".

    Returns:
        Such as "gloo" or "nccl".
    """
    pairs = (each.partition(":") for each in str(dist.get_backend_config(group)).split(","))
    return next((backend for device, _, backend in pairs if device == kind), None)
