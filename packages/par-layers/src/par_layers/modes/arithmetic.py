"""The arithmetic of a product: the dtype that autocast asks for, and a function in the place of torch's."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch_private import is_any_autocast_enabled

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function in the place of torch's product: from x [..., k], weight [n, k], and bias [n] or None, to [..., n].

Autograd can go through it.
"""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which torch.autocast multiplies on this tensor's device; None if autocast is off."""
    if not is_any_autocast_enabled():
        return None
    device = x.device.type
    enabled = device != "meta" and torch.is_autocast_enabled(device)  # autocast does not know meta
    return torch.get_autocast_dtype(device) if enabled else None


def in_autocast_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands in the dtype that autocast uses for a matmul; unchanged if autocast is off.

    Autocast reaches what torch's dispatcher sees: the product in the forward of an autograd function, but neither what
    the function saves for backward nor what its collectives send. So operands are cast before; the casts' backwards
    bring the gradients to the dtypes of x, weight and bias.
    """
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weight, bias
    return _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(dtype)  # autocast leaves fp64 alone


def refuse(linear: LinearFunction | None, mode: str) -> None:
    """Raise ValueError, if there is a function in the place of torch's product, in a mode that cannot call it."""
    if linear is not None:
        raise ValueError(
            f"`linear` of this layer is {linear!r}, but mode {mode} multiplies parts of several ranks, and cannot call "
            "it; use mode 1d, or set `linear` to None"
        )
