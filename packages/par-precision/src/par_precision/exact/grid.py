"""Gradients rounded to multiples of 2**-50, whose fp64 sums are exact while they stay below 8."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from par_groups import EXACT_LIMIT, attributes, on_grid


class GridHooks:
    """Hooks that round the gradients of each backward pass to the grid before anybody adds them up.

    A parameter that several modules share has a gradient from each of them, which autograd adds in the parameter's
    dtype. These gradients are rounded one by one, because the modules may run on different ranks of a pipeline.

    Args:
        module: The module, before its parameters are packed or moved. Its trained parameters get gradients in fp64.
        losses: Number of losses of a step, over all ranks.
    """

    def __init__(self, module: nn.Module, losses: int) -> None:
        self._limit = EXACT_LIMIT / losses
        self._largest: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float64
                # A hook of the tensor, not of its accumulation: a pipeline that splits backward adds several
                # microbatches up before it accumulates, and sums of numbers off the grid would depend on their order.
                parameter.register_hook(self._hook_of(name))
        for owner, names in _sharing(module).items():
            # A view has no `grad_dtype` of its own: autograd would round its gradient to the parameter's dtype.
            if attributes.EXACT_GRADIENTS.of(owner):
                continue
            hooks = {own: self._hook_of(name) for own, name in names.items()}
            # Not a forward hook: a pipeline that splits backward would compute the gradient of an unchanged linear
            # layer itself, later, and add it to the gradients of other uses before any hook sees it.
            owner.__dict__["forward"] = partial(_call_with_views, owner, owner.forward, hooks)

    def _hook_of(self, name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            # Not `vector_norm`, whose infinity norm is 20 times slower on a CPU.
            largest = gradient.detach().abs().amax()
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


class _RoundedUse(torch.autograd.Function):
    """A view of a parameter for one use, whose gradient is rounded before autograd adds it to those of other uses."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, round_to_grid: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the view."""
        ctx.round_to_grid = round_to_grid
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the rounded gradient in fp64, which the parameter's `grad_dtype` keeps."""
        return ctx.round_to_grid(gradient), None


def _sharing(module: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Return the modules whose trained parameters have several names, and the first name of each of these."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    found: dict[nn.Module, dict[str, str]] = {}
    for used in names.values():
        for name in used if len(used) > 1 else ():
            path, _, own = name.rpartition(".")
            found.setdefault(module.get_submodule(path), {})[own] = used[0]
    return found


def _call_with_views(
    module: nn.Module,
    forward: Callable[..., Any],
    hooks: Mapping[str, Callable[[Tensor], Tensor]],
    *args: Any,
    **keywords: Any,
) -> Any:
    """Run a module's forward, in which it sees a view of its own of each shared parameter."""
    # Looked up in each call, because a pipeline that splits backward replaces parameters during a step.
    views = {
        name: _RoundedUse.apply(getattr(module, name), hook)  # type: ignore[no-untyped-call]
        for name, hook in hooks.items()
    }
    # An instance's own attributes come before its parameters, which stay registered.
    module.__dict__.update(views)
    try:
        return forward(*args, **keywords)
    finally:
        for name in views:
            del module.__dict__[name]
