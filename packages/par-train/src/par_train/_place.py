"""Brings a batch to the device of its rank."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def placed(batch: Any, device: torch.device) -> Any:
    """A batch on a device; the very same one if that is the CPU, where data loaders leave it.

    Args:
        batch: Tensors, nested in containers that torch knows, and what else has a method `to`, such as the batches of
            Hugging Face's tokenizers. Other things stay as they are.
        device: Copies to a GPU from pinned memory are not waited for.
    """
    if device.type == "cpu":
        return batch
    return tree_map(lambda leaf: _moved(leaf, device), batch, is_leaf=_can_move)


def _can_move(value: Any) -> bool:
    return callable(getattr(value, "to", None))


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device) if _can_move(leaf) else leaf
