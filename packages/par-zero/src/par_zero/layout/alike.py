"""Frozen parameters and buffers, which are in no chunk, become the first rank's on all ranks that share them.

A rank draws them as it makes the model, such as random features or a frozen head. The ranks would train different
functions if each kept its own.
"""

import hashlib
from collections.abc import Sequence, Set

import torch
import torch.distributed as dist
from torch import nn

from par_groups import agree

from .build import shares_of
from .sharers import DataParallelGroup

_BUCKET = 1 << 25
"""Bytes that are broadcast as one, for which there are two copies at a time."""


def make_rest_alike_(
    module: nn.Module, packed: Set[nn.Parameter], shares: Sequence[DataParallelGroup], device: torch.device
) -> None:
    """Gives all ranks of each share the first one's values of what is not packed. Collective.

    What has another shape or dtype on one of the ranks stays each rank's own. So do parameters that no share has on all
    of its ranks, and, where there are several shares, all buffers: no record says whose they are.

    Args:
        module: The module.
        packed: Its parameters that are packed, and so made alike already.
        shares: Who shares what.
        device: Where the ranks communicate.
    """
    rest: list[dict[str, torch.Tensor]] = [{} for _ in shares]
    for name, parameter in module.named_parameters():
        if parameter not in packed and (found := shares_of(parameter, shares)):
            rest[found[0]][name] = parameter
    if len(shares) == 1:
        rest[0].update(module.named_buffers())
    for share, tensors in zip(shares, rest, strict=True):
        if any(dist.get_world_size(group) > 1 for group in share.groups):
            plain = {name: tensor for name, tensor in tensors.items() if _is_plain(tensor)}
            _make_alike_([plain[name] for name in _in_common(plain, share)], share, device)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its bytes: no tensor subclass, which may have more, sparse or abstract one."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not (
        tensor.is_meta or tensor.is_sparse or tensor.is_quantized
    )


def _in_common(tensors: dict[str, torch.Tensor], share: DataParallelGroup) -> list[str]:
    """The names under which all ranks of a share have tensors of the same shape and dtype, in one order."""
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(tensors.items())]
    digests = agree(None, hashlib.blake2b(repr(mine).encode(), digest_size=16).digest(), *share.groups)
    if len(set(digests.values())) > 1:
        every = agree(None, mine, *share.groups).values()
        common = set(mine).intersection(*every)
        mine = [each for each in mine if each in common]
    return [name for name, _, _ in mine]


def _make_alike_(tensors: Sequence[torch.Tensor], share: DataParallelGroup, device: torch.device) -> None:
    """Broadcasts tensors over the groups of a share, and writes those that differ."""
    bucket: list[torch.Tensor] = []
    for number, tensor in enumerate(tensors):
        bucket.append(tensor)
        if number + 1 < len(tensors) and sum(each.nbytes for each in bucket) < _BUCKET:
            continue
        own = torch.cat([_bytes_of(each).to(device) for each in bucket])
        first = own.clone()
        for group in share.groups:
            if dist.get_world_size(group) > 1:
                dist.broadcast(first, group=group, group_src=0)
        sizes = [each.nbytes for each in bucket]
        for each, before, after in zip(bucket, own.split(sizes), first.split(sizes), strict=True):
            if not torch.equal(before, after):
                values = after.clone().view(each.dtype).view(each.shape)
                if 0 in each.stride() and each.numel() > 1:  # expanded: several of its elements share memory
                    each.data = values.to(each.device)
                else:
                    each.data.copy_(values)
        bucket = []


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
