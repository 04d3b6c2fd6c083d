"""fp32 copies of many tensors, in few calls."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .rounding import DROPPED, ORDINARY


@torch.no_grad()
def floats_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `float()` makes of each: a copy, or an fp32 tensor itself."""
    copies: list[Tensor] = []
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for tensor in tensors:
        if type(tensor) in ORDINARY and tensor.dtype in DROPPED:
            copies.append(torch.empty_like(tensor, dtype=torch.float32))
            into, given = alike.setdefault((tensor.device, tensor.dtype), ([], []))
            into.append(copies[-1])
            given.append(tensor)
        else:
            copies.append(tensor.detach().float())
    for into, given in alike.values():
        torch._foreach_copy_(into, given)
    return copies
