"""Gradients of norms and embeddings in an existing model: exact sums of one sum for each lane of heads or tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from par_groups import attributes, exact_sum

from ..._collectives import pair
from ...modes.chunks import ChunkSums
from ...modes.grid import Axes, Grid
from ...modes.lanes import LaneRow, SequenceLanes
from ...modes.rules import ModeRules
from ..hooks import Hook
from ..linear import AdoptedColumn, AdoptedRow
from ..plans.styles import PartialGradient, Style
from ..survey.kinds import is_norm
from ..survey.survey import Survey


def make_gradients_exact_(
    modules: dict[str, nn.Module], found: Survey, grid: Grid, axes: Axes, rules: ModeRules
) -> None:
    """Make gradients exact in the norms and embeddings of a model; those of its Columns and Rows are exact already.

    Args:
        modules: The modules of the model, by name.
        found: Its survey in lanes.
        grid: Coordinates of this rank.
        axes: Axes of the tensor group; () for one rank.
        rules: Rules in lanes.
    """
    row = rules.row_product
    assert isinstance(row, LaneRow)  # noqa: S101 - the rules are in lanes
    adopted: set[nn.Module] = set()
    for name, module in modules.items():
        if module in adopted:
            continue
        # A shared module has several names, but needs its hooks once.
        adopted.add(module)
        if is_norm(module):
            cut = bool(axes) and found.is_cut_along_sequence(name)
            _adopt_norm(module, found.rules.get(name), grid, axes, replace(row, sequence=cut))
        elif isinstance(module, nn.Embedding) and rules.lanes.sequence > 1:
            module.__dict__["forward"] = partial(_look_up, module, rules)
            attributes.EXACT_GRADIENTS.set(module, True)
        elif isinstance(module, (AdoptedColumn, AdoptedRow)):
            attributes.EXACT_GRADIENTS.set(module, True)


def _adopt_norm(module: nn.Module, style: Style | None, grid: Grid, axes: Axes, row: LaneRow) -> None:
    hook: FusedNorm | NormByHand
    if isinstance(style, PartialGradient):
        hook = NormByHand(grid, axes, partial(_sum_heads, lanes=row.lanes, rows=row.rows))
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        hook = FusedNorm(grid, axes, row.sums)
    else:
        hook = NormByHand(grid, axes, row.sums.of_tokens)
    module.register_forward_pre_hook(hook.before)
    module.register_forward_hook(hook.after, always_call=True)


class NormByHand(Hook):
    """Hooks of a norm whose code multiplies its input by its parameters.

    Args:
        grid: This rank's coordinates.
        axes: Axes of the tensor group; () for one rank.
        sums: Function from a gradient of the input's shape to its sum over all dims but the last, in fp64.
    """

    def __init__(self, grid: Grid, axes: Axes, sums: Callable[[Tensor], Tensor]) -> None:
        super().__init__(grid, axes)
        self.sums = sums

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let the module's code see its parameters with the shape of its input."""
        shape: torch.Size = args[0].shape
        for name, parameter in module._parameters.items():
            if parameter is not None:
                # An attribute of the instance comes before a parameter, which stays registered. Its gradient has one
                # element for each of the input, so that autograd adds nothing up itself.
                module.__dict__[name] = pair(parameter, lambda t: t.expand(shape), self.sums)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Remove the views."""
        del args, output
        for name in module._parameters:
            module.__dict__.pop(name, None)


class FusedNorm(Hook):
    """Hooks of a LayerNorm or RMSNorm of torch, which sums the gradients of its parameters over all tokens itself.

    Args:
        grid: This rank's coordinates.
        axes: Axes of the tensor group; () for one rank.
        sums: Sums over the tokens of this rank.
    """

    def __init__(self, grid: Grid, axes: Axes, sums: ChunkSums) -> None:
        super().__init__(grid, axes)
        self.sums = sums

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let the module's code see no parameters."""
        del args
        # An attribute of the instance comes before a registered parameter, so torch's norm finds no weight and no
        # bias.
        module.__dict__.update(dict.fromkeys(module._parameters))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Apply the parameters to the output."""
        del args
        for name in module._parameters:
            module.__dict__.pop(name, None)
        if output is None:  # the forward has raised
            return None
        parameters = module._parameters
        return self.sums.scale(output, parameters["weight"], parameters.get("bias"))


def _sum_heads(gradient: Tensor, lanes: int, rows: SequenceLanes) -> Tensor:
    """Return the exact sum of all rows of a gradient [B, s, heads, features], whose heads and tokens are in lanes."""
    pieces = gradient.unflatten(-2, (lanes, -1)).unbind(-3)
    of_lanes = [block for piece in pieces for block in rows.blocks(piece)]
    return exact_sum([block.contiguous().float().sum(0) for block in of_lanes])


def _look_up(module: nn.Embedding, rules: ModeRules, ids: Tensor) -> Tensor:
    return rules.token_parameters.look_up(ids, module.weight, module.padding_idx)
