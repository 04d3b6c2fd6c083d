"""Gradients of parameters that several tensor lanes use: exact sums of one sum for each lane."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import on_grid

from ..._collectives import finish, pair, start_all_reduce
from ...modes.grid import Axes, Grid
from ..hooks import Hook


class LaneGradients(Hook):
    """Hooks of a norm of heads: its weight's gradient is summed lane by lane, exactly, and over the tensor group.

    Args:
        grid: This rank's coordinates.
        axes: Axes of the tensor group; () for one rank.
        lanes: Number of lanes on this rank.
    """

    def __init__(self, grid: Grid, axes: Axes, lanes: int) -> None:
        super().__init__(grid, axes)
        self.lanes = lanes

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let the module's code see its parameters with the shape of its input [..., heads, features]."""
        shape: torch.Size = args[0].shape
        group = self.grid.group(self.axes) if self.axes else None

        def backward(gradient: Tensor) -> Tensor:
            return _summed(gradient.unflatten(-2, (self.lanes, -1)).unbind(-3), group)

        for name, parameter in module._parameters.items():
            if parameter is not None:
                # An attribute of the instance comes before a parameter, which stays registered. Its gradient has one
                # element for each of the input, so that autograd adds nothing up itself.
                module.__dict__[name] = pair(parameter, lambda t: t.expand(shape), backward)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Remove the views."""
        del args, output
        for name in module._parameters:
            module.__dict__.pop(name, None)


def _summed(pieces: tuple[Tensor, ...], group: dist.ProcessGroup | None) -> Tensor:
    """Return the exact sum of all rows of pieces [..., features] of one shape, over the ranks of a group, in fp64.

    Args:
        pieces: The pieces on this rank. The sum inside a piece depends on its shape only.
        group: The ranks that have other pieces; None for no other.
    """
    sums = [on_grid(piece.reshape(-1, piece.shape[-1]).contiguous().float().sum(0)) for piece in pieces]
    total = torch.stack(sums).sum(0)
    return total if group is None else finish(start_all_reduce(total, group))
