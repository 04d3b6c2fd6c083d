"""Saved state of loss scaling: the loss scale, the loss weights and the number of skipped steps."""

from typing import Any

import torch
from torch import Tensor

from .loss_weights import LossWeights
from .scale import DynamicScale


class Scaling:
    """Scale of losses, and count of steps.

    It has `state_dict()` and `load_state_dict()`, so what saves an lr scheduler saves it too.

    Args:
        scale: Loss scale. None: losses are not scaled, and 50 consecutive skipped steps end the run.
        device: Device of the counters.

    Attributes:
        scale: The loss scale, or None.
        steps: Number of steps so far, skipped ones included.
        loss_weights: Weights of the losses.
    """

    def __init__(self, scale: DynamicScale | None, device: torch.device) -> None:
        self.scale, self.steps = scale, 0
        self._max_skipped = DynamicScale.max_skipped if scale is None else scale.max_skipped
        self.loss_weights = LossWeights(device)
        self._skipped, self._in_a_row = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(2))
        if scale is not None:
            scale.to_(device)

    @property
    def skipped(self) -> int:
        """Number of steps skipped so far. Reading it waits for the device."""
        return int(self._skipped)

    def scaled(self, loss: Tensor, weight: float | Tensor | None = None) -> Tensor:
        """Return the loss times the scale and its weight, in fp32: fp16 cannot hold a loss times 65,536.

        Raises:
            TypeError: A loss of whole numbers.
            ValueError: A weight that does not fit; see `LossWeights.count`.
        """
        if not loss.is_floating_point():
            raise TypeError(f"the loss has dtype {loss.dtype}, which has no gradient; give a floating-point tensor")
        share = self.loss_weights.count(weight)
        if share is None and self.scale is None:
            return loss
        scaled = loss if loss.dtype == torch.float64 else loss.float()
        if share is not None:
            scaled = scaled * share.to(scaled.dtype)
        return scaled if self.scale is None else scaled * self.scale.value

    def update(self, skipped: Tensor, empty: Tensor | None = None) -> None:
        """Record a step.

        Args:
            skipped: Whether the step was skipped, a bool scalar; the same on all ranks.
            empty: Whether it was skipped because all losses weighed nothing, a bool scalar. Nothing has overflowed
                then, so the scale and the count of skipped steps in a row stay. None: some loss counted.

        Raises:
            ValueError: Some ranks gave losses a weight, and others did not; on all ranks.
            RuntimeError: One skipped step in a row too many, on all ranks. On a GPU this is looked at every
                `max_skipped` steps, since reading it waits; elsewhere at every step.
        """
        self.steps += 1
        if self.scale is not None:
            self.scale.update(skipped, empty)
        if skipped.is_cpu and not skipped:  # on a GPU this look would wait
            self._in_a_row.zero_()
            return
        self._skipped += skipped
        # Times 0 after a step that was not skipped, which ends the row.
        longer = (self._in_a_row + 1) * skipped
        self._in_a_row = longer if empty is None else torch.where(empty, self._in_a_row, longer)
        # A read makes the host wait for the device, so on a GPU it is done once per possible end of the run.
        if skipped.is_cpu or self.steps % self._max_skipped == 0:
            self.loss_weights.check()
            in_a_row = int(self._in_a_row)
            if in_a_row >= self._max_skipped:
                scale = "" if self.scale is None else f" The loss scale is down to {float(self.scale.value):g}."
                raise RuntimeError(
                    f"{in_a_row} steps in a row were skipped, all since step {self.steps - in_a_row}, because "
                    f"gradients were NaN or infinite.{scale} Look at the loss, the data and the learning rate; "
                    f"scale=DynamicScale(max_skipped=...) allows more than {self._max_skipped}"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the counters and the typical weight, as numbers."""
        counters = {"steps": self.steps, "skipped": self.skipped, "in_a_row": int(self._in_a_row)}
        scale = None if self.scale is None else self.scale.state_dict()
        return {**counters, "typical_weight": float(self.loss_weights.typical), "scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another run. The scale stays unchanged if that run had none."""
        self.steps = state["steps"]
        self._skipped.fill_(state["skipped"])
        self._in_a_row = torch.full_like(self._in_a_row, state["in_a_row"])
        self.loss_weights.forget()
        self.loss_weights.typical = torch.full_like(self.loss_weights.typical, state["typical_weight"])
        if self.scale is not None and state["scale"] is not None:
            self.scale.load_state_dict(state["scale"])
