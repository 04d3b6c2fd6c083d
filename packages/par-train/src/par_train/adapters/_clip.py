"""Gradient clipping for trainers that pass the norm between backward and step."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from par_precision import MixedOptimizer


class Clipping:
    """Gradient clipping in the next step of an optimizer, which then reports the norm.

    Sharded gradients are complete only in the step, so their norm is unknown before it.

    Args:
        optimizer: The optimizer that `Strategy.initialize` returned.
        usual: The strategy's own clip_norm, for steps without a call of `clip`.
        device: The strategy's device.
    """

    def __init__(self, optimizer: Optimizer, usual: float | None, device: torch.device) -> None:
        self._optimizer, self._usual, self._device = optimizer, usual, device
        self._asked: list[Tensor] = []
        optimizer.register_step_post_hook(self._tell)

    def clip(self, norm: float, norm_type: float) -> Tensor:
        """Clip the gradients in the next step.

        Args:
            norm: The largest norm of all gradients together; inf for no clipping.
            norm_type: The order of the norm, which must be 2.

        Returns:
            The norm before clipping: an fp64 scalar, NaN until the optimizer has stepped.

        Raises:
            ValueError: `norm_type` is not 2, or a plugin controls precision and therefore clipping.
        """
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type}: gradients are clipped by their 2-norm; pass norm_type=2")
        if not isinstance(self._optimizer, MixedOptimizer):
            raise ValueError(f"norm={norm}: a plugin controls precision and clipping; pass the norm to the plugin")
        # The optimizer clips in its step; the caller's tensor is filled when the norm is known.
        self._optimizer.clip_norm = None if math.isinf(norm) else norm
        self._asked.append(torch.full((), math.nan, dtype=torch.float64, device=self._device))
        return self._asked[-1]

    def _tell(self, optimizer: Any, *_: Any) -> None:
        for norm in self._asked:
            norm.copy_(optimizer.last.grad_norm)
            optimizer.clip_norm = self._usual
        self._asked.clear()
