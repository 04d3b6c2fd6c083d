"""Weight gradients that are computed later: the split of backward that zero-bubble pipeline schedules need."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

Hook = Callable[["WeightGradient"], None]
"""What a linear's `weight_grad_hook` is: it is handed the closure during backward, and calls it when it likes."""


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


def weight_and_hook(module: nn.Module) -> tuple[Tensor, Hook | None]:
    """The weight to multiply with, and the hook that a pipeline runtime has set on a linear, if it has.

    With a hook, autograd is given a stand-in that shares the weight's memory. Of the parameter itself it would call
    the hooks in backward already, without a gradient, and a data-parallel reducer would take it for ready.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]  # a linear has one
    hook: Hook | None = getattr(module, "weight_grad_hook", None)
    if hook is None or not weight.requires_grad:
        return weight, None
    return weight.detach().requires_grad_(), lambda gradient: hook(replace(gradient, weight=weight))
