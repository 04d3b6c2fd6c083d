"""Weight gradients that are computed later: what a layer and a zero-bubble pipeline schedule agree on.

A layer that can put off the gradient of its weight has an attribute `weight_grad_hook`, None at first. Whoever sets it
is handed a `WeightGradient` in backward, in place of the gradient, and calls it at a time of its own choice. Where
nobody waits for the gradient, the product that it consists of is added in place (`add_product`).
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
        operands: (left, right) where the gradient is the single product left.T @ right.
    """

    weight: Tensor
    compute: Callable[[], Tensor]
    operands: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, *, listened: bool = True) -> None:
        """Adds the gradient to the weight's.

        Args:
            listened: Whether anybody waits for the gradient: then tensor hooks, post-accumulate hooks and a
                data-parallel reducer fire exactly once. False adds in place, which is quicker.
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
    """The weight that a layer multiplies with, and the hook that backward calls in place of computing its gradient.

    With a hook, autograd is given a stand-in that shares the weight's memory. The hooks of the parameter itself would
    be called in backward already, without a gradient, and a data-parallel reducer would take it for ready.

    Args:
        layer: A layer that has the weight, and a `weight_grad_hook` if it can put the gradient off.
        weight: What has become of the weight, such as in another dtype; default: the parameter itself.
        name: The name of the weight in the layer.

    Returns:
        The weight and None where nothing is to be put off, as with a frozen weight. Else a stand-in, and a hook that
        takes the stand-in's `WeightGradient` and hands on the parameter's.
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
    """Adds left.T @ right to a matrix, such as the weight gradient of a linear layer; in blocks where that is quicker.

    A CPU reads and writes the whole total for few rows of operands. With 48 to 127 of them the one big product goes
    over it in an order that misses the cache and the table of pages all the time, once other work has been between:
    a batch of products, each with a block that fits, takes 0.65 to 0.85 of its time (float32 and float64, from
    131,072 elements on). With fewer or more rows, and in half precision, the big one is quicker.

    Args:
        total: The matrix [n, k] that is added to, in place.
        left: The first operand [rows, n], of the total's dtype.
        right: The second operand [rows, k], of the total's dtype.
    """
    rows, (n, k) = len(left), total.shape
    if not is_better_in_blocks(total, rows):
        total.addmm_(left.t(), right)
        return
    blocks = n // _BLOCK
    total.unflatten(0, (blocks, _BLOCK)).baddbmm_(
        left.t().unflatten(0, (blocks, _BLOCK)), right.expand(blocks, rows, k)
    )


def is_better_in_blocks(total: Tensor, rows: int) -> bool:
    """Whether a product of so many rows is quicker in blocks of the total; on CPUs, by measurement."""
    return (
        48 <= rows < 128
        and total.numel() >= 1 << 17
        and len(total) % _BLOCK == 0
        and total.dtype in (torch.float32, torch.float64)
        and total.device.type == "cpu"
    )
