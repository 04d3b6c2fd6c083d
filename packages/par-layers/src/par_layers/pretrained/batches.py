"""Batches of a data loader, split along the sequence: pairs of tokens and labels, and dicts for transformers models."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..context.context import Context
from .sequence import cut_dict

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def make_batch_splitter(context: Context) -> Callable[[Any], Any]:
    """Return a function that splits the batches of a data loader along the sequence.

    It takes pairs of [B, S] integers and transformers' dicts. The ranks of a sequence read the same samples. Each row
    of a pair is one document, so that the ranks need not communicate. Rows of a dict may hold several documents, which
    the ranks compare in the first batch.

    Args:
        context: The context parallelism, which assigns tokens to ranks.
    """
    has_compared = False

    def cut(batch: Any) -> Any:
        nonlocal has_compared
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
            compares, has_compared = not has_compared, True
            return cut_dict(batch, context, compare=compares)
        are_two = isinstance(batch, tuple | list) and len(batch) == 2 and not hasattr(batch, "_fields")
        are_tokens = are_two and all(
            isinstance(one, Tensor) and one.dim() == 2 and one.dtype in _INTEGERS for one in batch
        )
        if not are_tokens or batch[0].shape != batch[1].shape:
            raise TypeError(
                f"the data loader returns {_described(batch)}, and sequence={context.ranks} splits only pairs of "
                "[B, S] integers and dicts with input_ids; set dataloader.transform to a function of the "
                "batch that calls Strategy.context.cut and returns the model's arguments, or to None, and split the "
                "batches yourself"
            )
        tokens = context.tokens(batch[0].shape[1])
        mine = torch.from_numpy(tokens.index(context.rank)).to(batch[0].device)
        return type(batch)(one.index_select(1, mine) for one in batch)

    return cut


def _described(batch: Any) -> str:
    """Describe a batch in a few words, for a message."""
    if isinstance(batch, Tensor):
        return f"a tensor {list(batch.shape)} of {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {', '.join(map(_described, batch)) or 'nothing'}"
    return f"a {type(batch).__name__}"
