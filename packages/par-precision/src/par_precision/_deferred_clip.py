"""Gradient clipping for trainers that pass the norm between backward and step."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._optimizer import MixedOptimizer


class DeferredClipping:
    """Gradient clipping in the next step of an optimizer, which then reports the norm.

    Sharded gradients are complete only in the step, so their norm is unknown before it.

    Args:
        optimizer: The optimizer that `mixed` returned; with any other optimizer, `clip` raises an error.
        usual: The largest norm in steps without a call of `clip`; None for no clipping.
        device: The device of the norm.
    """

    def __init__(self, optimizer: Optimizer, usual: float | None, device: torch.device) -> None:
        self._optimizer, self._usual, self._device = optimizer, usual, device
        self._asked: list[Tensor] = []
        optimizer.register_step_post_hook(self._report)

    def clip(self, norm: float, norm_type: float) -> Tensor:
        """Clip the gradients in the next step.

        Args:
            norm: The largest norm of all gradients together; inf for no clipping.
            norm_type: The order of the norm, which must be 2.

        Returns:
            The norm before clipping: an fp64 scalar, NaN until the optimizer has stepped.

        Raises:
            ValueError: `norm_type` is not 2, or the optimizer is not from `mixed`.
        """
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type}: gradients are clipped by their 2-norm; pass norm_type=2")
        if not isinstance(self._optimizer, MixedOptimizer):
            raise ValueError(
                f"norm={norm}: this {type(self._optimizer).__name__} is not from par_precision.mixed, and cannot clip "
                "in its step; clip by whatever controls its precision"
            )
        # The optimizer clips in its step; the caller's tensor is filled when the norm is known.
        self._optimizer.clip_norm = None if math.isinf(norm) else norm
        self._asked.append(torch.full((), math.nan, dtype=torch.float64, device=self._device))
        return self._asked[-1]

    def _report(self, optimizer: Any, *_: Any) -> None:
        """Fill the tensors that `clip` has returned, and restore the usual norm: one call is for one step."""
        for norm in self._asked:
            norm.copy_(optimizer.last.grad_norm)
            optimizer.clip_norm = self._usual
        self._asked.clear()
