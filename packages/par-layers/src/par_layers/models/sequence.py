"""Decision at the beginning of a forward whether activations between the layers are split along the sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._collectives import copy_to
from ..modes.grid import Axes, Grid


class CutSequence:
    """Decision whether one forward of a model splits activations along the sequence, for all its hooks and Rows.

    Activations are split if backward may need gradients: in training, and if autograd records. The decision is made
    once for the model. A layer that decided by its own mode would treat full activations as split ones if its mode
    differs from the model's, such as a frozen layer in `eval()` or a dropout that stays active.
    """

    def __init__(self) -> None:
        self._cut: bool | None = None  # None outside of a forward of the model
        self._decided_by: nn.Module | None = None
        self._stays_whole = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: it has state only while a forward runs."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def begin(self, module: nn.Module) -> None:
        """Decide for the forward of a module, unless a module around it has decided.

        Args:
            module: The model, or the module that holds the layers and may be called without the model's head.
        """
        if self._decided_by is None or self._decided_by is module:
            self._cut, self._decided_by = _may_need_gradients(module) and not self._stays_whole, module

    def end(self, module: nn.Module) -> None:
        """End the decision, if this module's forward has made it."""
        if self._decided_by is module:
            self._cut = self._decided_by = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Disable splitting inside the context, in training too: one token at a time does not divide by the ranks."""
        before, self._stays_whole = self._stays_whole, True
        try:
            yield
        finally:
            self._stays_whole = before

    def is_cut(self, module: nn.Module) -> bool:
        """Return whether activations are split now.

        Args:
            module: The module that asks. Outside of a forward its own mode counts: recomputation for backward runs
                there, with gradients, as do layers that are called alone.
        """
        return _may_need_gradients(module) if self._cut is None else self._cut


class Begins:
    """Hooks of a module whose forward runs the layers.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
        sequence: Decision that the hooks make.
        layers: Number of layers.
    """

    def __init__(self, grid: Grid, axes: Axes, sequence: CutSequence, layers: int) -> None:
        self.grid, self.axes, self.sequence, self.layers = grid, axes, sequence, layers

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: it stores no module."""
        return self

    def before(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Decide. Split the features of images that the module adds to its tokens between layers, as Qwen3-VL does.

        Raises:
            ValueError: The module got a mask of all tokens for its own code, but no features that are added behind
                layers other than the last one.
        """
        self.sequence.begin(module)
        if not self.sequence.is_cut(module):
            return None
        for name, x in keywords.items():
            if isinstance(x, Tensor) and x.dtype is torch.bool and x.dim() == 2 and name != "attention_mask":
                return args, {**keywords, **self._split(type(module).__name__, name, x, keywords)}
        return None

    def _split(self, kind: str, name: str, mask: Tensor, keywords: dict[str, Any]) -> dict[str, Any]:
        """Return a mask of tokens and the features of these tokens, as far as they are on this rank."""
        lists = {key: x for key, x in keywords.items() if isinstance(x, list) and x}
        lists = {key: x for key, x in lists.items() if all(isinstance(each, Tensor) and each.dim() == 2 for each in x)}
        ranks = self.grid.size(self.axes)
        # The last layer gathers the sequence, so that what is added behind it is added to all tokens.
        if not lists or any(len(x) >= self.layers for x in lists.values()) or mask.shape[1] % ranks:
            raise ValueError(
                f"{name} is {list(mask.shape)}: {kind} changes these tokens between its layers, of which each rank has "
                "some; use sequence_parallel=False, or batches of text"
            )
        mine, group = self.grid.index(self.axes), self.grid.group(self.axes)
        numbers = (mask.flatten().cumsum(0) - 1).view(mask.shape)
        own, local = (each.chunk(ranks, 1)[mine] for each in (numbers, mask))
        # Each rank uses some of the features, so that their gradient is a sum over the ranks.
        parts = {key: [copy_to(each, group)[own[local]] for each in x] for key, x in lists.items()}
        return {name: local, **parts}

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the decision."""
        del args, output
        self.sequence.end(module)


def _may_need_gradients(module: nn.Module) -> bool:
    return module.training or torch.is_grad_enabled()
