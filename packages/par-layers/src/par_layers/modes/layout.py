"""Layouts: which axes cut which dims of an activation.

An activation is [batch, ..., features]; with a sequence it is [batch, sequence, features]. A mode is little more than
two layouts, the residual one that blocks add to, and the inner one between a column and a row layer, and the product
that leads from one to the other.
"""

from dataclasses import dataclass

from torch import Tensor

from .grid import Axes, Grid


@dataclass(frozen=True, kw_only=True)
class ActivationLayout:
    """The axes that cut each dim of an activation, the slowest first.

    Args:
        batch: Axes over which the first dim is cut.
        sequence: Axes over which the second dim is cut.
        features: Axes over which the last dim is cut.
        context: Axes over which the second dim was cut before the layers saw it: ids and targets are those of one of
            these ranks, and attention looks at the others.
    """

    batch: Axes = ()
    sequence: Axes = ()
    features: Axes = ()
    context: Axes = ()

    def describe(self) -> str:
        """The layout in words, for messages."""
        along = self.context + self.sequence
        cuts = [("batch", self.batch), ("sequence", along), ("features", self.features)]
        words = [f"{dim} over {' x '.join(axes)}" for dim, axes in cuts if axes]
        return f"cut by {', '.join(words)}" if words else "whole"

    @property
    def tokens(self) -> Axes:
        """Axes along which ranks see different tokens: a parameter used here has partial gradients along them.

        Those over `context` are not among them: gradients are averaged over them, as over data.
        """
        return self.batch + self.sequence


def check_features(x: Tensor, features: int, layout: ActivationLayout, who: str) -> None:
    """Raises ValueError, naming the layout that was expected, unless the last dim is this rank's part of the features.

    Args:
        x: The activation, [..., features].
        features: This rank's number of features.
        layout: The layout that the layer takes.
        who: The layer, for the message.
    """
    if x.shape[-1] != features:
        raise ValueError(
            f"{who} takes activations {layout.describe()}, here [..., {features}], but was given {list(x.shape)}; a "
            "column layer is closed by a row layer, and all layers of a model come from one layer set"
        )


def part(length: int, axes: Axes, grid: Grid, what: str) -> slice:
    """This rank's slice of a dim.

    Args:
        length: The length of the whole dim.
        axes: The axes over which it is cut.
        grid: This rank's place.
        what: What the length is, for the message.

    Raises:
        ValueError: The length does not divide by the ranks; the message names both.
    """
    parts = grid.size(axes)
    if length % parts:
        raise ValueError(f"{what} is {length}, which does not divide by {parts} ranks ({' x '.join(axes)}); pad it")
    share = length // parts
    start = grid.index(axes) * share
    return slice(start, start + share)
