"""Clipping by the norm of the whole gradient, of which each rank of a tensor group holds a part."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups, gradients


def clip_gradients_(model: nn.Module, groups: ProcessGroups, max_norm: float) -> Tensor:
    """Scales gradients down to a norm, and returns the norm before, alike on every rank of the tensor group.

    Args:
        model: Its gradients are complete: reduced over every axis that needs it.
        groups: Their tensor group adds up its parts; what is copied counts once.
        max_norm: Of all gradients together.
    """
    rank, ranks = groups.global_rank, frozenset(groups.ranks("tensor"))
    found = list(gradients(model))
    owned = [view.double().square().sum() for _, box, view in found if box.owns(rank, ranks)]
    total = torch.stack(owned).sum() if owned else torch.zeros((), dtype=torch.float64, device=groups.device)
    if groups.size("tensor") > 1:
        dist.all_reduce(total, group=groups["tensor"])  # one number over the tensor group
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, _, view in found:
        view.mul_(scale)
    return norm
