"""Tensors that lie beside each other as columns of one: how messages have queries, keys and values of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor


def columns(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The columns of a tensor [tokens, B, width] as tensors [B, tokens, heads, D], as wide as others are."""
    widths = [x.shape[2] * x.shape[3] for x in like]
    return [
        part.unflatten(-1, x.shape[2:]).transpose(0, 1) for part, x in zip(whole.split(widths, -1), like, strict=True)
    ]


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor [tokens, B, width] whose columns are these, side by side and nothing else; None if there is none."""
    batch, tokens = parts[0].shape[:2]
    width = sum(x.shape[2] * x.shape[3] for x in parts)
    storage, place = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    for x in parts:
        strides = zip(x.shape, x.stride(), (width, batch * width, x.shape[3], 1), strict=True)
        lies_so = all(size == 1 or stride == wanted for size, stride, wanted in strides)
        if not lies_so or x.untyped_storage().data_ptr() != storage or x.storage_offset() != place:
            return None
        place += x.shape[2] * x.shape[3]
    return parts[0].as_strided((tokens, batch, width), (batch * width, width, 1))


def empty_like(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Room for as many tensors, which lie beside each other where the given ones do."""
    whole = joined(parts)
    if whole is None:
        return [torch.empty(x.shape, dtype=dtype, device=x.device) for x in parts]
    return columns(torch.empty(whole.shape, dtype=dtype, device=whole.device), parts)
