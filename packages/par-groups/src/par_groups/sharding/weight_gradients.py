"""Weight gradients that are computed later: what a layer and a zero-bubble pipeline schedule agree on.

A layer that can put off the gradient of its weight has an attribute `weight_grad_hook`, None at first. Whoever sets it
is handed a `WeightGradient` in backward, in place of the gradient, and calls it when he likes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WeightGradient:
    """Adds a weight gradient when it is called.

    Args:
        weight: The parameter.
        compute: Gives the gradient, in the weight's shape and the product's dtype.
        operands: Where the gradient is a single product, `(left, right)` with gradient = left.T @ right.
    """

    weight: Tensor
    compute: Callable[[], Tensor]
    operands: tuple[Tensor, Tensor] | None = None

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
        elif self.operands is not None and self.operands[0].dtype == gradient.dtype:  # under autocast it differs
            left, right = self.operands
            gradient.addmm_(left.t(), right)
        else:
            gradient.add_(self.compute())


WeightGradHook = Callable[[WeightGradient], None]
"""What a layer's `weight_grad_hook` is."""


def weight_and_hook(layer: nn.Module, weight: Tensor | None = None) -> tuple[Tensor, WeightGradHook | None]:
    """The weight that a layer multiplies with, and the hook that backward calls in place of computing its gradient.

    With a hook, autograd is given a stand-in that shares the weight's memory. Of the parameter itself it would call
    the hooks in backward already, without a gradient, and a data-parallel reducer would take it for ready.

    Args:
        layer: One that has a `weight`, and a `weight_grad_hook` if it can put it off.
        weight: What became of the weight, such as in another dtype; default: the parameter itself.

    Returns:
        The weight and None where nothing is to be put off, as of a frozen weight. Else a stand-in, and a hook that
        takes the stand-in's `WeightGradient` and hands on the parameter's.
    """
    parameter: Tensor = layer.weight  # type: ignore[assignment]  # a linear has one
    weight = parameter if weight is None else weight
    hook: WeightGradHook | None = getattr(layer, "weight_grad_hook", None)
    if hook is None or not weight.requires_grad:
        return weight, None
    return weight.detach().requires_grad_(), lambda gradient: hook(replace(gradient, weight=parameter))
