"""Deferred weight gradients: the protocol between a layer and a zero-bubble pipeline schedule.

A layer that can defer the gradient of its weight has an attribute `weight_grad_hook`, None at first. A schedule sets
the attribute, receives a `WeightGradient` in backward instead of the gradient, and calls it later. If no hook waits for
the gradient, the matmul of the gradient is added in place (`add_product`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WeightGradient:
    """Deferred weight gradient; a call computes it and adds it to the weight's gradient.

    Args:
        weight: Parameter.
        compute: Function that returns the gradient, in the weight's shape and the matmul's dtype.
        operands: Matrices (left, right) if the gradient is the single matmul left.T @ right; else None.
    """

    weight: Tensor
    compute: Callable[[], Tensor]
    operands: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, *, listened: bool = True) -> None:
        """Add the gradient to the weight's gradient.

        Args:
            listened: Whether hooks wait for the gradient. If True, tensor hooks, post-accumulate hooks and a
                data-parallel reducer fire exactly once. False adds in place, which is faster. Default: True.
        """
        gradient = self.weight.grad
        if listened or gradient is None:
            torch.autograd.backward(self.weight, self.compute())  # which casts it
        elif self.operands is not None and self.operands[0].dtype == gradient.dtype:  # under autocast it differs
            add_product(gradient, *self.operands)
        else:
            gradient.add_(self.compute())


WeightGradHook = Callable[[WeightGradient], None]
"""The type of a layer's attribute `weight_grad_hook`: called in backward with the gradient that is put off."""


def weight_and_hook(
    layer: nn.Module, weight: Tensor | None = None, *, name: str = "weight"
) -> tuple[Tensor, WeightGradHook | None]:
    """Return the weight for a layer's matmul, and the hook that backward calls instead of computing its gradient.

    With a hook, autograd receives a stand-in that shares the weight's memory. Otherwise backward would call the hooks
    of the parameter without a gradient, and a data-parallel reducer would treat the parameter as ready.

    Args:
        layer: Layer with the weight, and with a `weight_grad_hook` if it can defer the gradient.
        weight: Transformed weight, such as a cast to another dtype. Default: the parameter itself.
        name: Name of the weight in the layer. Default: "weight".

    Returns:
        The weight and None if no gradient is deferred, as for a frozen weight. Else a stand-in, and a hook that takes
        the stand-in's `WeightGradient` and passes the parameter's `WeightGradient` to the layer's hook.
    """
    parameter: Tensor = getattr(layer, name)
    weight = parameter if weight is None else weight
    hook: WeightGradHook | None = getattr(layer, "weight_grad_hook", None)
    if hook is None or not weight.requires_grad:
        return weight, None
    return weight.detach().requires_grad_(), lambda gradient: hook(replace(gradient, weight=parameter))


_BLOCK = 128
"""Rows of the total that `add_product` works on at a time."""


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left.T @ right in place to a matrix, such as the weight gradient of a linear layer.

    The matmul runs in blocks of the total if that is faster. With 48 to 127 rows, a single matmul on a CPU reads and
    writes the total in an order that misses the caches and the TLB. A batch of matmuls, each with a block that fits the
    cache, takes 0.65 to 0.85 of its time (float32 and float64, 131,072 elements or more, lower is better). With fewer
    or more rows, and in half precision, the single matmul is faster.

    Args:
        total: Matrix [n, k] that is updated in place.
        left: First operand [rows, n], of the total's dtype.
        right: Second operand [rows, k], of the total's dtype.
    """
    rows, (n, k) = len(left), total.shape
    if not is_better_in_blocks(total, rows):
        total.addmm_(left.t(), right)
        return
    blocks = n // _BLOCK
    # All operands are views: each block of rows of the total has its part of `left`, and all blocks share `right`.
    total.unflatten(0, (blocks, _BLOCK)).baddbmm_(
        left.t().unflatten(0, (blocks, _BLOCK)), right.expand(blocks, rows, k)
    )


def is_better_in_blocks(total: Tensor, rows: int) -> bool:
    """Return whether a matmul of so many rows is faster in blocks of the total; measured on CPUs."""
    return (
        48 <= rows < 128
        and total.numel() >= 1 << 17
        and len(total) % _BLOCK == 0
        and total.dtype in (torch.float32, torch.float64)
        and total.device.type == "cpu"
    )
