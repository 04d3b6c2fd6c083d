"""Layout of messages: queries, keys and values of each token are adjacent columns of one tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


def columns(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return columns of a tensor [tokens, B, width] as views [B, tokens, heads, D].

    Args:
        whole: The tensor.
        like: Tensors whose heads and features each view has.
    """
    widths = [x.shape[2] * x.shape[3] for x in like]
    return [
        part.unflatten(-1, x.shape[2:]).transpose(0, 1) for part, x in zip(whole.split(widths, -1), like, strict=True)
    ]


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor [tokens, B, width] whose adjacent columns are `parts`, without a copy.

    Returns:
        A view of the shared memory; None if the parts are not adjacent columns of one tensor.
    """
    batch, tokens = parts[0].shape[:2]
    width = sum(x.shape[2] * x.shape[3] for x in parts)
    storage, place = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    for x in parts:
        strides = zip(x.shape, x.stride(), (width, batch * width, x.shape[3], 1), strict=True)
        # The stride of a dim of size 1 is arbitrary.
        lies_so = all(size == 1 or stride == wanted for size, stride, wanted in strides)
        if not lies_so or x.untyped_storage().data_ptr() != storage or x.storage_offset() != place:
            return None
        place += x.shape[2] * x.shape[3]
    return parts[0].as_strided((tokens, batch, width), (batch * width, width, 1))


def empty_like(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return uninitialized tensors of the same shapes, as columns of one tensor if the given tensors are.

    Args:
        parts: The given tensors.
        dtype: Dtype of the new tensors.
    """
    # If queries, keys and values arrived as one message, their gradients are written as one message too, and need no
    # copy before they are sent back.
    whole = joined(parts)
    if whole is None:
        return [torch.empty(x.shape, dtype=dtype, device=x.device) for x in parts]
    return columns(torch.empty(whole.shape, dtype=dtype, device=whole.device), parts)
