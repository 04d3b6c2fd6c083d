"""Layouts of activations: the axes that split each dim.

An activation is [batch, ..., features]; with a sequence it is [batch, sequence, features]. A mode mainly consists of
two layouts and the matmul between them. The residual layout is the layout of the residual stream, and the inner layout
is the layout between a column and a row layer.
"""

from dataclasses import dataclass

from torch import Tensor

from .grid import Axes, Grid


@dataclass(frozen=True, kw_only=True)
class ActivationLayout:
    """Axes that split each dim of an activation, the slowest axis first.

    Args:
        batch: Axes that split the first dim.
        sequence: Axes that split the second dim.
        features: Axes that split the last dim.
        context: Axes of context parallelism, which split the second dim before the layers. A rank's ids and targets are
            already split over these axes, and only attention communicates over them.
    """

    batch: Axes = ()
    sequence: Axes = ()
    features: Axes = ()
    context: Axes = ()

    def describe(self) -> str:
        """Describe the layout in words, for messages."""
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
    """Raise ValueError, naming the layout that was expected, unless the last dim is this rank's part of the features.

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
    """Return this rank's slice of a dim.

    Args:
        length: Size of the full dim.
        axes: Axes that split the dim.
        grid: Coordinates of this rank.
        what: Description of the dim, for the message.

    Raises:
        ValueError: The length does not divide by the ranks; the message names both.
    """
    parts = grid.size(axes)
    if length % parts:
        raise ValueError(f"{what} is {length}, which does not divide by {parts} ranks ({' x '.join(axes)}); pad it")
    share = length // parts
    # The index is row-major over the axes, so a dim that several axes split is split by the slowest one first.
    start = grid.index(axes) * share
    return slice(start, start + share)
