"""Dropouts of an existing model, which drop the same elements on any number of tensor ranks."""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from ..layers.dropout import dropped
from ..modes.grid import Axes, Grid
from ..modes.layout import Layout
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

    layout: Layout
    """How activations lie here, outside a region."""

    sequence: CutSequence | None
    """Says whether activations here are cut along the sequence, as the layout has it; None where they never are."""

    def forward(self, x: Tensor) -> Tensor:
        """The activations, with elements dropped in training."""
        if not self.training or self.p == 0.0:
            return x
        inside = self.region is not None and self.region.inside
        if self.p == 1.0 or (inside and self.region is not None and self.region.inner_dropout):
            return functional.dropout(x, self.p, training=True, inplace=self.inplace)
        if inside:
            return dropped(x, self.p, Layout(features=self.axes), self.grid)
        is_whole = self.sequence is not None and not self.sequence.is_cut(self)
        return dropped(x, self.p, replace(self.layout, sequence=()) if is_whole else self.layout, self.grid)


def adopt_dropout_(
    dropout: nn.Dropout,
    grid: Grid,
    axes: Axes,
    region: Region | None,
    *,
    layout: Layout,
    sequence: CutSequence | None = None,
) -> None:
    """Makes a dropout one that drops the same elements on any number of ranks, in place.

    Args:
        dropout: torch's dropout.
        grid: This rank's place.
        axes: The axes of the tensor group; () for one rank.
        region: The region around it, or None.
        layout: How activations lie here, outside a region.
        sequence: Says whether they are cut along the sequence; None where they never are.
    """
    dropout.__class__ = AdoptedDropout
    dropout.__dict__.update(grid=grid, axes=axes, region=region, layout=layout, sequence=sequence)
