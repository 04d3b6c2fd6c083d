"""Broadcast of frozen parameters and buffers, which are in no chunk, from the first rank to all ranks of its group.

A rank draws such values when it makes the model: random features or a frozen head, for example. The ranks would train
different functions if each rank kept its own values.
"""

import hashlib
from collections.abc import Sequence, Set

import torch
import torch.distributed as dist
from torch import nn

from par_groups import agree, packed_scales

from .build import shares_of
from .sharers import DataParallelGroup

_BUCKET = 1 << 25
"""Bytes per broadcast. Two copies of them exist at a time: this rank's values and the received ones."""


def make_rest_alike_(
    module: nn.Module, packed: Set[nn.Parameter], shares: Sequence[DataParallelGroup], device: torch.device
) -> None:
    """Overwrite tensors that are not packed with the first rank's values, in each data-parallel group. Collective.

    Three kinds of tensors keep each rank's own values:

    - tensors whose shape or dtype differs between the ranks of a group
    - parameters that no group replicates on all of its ranks
    - all buffers if there are several groups, because no sharding metadata assigns a buffer to a group

    Args:
        module: Module.
        packed: Parameters that are packed in chunks, whose values are equal on all ranks already.
        shares: Data-parallel groups.
        device: Device of the communication.
    """
    rest: list[dict[str, torch.Tensor]] = [{} for _ in shares]
    for name, parameter in module.named_parameters():
        if parameter not in packed and (found := shares_of(parameter, shares)):
            rest[found[0]][name] = parameter
    rest[0].update(packed_scales((name, each) for name, each in module.named_parameters() if each in packed))
    if len(shares) == 1:
        rest[0].update(module.named_buffers())
    for share, tensors in zip(shares, rest, strict=True):
        if any(dist.get_world_size(group) > 1 for group in share.groups):
            plain = {name: tensor for name, tensor in tensors.items() if _is_plain(tensor)}
            _make_alike_([plain[name] for name in _in_common(plain, share)], share, device)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense, real and of no subclass, which may have more data than its bytes."""
    is_dense = not (tensor.is_meta or tensor.is_sparse or tensor.is_quantized)
    return is_dense and type(tensor) in (torch.Tensor, nn.Parameter)


def _in_common(tensors: dict[str, torch.Tensor], share: DataParallelGroup) -> list[str]:
    """Return the sorted names of tensors whose shape and dtype are equal on all ranks of a group. Collective."""
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(tensors.items())]
    # The ranks compare 16 bytes first: the lists of a large model are long, and they almost always are equal.
    digests = agree(None, hashlib.blake2b(repr(mine).encode(), digest_size=16).digest(), *share.groups)
    if len(set(digests.values())) > 1:
        every = agree(None, mine, *share.groups).values()
        common = set(mine).intersection(*every)
        mine = [each for each in mine if each in common]
    return [name for name, _, _ in mine]


def _make_alike_(tensors: Sequence[torch.Tensor], share: DataParallelGroup, device: torch.device) -> None:
    """Broadcast tensors over a data-parallel group, and overwrite the tensors that differ. Collective."""
    bucket: list[torch.Tensor] = []
    for number, tensor in enumerate(tensors):
        bucket.append(tensor)
        if number + 1 < len(tensors) and sum(each.nbytes for each in bucket) < _BUCKET:
            continue
        # Tensors of all dtypes travel in one broadcast, as bytes.
        own = torch.cat([each.detach().contiguous().reshape(-1).view(torch.uint8).to(device) for each in bucket])
        first = own.clone()
        broadcast_(first, share)
        sizes = [each.nbytes for each in bucket]
        for each, before, after in zip(bucket, own.split(sizes), first.split(sizes), strict=True):
            # An equal tensor is not written: a write would change its version, which fails backward passes that saved
            # the tensor.
            if not torch.equal(before, after):
                values = after.clone().view(each.dtype).view(each.shape)
                if 0 in each.stride() and each.numel() > 1:  # expanded: several of its elements share memory
                    each.data = values.to(each.device)
                else:
                    each.data.copy_(values)
        bucket = []


def broadcast_(tensor: torch.Tensor, share: DataParallelGroup) -> None:
    """Overwrite a tensor with the first rank's values, on all ranks of a data-parallel group. Collective."""
    # The broadcast over the group comes first, and then the one over replicas, so the values of the very first rank
    # reach all ranks.
    for group in share.groups:
        if dist.get_world_size(group) > 1:
            dist.broadcast(tensor, group=group, group_src=0)
