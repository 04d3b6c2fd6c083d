"""Hooks on inputs and outputs of modules that keep their own class: embeddings, experts, and a few others.

Every hook here is an object with a grid, so that a deep copy of a model has the same ones.
"""

from typing import Any, Self

from torch import Tensor, nn

from .._collectives import copy_last_to, copy_to, gather_from, reduce_from
from ..layers.embedding import check_ids
from ..modes.grid import Axes, Grid


class Hook:
    """A pair of hooks of a module, in the names of torch's two kinds.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
    """

    def __init__(self, grid: Grid, axes: Axes) -> None:
        self.grid, self.axes = grid, axes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: it stores nothing about a module, except while the module runs."""
        return self

    def copy(self, x: Tensor) -> Tensor:
        """Return the input unchanged; backward: all-reduce over the tensor group."""
        return copy_to(x, self.grid.group(self.axes))

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce over the tensor group; backward: identity."""
        return reduce_from(x, self.grid.group(self.axes))


class ShardedVocabularyHook(Hook):
    """An embedding whose rows are cut: each rank looks up its own ids, the rest gives zeros, and the sum is everything.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
        vocabulary: Number of ids.
        rows: Number of rows on this rank, with padding.
    """

    def __init__(self, grid: Grid, axes: Axes, vocabulary: int, rows: int) -> None:
        super().__init__(grid, axes)
        self.vocabulary, self.rows = vocabulary, rows
        self.elsewhere: Tensor | None = None  # between the two hooks of one call

    @property
    def first(self) -> int:
        """The first id of this rank."""
        return self.grid.index(self.axes) * self.rows

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return local ids in place of ids; 0 for ids of other ranks."""
        del module
        ids, *rest = args
        check_ids(ids, self.vocabulary)
        local = ids - self.first
        self.elsewhere = (local < 0) | (local >= self.rows)
        return (local.masked_fill(self.elsewhere, 0), *rest)

    def after(self, module: nn.Module, args: tuple[Any, ...], rows: Tensor) -> Tensor:
        """Return the sum over the ranks of the rows that each rank has found."""
        del module, args
        elsewhere, self.elsewhere = self.elsewhere, None
        if elsewhere is None:
            raise RuntimeError("an embedding's hook was called without the one before it; a bug of par-layers")
        # A negative zero: the sum with it preserves a zero of either sign.
        return self.sum(rows.masked_fill(elsewhere.unsqueeze(-1), -0.0))


class CutFeatures(Hook):
    """An embedding whose features are cut, and whose output is gathered."""

    def after(self, module: nn.Module, args: tuple[Any, ...], part: Tensor) -> Tensor:
        """Return the features of all ranks."""
        del module, args
        return gather_from(part, self.grid.group(self.axes), -1)


class CutExperts(Hook):
    """Experts of which each rank has a part of every one: activations and their weights are copied in, the sum out.

    Routed ones, or others that are a module with packed weights too.
    """

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy every tensor that a gradient may go back to."""
        del module
        return tuple(map(self._entered, args)), {key: self._entered(value) for key, value in kwargs.items()}

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the sum over the ranks."""
        del module, args
        return self.sum(output)

    def _entered(self, value: Any) -> Any:
        return self.copy(value) if isinstance(value, Tensor) and value.requires_grad else value


class SharedExpert(Hook):
    """A module among experts that all ranks compute alike: its input is divided by their number, before the sum."""

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the input divided by the number of ranks."""
        del module
        # The module is the identity. The sum of the experts' outputs over the ranks makes up for the division, and in
        # backward the sum at the experts' entry does.
        return (args[0] / self.grid.size(self.axes), *args[1:])


class PartialOutput(Hook):
    """A module whose output is a partial sum."""

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the sum over the ranks."""
        del module, args
        return self.sum(output)


class LatentOutput(Hook):
    """A projection whose last outputs go around a Column; the gradient of these is summed.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
        around: Number of these last outputs.
    """

    def __init__(self, grid: Grid, axes: Axes, around: int) -> None:
        super().__init__(grid, axes)
        self.around = around

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the output unchanged; in backward the gradient of its last features is summed over the ranks."""
        del module, args
        return copy_last_to(output, self.grid.group(self.axes), self.around)
