"""Linear and convolution layers that put off the gradient of their weight."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._torch_private import are_saved_tensors_hooked, parameters_of, version_of

PutOff = Callable[["Product"], None]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Product(NamedTuple):
    """A weight gradient that is computed later: par_groups' `WeightGradient` as a tuple, which is quicker to make.

    Args:
        weight: The weight that the layer multiplied with, a leaf.
        compute: Computes the gradient, in the weight's shape.
        operands: `(left, right)` where the gradient is left.T @ right, else None.
    """

    weight: Tensor
    compute: Callable[[], Tensor]
    operands: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of_linear(cls, weight: Tensor, x: Tensor, gradient: Tensor) -> "Product":
        """Return the weight gradient of a linear layer, not computed yet.

        Args:
            weight: The layer's weight [n, k].
            x: The layer's input [..., k].
            gradient: The gradient of the layer's output [..., n].
        """
        # All leading dims are rows of one matmul; the 2D case skips the reshape because it is the usual one, and views
        # cost time in tiny layers.
        left = gradient if gradient.dim() == 2 else gradient.reshape(-1, gradient.shape[-1])
        right = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if right.dtype != left.dtype:  # under autocast they differ
            right = right.to(left.dtype)
        return cls(weight, lambda: left.t().mm(right), (left, right))


def like_leaf(parameter: nn.Parameter) -> Tensor:
    """Return a leaf that shares a parameter's memory and accepts gradients of the same dtypes."""
    leaf = parameter.detach().requires_grad_()
    if hasattr(parameter, "grad_dtype"):  # torch of before gives gradients the parameter's dtype
        leaf.grad_dtype = parameter.grad_dtype
    return leaf


def gradient_dtype_of(weight: Tensor) -> torch.dtype:
    """Return the dtype of a weight's gradient."""
    return getattr(weight, "grad_dtype", None) or weight.dtype


def deferring_forward(module: nn.Module, put_off: PutOff) -> Callable[[Tensor], Tensor] | None:
    """Return a `forward` that defers the weight's gradient, for a layer that runs torch's own forward; else None.

    Args:
        module: The layer.
        put_off: Called in backward with the product that gives the weight's gradient.
    """
    # Somebody has replaced the forward of this instance, so it is not known what it computes.
    if "forward" in module.__dict__:
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return partial(_linear, module, put_off)
    if isinstance(module, _CONVOLUTIONS) and _is_plain(module):
        return partial(_convolution, module, put_off)
    return None


def _is_plain(module: nn.Module) -> bool:
    """Return whether a convolution runs torch's own forward with numeric padding."""
    forwards = [kind.forward for kind in _CONVOLUTIONS]
    return type(module).forward in forwards and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _linear(module: nn.Linear, put_off: PutOff, x: Tensor) -> Tensor:
    own = parameters_of(module)  # looking them up through the module takes longer
    weight, bias = own["weight"], own["bias"]
    if not torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    has_node = x.requires_grad or (bias is not None and bias.requires_grad)
    # Without a node there is nothing to hook. With saved-tensor hooks, as under activation checkpointing or offloading,
    # the input must be saved through autograd to pass these hooks.
    if not has_node or are_saved_tensors_hooked():
        return _Linear.apply(x, weight, bias, put_off)  # type: ignore[no-any-return, no-untyped-call]
    # Autograd sees a constant weight, so it neither computes the weight gradient nor saves the input for it.
    y = functional.linear(x, weight.detach(), bias)
    x, node = x.detach(), y.grad_fn
    if node is None:
        raise RuntimeError("a linear layer's output has no gradient, though its input has; a bug of par-pipeline")
    # The closure below keeps the input outside of autograd, which would have checked its version itself.
    version = version_of(x)

    def before(gradients: tuple[Tensor, ...]) -> None:
        if version_of(x) != version:  # autograd, which has not saved it, cannot tell
            raise RuntimeError(
                f"the input of a linear layer, {tuple(x.shape)}, was written into after its forward, so that its "
                "weight's gradient would be wrong; write into a copy"
            )
        put_off(Product.of_linear(weight, x, gradients[0]))

    # A hook before the node costs tiny layers a third less time than a function of Python's in its place.
    node.register_prehook(before)
    return y


def _convolution(module: Any, put_off: PutOff, x: Tensor) -> Tensor:
    # torch adds and removes the batch dim itself in this rare case; its gradient is computed in the first half.
    if x.dim() != module.weight.dim():  # one sample, without a batch
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    how = (module.stride, module.padding, module.dilation, False, (0,) * len(module.stride), module.groups)
    return _Convolution.apply(x, module.weight, module.bias, how, put_off)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    """A linear layer, [..., k] to [..., n], for inputs that autograd has no node for or that are kept elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff) -> Tensor:
        """Run the layer."""
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.put_off = weight, put_off  # the saved one is another object
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Put off the weight's gradient and compute the others."""
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        ctx.put_off(Product.of_linear(ctx.weight, x, gradient))
        x_gradient = gradient.matmul(weight.to(gradient.dtype)).to(x.dtype) if needs_x else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return x_gradient, None, bias_gradient, None


class _Convolution(torch.autograd.Function):
    """A convolution, [batch, channels, ...] to [batch, channels, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any, put_off: PutOff) -> Tensor:
        """Run the layer; `how` is what torch.convolution takes after the bias."""
        y: Tensor = torch.convolution(x, weight, bias, *how)
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.how, ctx.put_off = weight, how, put_off
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """Put off the weight's gradient and compute the others."""
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _, _ = ctx.needs_input_grad
        # Under autocast the saved tensors may have another dtype than the gradient, and convolution_backward requires
        # equal dtypes.
        cast_x, cast_weight, how = x.to(gradient.dtype), weight.to(gradient.dtype), ctx.how

        def gradients(*mask: bool) -> tuple[Tensor, Tensor, Tensor]:
            biases = [len(weight)]
            return torch.ops.aten.convolution_backward(gradient, cast_x, cast_weight, biases, *how, mask)  # type: ignore[no-any-return]

        # One call of convolution_backward computes any subset of the gradients, so the deferred call asks for the
        # weight's only.
        ctx.put_off(Product(ctx.weight, lambda: gradients(False, True, False)[1]))
        x_gradient, _, bias_gradient = gradients(needs_x, False, needs_bias)
        return x_gradient.to(x.dtype) if needs_x else None, None, bias_gradient if needs_bias else None, None, None
