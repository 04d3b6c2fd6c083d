"""An optimizer that needs whole matrices: Muon, in the dtype of the parameters; SGD with momentum for all else."""

from typing import Any

import torch
from torch import Tensor, nn


class MuonAndMomentum(torch.optim.Optimizer):
    """Groups with `matrices=True` are stepped by a matrix whose singular values are near one.

    Args:
        model: The model; its weights of two dims are matrices.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        matrices = {"params": [each for each in parameters if each.ndim == 2], "matrices": True}
        rest = {"params": [each for each in parameters if each.ndim != 2], "matrices": False}
        super().__init__([matrices, rest], {"lr": 0.01, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(_orthogonal(momentum) if group["matrices"] else momentum, alpha=group["lr"])


def _orthogonal(matrix: Tensor) -> Tensor:
    """By five steps of Newton and Schulz."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
