"""Clipping by the norm of the whole gradient, of which ranks hold parts."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from par_groups import ProcessGroups, gradients


def clip_gradients_(optimizer: Optimizer, groups: ProcessGroups, max_norm: float) -> Tensor:
    """Scales gradients down to a norm, and returns the norm before, alike on every rank.

    Args:
        optimizer: Its gradients are complete: reduced over every axis that needs it.
        groups: All their ranks add up their parts; what is copied counts once.
        max_norm: Of all gradients together.
    """
    rank, ranks = groups.global_rank, range(groups.topology.world_size)
    found = list(gradients(optimizer))
    owned = [view.double().square().sum() for _, box, view in found if box.owns(rank, ranks)]
    total = torch.stack(owned).sum() if owned else torch.zeros((), dtype=torch.float64, device=groups.device)
    dist.all_reduce(total)  # one number over the world
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, _, view in found:
        view.mul_(scale)
    return norm
