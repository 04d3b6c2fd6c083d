"""The factor of the main loss, passed to the routers of every pipeline stage, whose own losses need it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .router import Router
from .step import RouterLosses


class LossFactor:
    """The factor of the main loss, passed to the routers of a model in each backward pass.

    Only the last stage of a pipeline computes the main loss. Therefore a scalar travels with the activations between
    stages: its gradient is the factor, and arrives at each stage before the gradients of its routers are computed.

    Args:
        model: This rank's part of a model.
        travels: Whether the scalar travels, because a stage of the pipeline has losses of routers.
        device: The device of this rank.
    """

    def __init__(self, model: nn.Module, *, travels: bool, device: torch.device) -> None:
        self.losses, self.travels, self._device = RouterLosses(model), travels, device
        self.is_needed = travels or adds_losses(model)
        self._last: Tensor | None = None  # the scalar at the last stage, for the loss that follows

    def into(self, arguments: tuple[Any, ...], *, is_first: bool) -> tuple[tuple[Any, ...], Tensor]:
        """Separate the scalar from the arguments of a stage; the first stage makes it."""
        if not is_first:
            return arguments[:-1], arguments[-1]
        return arguments, torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())

    def out_of(self, output: Any, number: Tensor, *, is_last: bool) -> Any:
        """Append the scalar to the output of a stage. It is made last, so that backward reaches it first."""
        if is_last:
            self._last = number
            return output
        number = self._read(number)
        return (*output, number) if type(output) is tuple else (output, number)

    def of(self, loss: Tensor) -> Tensor:
        """Return the loss with a backward that passes its gradient to the routers before it reaches any of them."""
        if not self.is_needed or not loss.requires_grad:
            return loss
        number, self._last = self._last, None
        joined: Tensor = _Join.apply(loss, number, self.losses)  # type: ignore[no-untyped-call]
        return joined

    def _read(self, number: Tensor) -> Tensor:
        if not number.requires_grad:
            return number
        read: Tensor = _Join.apply(number, None, self.losses)  # type: ignore[no-untyped-call]
        return read


class _Join(torch.autograd.Function):
    """The identity of a loss. Its gradient is the factor of the routers' losses, and the gradient of the scalar."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, number: Tensor | None, losses: RouterLosses) -> Tensor:
        ctx.losses, ctx.number = losses, None if number is None else (number.dtype, number.device)
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        ctx.losses.scale = gradient
        if ctx.number is None:
            return gradient, None, None
        dtype, device = ctx.number
        return gradient, gradient.reshape(()).to(device, dtype), None


def adds_losses(model: nn.Module) -> bool:
    """Return whether routers of a model add losses to the main loss."""
    return any(isinstance(module, Router) and module.balance.has_loss for module in model.modules())
