"""Clipping for trainers that name the norm between backward and step."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from par_precision import MixedOptimizer


class Clipping:
    """Lets the step to come clip all gradients of an optimizer, and tells their norm once it has.

    Gradients that are cut over ranks are complete in the step alone, so no norm is known before it.

    Args:
        optimizer: What `Strategy.initialize` gave.
        usual: The strategy's own clip_norm, for steps before which nobody names one.
        device: The strategy's device.
    """

    def __init__(self, optimizer: Optimizer, usual: float | None, device: torch.device) -> None:
        self._optimizer, self._usual, self._device = optimizer, usual, device
        self._asked: list[Tensor] = []
        optimizer.register_step_post_hook(self._tell)

    def clip(self, norm: float, norm_type: float) -> Tensor:
        """Clips in the step to come.

        Args:
            norm: The largest norm that all gradients together keep; inf never clips.
            norm_type: 2.

        Returns:
            The norm before clipping: an fp64 scalar, NaN until the optimizer has stepped.

        Raises:
            ValueError: Another kind of norm, or a plugin controls precision, and so clipping.
        """
        if norm_type != 2:
            raise ValueError(f"norm_type is {norm_type}; gradients are clipped by their 2-norm alone: give 2")
        if not isinstance(self._optimizer, MixedOptimizer):
            raise ValueError(f"a plugin controls precision, and so clipping, and was not told norm={norm}; tell it")
        self._optimizer.clip_norm = None if math.isinf(norm) else norm
        self._asked.append(torch.full((), math.nan, dtype=torch.float64, device=self._device))
        return self._asked[-1]

    def _tell(self, optimizer: Any, *_: Any) -> None:
        for norm in self._asked:
            norm.copy_(optimizer.last.grad_norm)
            optimizer.clip_norm = self._usual
        self._asked.clear()
