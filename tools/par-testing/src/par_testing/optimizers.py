"""Optimizers of which a test needs something that torch's own do not do."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class NormScaled(torch.optim.Optimizer):
    """Steps of the same length for each tensor, as LARS makes."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - called without one
        """Step along the direction of each gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class Shampoo(torch.optim.Optimizer):
    """Divides a matrix by the fourth roots of the second moments of its rows and of its columns."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05, eps: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - called without one
        """Step each matrix."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                rows, columns = parameter.shape
                if not state:
                    state["rows"] = group["eps"] * torch.eye(rows, dtype=parameter.dtype, device=parameter.device)
                    state["columns"] = group["eps"] * torch.eye(columns, dtype=parameter.dtype, device=parameter.device)
                state["rows"].add_(gradient @ gradient.T)
                state["columns"].add_(gradient.T @ gradient)
                parameter.sub_(_root(state["rows"]) @ gradient @ _root(state["columns"]), alpha=group["lr"])


class Drawing(torch.optim.SGD):
    """Adds noise from torch's own generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Add noise to each gradient, and step."""
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(torch.randn(each.shape, device=each.device))
        return super().step(closure)


def _root(matrix: Tensor) -> Tensor:
    """Return one over the fourth root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    result: Tensor = vectors * values.pow(-0.25) @ vectors.T
    return result
