"""Gradients rounded to multiples of 2**-50, whose fp64 sums are exact while they stay below 8."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

LIMIT = 8.0
"""Absolute value that no partial sum of gradients may reach."""

_SHIFT = 6.0
"""Summand that rounds to the grid: fp64 numbers between 4 and 8 are multiples of 2**-50."""


def on_grid(gradient: Tensor) -> Tensor:
    """Return a gradient in fp64, each element rounded to a multiple of 2**-50.

    fp64 has 53 bits, so a sum of such multiples is exact as long as every partial sum is below 8. Then any order of
    ranks and of microbatches has the same sum. Of fp32 numbers, the rounding changes only those below 2**-27.

    Args:
        gradient: A gradient of one loss, of any shape, with elements below 2.
    """
    return gradient.double().add_(_SHIFT).sub_(_SHIFT)


class GridHooks:
    """Hooks that round the gradients of each backward pass to the grid before anybody adds them up.

    Args:
        module: The module, before its parameters are packed or moved. Its trained parameters get gradients in fp64.
        losses: Number of losses of a step, over all ranks.
    """

    def __init__(self, module: nn.Module, losses: int) -> None:
        self._limit = LIMIT / losses
        self._largest: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float64
                # A hook of the tensor, not of its accumulation: a pipeline that splits backward adds several
                # microbatches up before it accumulates, and sums of numbers off the grid would depend on their order.
                parameter.register_hook(self._hook_of(name))

    def _hook_of(self, name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            largest = torch.linalg.vector_norm(gradient.detach(), torch.inf)
            earlier = self._largest.get(name)
            # `maximum` keeps a NaN, so that one anywhere reaches the check.
            self._largest[name] = largest if earlier is None else torch.maximum(earlier, largest)
            return on_grid(gradient)

        return hook

    @property
    def excess(self) -> list[str]:
        """The names of parameters with an element in this step that is too large for exact sums."""
        return [name for name, value in self._largest.items() if self._limit <= float(value) < torch.inf]

    def largest(self, device: torch.device) -> Tensor:
        """Return the largest element of the step's gradients divided by the limit, an fp64 scalar: below 1 is exact."""
        if not self._largest:
            return torch.zeros((), dtype=torch.float64, device=device)
        together = torch.stack([value.to(device) for value in self._largest.values()])
        return together.amax().double() / self._limit

    def forget(self) -> None:
        """Begin a step."""
        self._largest.clear()
