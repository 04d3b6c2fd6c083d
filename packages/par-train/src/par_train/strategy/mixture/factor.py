"""What the main loss is multiplied by, for the losses of routers, on every stage of a pipeline."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from par_layers import Router, RouterLosses


class LossFactor:
    """Tells the routers of a model what its main loss is multiplied by, in each backward.

    A stage of a pipeline that does not compute the loss cannot know: so where a stage has losses of its routers, a
    number of one element travels with what stages give each other, whose gradient is that factor.

    Args:
        model: What this rank has of a model.
        travels: Whether the number travels, since some stage of the pipeline has such losses.
        device: Where this rank computes.
    """

    def __init__(self, model: nn.Module, *, travels: bool, device: torch.device) -> None:
        self.losses, self.travels, self._device = RouterLosses(model), travels, device
        self.is_needed = travels or adds_losses(model)
        self._last: Tensor | None = None  # the number that has come to the last stage, for the loss that follows

    def into(self, arguments: tuple[Any, ...], *, is_first: bool) -> tuple[tuple[Any, ...], Tensor]:
        """What a stage is called with, without the number; and the number, which begins at the first stage."""
        if not is_first:
            return arguments[:-1], arguments[-1]
        return arguments, torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())

    def out_of(self, output: Any, number: Tensor, *, is_last: bool) -> Any:
        """What a stage gives, with the number, which is made last, so that backward comes to it first."""
        if is_last:
            self._last = number
            return output
        number = self._read(number)
        return (*output, number) if type(output) is tuple else (output, number)

    def of(self, loss: Tensor) -> Tensor:
        """The loss, whose backward tells the routers its gradient, before it comes to any of them."""
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
    """Identity of a loss; its gradient is what routers' losses are multiplied by, and is the number's too."""

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
    """Whether routers of a model add losses to the main one."""
    return any(isinstance(module, Router) and module.balance.has_loss for module in model.modules())
