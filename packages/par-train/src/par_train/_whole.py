"""Between the parts that ranks hold and whole tensors: what a checkpoint stores knows nothing of ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import ProcessGroups, Sharding


def gather_whole(part: Tensor, sharding: Sharding, groups: ProcessGroups) -> Tensor:
    """The whole tensor, on the CPU, of which every rank of the tensor group gives its part. Collective over it."""
    if groups.size("tensor") == 1:
        return part.detach().cpu()
    rank, ranks = groups.global_rank, frozenset(groups.ranks("tensor"))
    whole = torch.zeros(sharding.shape, dtype=part.dtype, device=part.device)
    for box in sharding.boxes:
        if box.owns(rank, ranks):
            whole[box.slices] = box.of(part.detach())
    dist.all_reduce(whole, group=groups["tensor"])  # each element is zero on all ranks but one
    return whole.cpu()


def part_of(whole: Tensor, like: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of a whole tensor, of the shape of `like`; padding is zero."""
    part = torch.zeros(like.shape, dtype=whole.dtype)
    for box in sharding.boxes:
        box.of(part).copy_(whole[box.slices])
    return part.to(like.device)
