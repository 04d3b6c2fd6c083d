"""Decision at the beginning of a forward whether activations between the layers are split along the sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn


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
        sequence: Decision that the hooks make.
    """

    def __init__(self, sequence: CutSequence) -> None:
        self.sequence = sequence

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: it stores no module."""
        return self

    def before(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Decide.

        Raises:
            ValueError: The module got a mask of all tokens for its own code, which changes activations between layers.
        """
        del args
        # Qwen3-VL adds features of images to the tokens of images between its layers.
        for name, x in keywords.items() if _may_need_gradients(module) else ():
            if isinstance(x, Tensor) and x.dtype is torch.bool and x.dim() == 2 and name != "attention_mask":
                raise ValueError(
                    f"{name} is {list(x.shape)}: {type(module).__name__} changes these tokens between its layers, of "
                    "which each rank has some; use sequence_parallel=False, or batches of text"
                )
        self.sequence.begin(module)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the decision."""
        del args, output
        self.sequence.end(module)


def _may_need_gradients(module: nn.Module) -> bool:
    return module.training or torch.is_grad_enabled()
