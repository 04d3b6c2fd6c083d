"""Linear and convolution layers that put off the gradient of their weight."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

PutOff = Callable[["Product"], None]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Product(NamedTuple):
    """A weight gradient that is computed later.

    Args:
        weight: A leaf.
        compute: Gives the gradient, in the weight's shape.
        operands: `(left, right)` where the gradient is left.T @ right.
    """

    weight: Tensor
    compute: Callable[[], Tensor]
    operands: tuple[Tensor, Tensor] | None = None

    def __call__(self) -> None:
        """Adds the gradient to the weight's."""
        gradient = self.compute().to(self.weight.dtype)
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad.add_(gradient)

    @classmethod
    def of_linear(cls, weight: Tensor, x: Tensor, gradient: Tensor) -> "Product":
        """That of x [..., k] and the gradient of the output [..., n]."""
        left = gradient if gradient.dim() == 2 else gradient.reshape(-1, gradient.shape[-1])
        right = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if right.dtype != left.dtype:  # under autocast they differ
            right = right.to(left.dtype)
        return cls(weight, lambda: left.t().mm(right), (left, right))


def deferring_forward(module: nn.Module, put_off: PutOff) -> Callable[[Tensor], Tensor] | None:
    """A `forward` for a layer that runs torch's own; None for any other."""
    if "forward" in module.__dict__:
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return partial(_linear, module, put_off)
    if isinstance(module, _CONVOLUTIONS) and _is_plain(module):
        return partial(_convolution, module, put_off)
    return None


def _is_plain(module: nn.Module) -> bool:
    forwards = [each.forward for each in _CONVOLUTIONS]
    return type(module).forward in forwards and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _linear(module: nn.Linear, put_off: PutOff, x: Tensor) -> Tensor:
    own: dict[str, Any] = module._parameters  # looking them up through the module takes longer
    weight, bias = own["weight"], own["bias"]
    if not torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    has_node = x.requires_grad or (bias is not None and bias.requires_grad)
    if not has_node or _are_saved_tensors_hooked():
        return _Linear.apply(x, weight, bias, put_off)  # type: ignore[no-any-return, no-untyped-call]
    y = functional.linear(x, weight.detach(), bias)
    x, node = x.detach(), y.grad_fn
    if node is None:
        raise RuntimeError("the output of a linear layer has no gradient, though its input or bias has one")
    version = x._version

    def before(gradients: tuple[Tensor, ...]) -> None:
        if x._version != version:  # autograd, which has not saved it, cannot tell
            raise RuntimeError(
                f"the input of a linear layer, {tuple(x.shape)}, was written into after its forward, so that its "
                "weight's gradient would be wrong; write into a copy"
            )
        put_off(Product.of_linear(weight, x, gradients[0]))

    # A hook before the node costs tiny layers a third less time than a function of Python's in its place.
    node.register_prehook(before)
    return y


def _are_saved_tensors_hooked() -> bool:
    """Whether somebody, such as activation checkpointing, decides where saved tensors are kept."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _convolution(module: Any, put_off: PutOff, x: Tensor) -> Tensor:
    if x.dim() != module.weight.dim():  # one sample, without a batch
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    how = (module.stride, module.padding, module.dilation, False, (0,) * len(module.stride), module.groups)
    return _Convolution.apply(x, module.weight, module.bias, how, put_off)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    """[..., k] to [..., n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.put_off = weight, put_off  # the saved one is another object
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        product = Product.of_linear(ctx.weight, x, gradient)
        ctx.put_off(product)
        of_x = gradient.matmul(weight.to(gradient.dtype)).to(x.dtype) if needs_x else None
        of_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return of_x, None, of_bias, None


class _Convolution(torch.autograd.Function):
    """[batch, channels, ...] to the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any, put_off: PutOff) -> Tensor:
        y: Tensor = torch.convolution(x, weight, bias, *how)
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.how, ctx.put_off = weight, how, put_off
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _, _ = ctx.needs_input_grad
        cast_x, cast_weight, how = x.to(gradient.dtype), weight.to(gradient.dtype), ctx.how

        def gradients(*mask: bool) -> tuple[Tensor, Tensor, Tensor]:
            biases = [len(weight)]
            return torch.ops.aten.convolution_backward(gradient, cast_x, cast_weight, biases, *how, mask)  # type: ignore[no-any-return]

        ctx.put_off(Product(ctx.weight, lambda: gradients(False, True, False)[1]))
        of_x, _, of_bias = gradients(needs_x, False, needs_bias)
        return of_x.to(x.dtype) if needs_x else None, None, of_bias if needs_bias else None, None, None
