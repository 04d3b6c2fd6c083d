"""Brings a batch to the device of its rank."""

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_MOVE_THEMSELVES: tuple[type[Any], ...] = (Tensor, PackedSequence)


def placed(batch: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """A batch on a device; the very same one if that is the CPU, where data loaders leave it.

    Args:
        batch: Tensors, nested in mappings, lists, tuples, dataclasses, and what else has a method `to`. Other things
            stay as they are, and so do the batch's own containers.
        device: Where to.
        non_blocking: Not to wait for copies from pinned memory, which nobody may overwrite before they are done.

    Raises:
        TypeError: A method `to` that gives something else than what it belongs to.
    """
    device = torch.device(device)
    return batch if device.type == "cpu" else _moved(batch, device, non_blocking)


def _moved(value: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(value, _MOVE_THEMSELVES):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, Mapping):  # also those of Hugging Face, whose own `to` would change the caller's
        moved = {key: _moved(each, device, non_blocking) for key, each in value.items()}
        if not hasattr(value, "update"):
            return type(value)(moved)  # type: ignore[call-arg]  # as dict has it
        clone: Any = copy(value)
        clone.update(moved)
        return clone
    if isinstance(value, list | tuple):
        several = [_moved(each, device, non_blocking) for each in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    if isinstance(value, type):
        return value
    if callable(getattr(value, "to", None)):
        return _by_itself(value, device)
    if is_dataclass(value):
        sample: Any = value
        names = [each.name for each in fields(value) if each.init]
        return replace(sample, **{name: _moved(getattr(sample, name), device, non_blocking) for name in names})
    return value


def _by_itself(value: Any, device: torch.device) -> Any:
    moved = value.to(device)
    if not isinstance(moved, type(value)):
        raise TypeError(
            f"to({str(device)!r}) of a {type(value).__name__} in a batch gave a {type(moved).__name__}; make it give "
            f"the {type(value).__name__} on that device, or give batches of tensors, mappings, lists and tuples"
        )
    return moved
