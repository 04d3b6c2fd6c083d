"""Moving a batch to the device of its rank."""

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_TAKE_NON_BLOCKING: tuple[type[Any], ...] = (Tensor, PackedSequence)


def move_to_device(batch: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Return a batch on a device; the same object if that device is the CPU, where data loaders create batches.

    Args:
        batch: Tensors, nested in mappings, lists, tuples, dataclasses, and objects with a `to` method. All other
            values stay as they are. The caller's containers do not change.
        device: The target device.
        non_blocking: Whether to return before copies from pinned memory end. Until then, the pinned memory must not
            be overwritten.

    Raises:
        TypeError: A `to` method returned an object of another class.
    """
    device = torch.device(device)
    return batch if device.type == "cpu" else _moved(batch, device, non_blocking)


def _moved(value: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(value, _TAKE_NON_BLOCKING):
        return value.to(device, non_blocking=non_blocking)
    # Mappings before objects with `to`: the `to` of Hugging Face's BatchEncoding changes the caller's object.
    if isinstance(value, Mapping):
        moved = {key: _moved(each, device, non_blocking) for key, each in value.items()}
        if not hasattr(value, "update"):
            return type(value)(moved)  # type: ignore[call-arg]  # a read-only mapping is made from a dict
        clone: Any = copy(value)
        clone.update(moved)
        return clone
    if isinstance(value, list | tuple):
        several = [_moved(each, device, non_blocking) for each in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    # A class such as torch.Tensor has the attribute `to`, but nothing to move.
    if isinstance(value, type):
        return value
    if callable(getattr(value, "to", None)):
        result = value.to(device)
        if not isinstance(result, type(value)):
            raise TypeError(
                f"to({str(device)!r}) of a {type(value).__name__} in a batch returned a {type(result).__name__}: it "
                f"must return a {type(value).__name__} on that device; change the method, or use tensors, mappings, "
                "lists and tuples"
            )
        return result
    if is_dataclass(value):
        sample: Any = value
        names = [each.name for each in fields(value) if each.init]
        return replace(sample, **{name: _moved(getattr(sample, name), device, non_blocking) for name in names})
    return value
