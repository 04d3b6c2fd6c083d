"""Backward functions that raise an error if they are differentiated again."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable as _refusing


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the backward of an autograd function as torch's decorator does, without its cost where nobody asks.

    torch's enters and leaves a context without gradients, which takes microseconds at every call, also in the usual
    backward, where gradients are off already. Only where they are on (`create_graph=True`) has it anything to do.

    Args:
        backward: The backward, a static method.
    """
    refusing = _refusing(backward)

    @wraps(backward)
    def called(ctx: Any, *gradients: Any) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return called
