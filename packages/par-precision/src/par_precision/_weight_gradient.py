"""Weight gradients that are computed later: the split of backward that zero-bubble pipeline schedules need."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WeightGradient:
    """Adds a weight gradient when it is called.

    Args:
        weight: The parameter.
        compute: Gives the gradient, in the weight's shape and the product's dtype.
        operands: Of a single product that torch itself could add in place; there is none in float8.
    """

    weight: Tensor
    compute: Callable[[], Tensor]
    operands: None = None

    @torch.no_grad()
    def __call__(self, *, listened: bool = True) -> None:
        """Adds the gradient.

        Args:
            listened: Whether anybody waits for the gradient: then tensor hooks, post-accumulate hooks and a
                data-parallel reducer fire exactly once. False adds in place, which is quicker.
        """
        gradient = self.weight.grad
        if listened or gradient is None:
            torch.autograd.backward(self.weight, self.compute())  # which casts it
        else:
            gradient.add_(self.compute())


Hook = Callable[[WeightGradient], None]
"""What a layer's `weight_grad_hook` is: it is handed the closure during backward, and calls it when it likes."""

PutOff = Callable[[Callable[[], Tensor]], None]
"""Takes what computes a weight gradient, in place of the gradient."""


def weight_and_put_off(layer: nn.Module | None, weight: Tensor) -> tuple[Tensor, PutOff | None]:
    """The weight to multiply with, and where to put off its gradient if a pipeline runtime has set the layer's hook.

    With a hook, autograd is given a stand-in that shares the weight's memory. Of the parameter itself it would call
    the hooks in backward already, without a gradient, and a data-parallel reducer would take it for ready.

    Args:
        layer: Whose `weight` and `weight_grad_hook` are looked at; None: no hook.
        weight: The layer's, or what it became in another dtype.
    """
    hook: Hook | None = getattr(layer, "weight_grad_hook", None)
    if layer is None or hook is None or not weight.requires_grad:
        return weight, None
    parameter: Tensor = layer.weight  # type: ignore[assignment]  # a layer with the hook has one
    return weight.detach().requires_grad_(), lambda compute: hook(WeightGradient(parameter, compute))
