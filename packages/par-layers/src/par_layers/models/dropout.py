"""Dropouts of an existing model, which drop the same elements on any number of tensor ranks."""

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from par_groups import agree, check_alike

from ..layers.dropout import dropped
from ..modes.grid import Axes, Grid
from ..modes.layout import ActivationLayout
from .hooks import Hook
from .regions import Region
from .sequence import CutSequence


class AdoptedDropout(nn.Dropout):
    """torch's dropout, with a mask that is a function of the place in the whole activation.

    Between the entry and the Row of an attention, which has other heads on every rank, it is torch's own, with random
    numbers of this rank.
    """

    grid: Grid
    axes: Axes

    region: Region | None
    """The region around it."""

    layout: ActivationLayout
    """How activations lie here, outside a region."""

    sequence: CutSequence | None
    """Says whether activations here are cut along the sequence, as the layout has it; None where they never are."""

    @property
    def masks_by_position(self) -> bool:
        """Whether the mask is the same function of positions on every rank: not where attention weights are dropped."""
        return self.p < 1.0 and (self.region is None or not self.region.inner_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of the activations in training."""
        if not self.training or self.p == 0.0:
            return x
        inside = self.region is not None and self.region.inside
        if self.p == 1.0 or (inside and self.region is not None and self.region.inner_dropout):
            return functional.dropout(x, self.p, training=True, inplace=self.inplace)
        # Between a Column and its Row the features are this rank's part.
        if inside:
            return dropped(x, self.p, ActivationLayout(features=self.axes), self.grid)
        # The layout is that of a split sequence, but a forward without gradients leaves activations whole.
        is_whole = self.sequence is not None and not self.sequence.is_cut(self)
        return dropped(x, self.p, replace(self.layout, sequence=()) if is_whole else self.layout, self.grid)


class SameDraws(Hook):
    """A look at torch's generator in the first forward in training, for the tensor ranks must draw the same numbers.

    Activations that every rank has whole would lose other elements on each rank, and be different copies from then on.
    Scripts that seed by rank do that. It is one small all-gather in all.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
    """

    def __init__(self, grid: Grid, axes: Axes) -> None:
        super().__init__(grid, axes)
        self.has_looked = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Compares the states of the generators.

        Raises:
            ValueError: They differ; on every rank.
        """
        del args
        if self.has_looked or not module.training or torch.compiler.is_compiling():
            return
        state = hashlib.sha256(torch.default_generator.get_state().numpy().tobytes()).hexdigest()
        check_alike(
            agree(None, state, self.grid.group(self.axes)),
            "random numbers for dropout",
            remedy="call torch.manual_seed with the same seed on all ranks of a tensor group, such as seed + data rank",
            show=False,
        )
        self.has_looked = True


def adopt_dropout_(
    dropout: nn.Dropout,
    grid: Grid,
    axes: Axes,
    region: Region | None,
    *,
    layout: ActivationLayout,
    sequence: CutSequence | None = None,
) -> None:
    """Make a dropout drop the same elements on any number of ranks, in place.

    Args:
        dropout: torch's dropout.
        grid: Coordinates of this rank.
        axes: Axes of the tensor group; () for one rank.
        region: Region around the dropout, or None.
        layout: Layout of the activations outside a region.
        sequence: Decision whether activations are split along the sequence; None: they never are.
    """
    dropout.__class__ = AdoptedDropout
    dropout.__dict__.update(grid=grid, axes=axes, region=region, layout=layout, sequence=sequence)


def has_dropout(module: nn.Module) -> bool:
    """Return whether an attention drops weights, by a probability attribute or by a child dropout."""
    rates = (value for key, value in vars(module).items() if "dropout" in key and isinstance(value, (int, float)))
    return any(rate > 0 for rate in rates) or any(
        isinstance(child, nn.Dropout) and child.p > 0 for child in module.children()
    )
