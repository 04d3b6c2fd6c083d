"""What a model that was cut in place knows about it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from par_groups import sharding_of

from .._layer_set import LayerSet
from .linear import GatheredLogits
from .loss import VocabularyLoss
from .plans.styles import Style

LogitsLayout = Literal["auto", "whole", "cut"]

KEPT_AS = "par_parallel"
"""The attribute of a model that was cut in place."""


@dataclass(frozen=True)
class Parallelization:
    """How a model was cut in place; `parallelization_of` gives it.

    Args:
        plan: The style of every module and parameter that has one, by its name.
        unmatched: Patterns of the model's own plan that match nothing in it.
        layers: The layer set over whose tensor group it is cut.
        logits: Whether the model's logits are cut over the vocabulary: "cut" or "whole" always, "auto" where labels
            come with them in training.
        vocabulary: Number of classes of the logits; None for a model that has none.
        table: Lines of what was cut: name, style, whole shape, and this rank's.
        over: What computes losses; None for a model without logits.
        digest: What all ranks agreed on.
        head: What the output embedding is told; None for a model without one that is cut.
    """

    plan: dict[str, Style]
    unmatched: tuple[str, ...]
    layers: LayerSet
    logits: LogitsLayout
    vocabulary: int | None
    table: tuple[tuple[str, ...], ...]
    over: VocabularyLoss | None
    digest: str
    head: GatheredLogits | None = None

    def describe(self) -> str:
        """A table of what was cut, alike layers in one line."""
        header = ("parameter", "style", "whole", "on this rank", "summed over")
        rows = [header, *dict.fromkeys(self.table)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.unmatched:
            lines.append(f"rules that match nothing here: {', '.join(self.unmatched)}")
        return "\n".join(lines)

    def gather(self, logits: Tensor) -> Tensor:
        """Whole logits [..., V], of cut ones; backward: this rank's part of the gradient, which all ranks have alike.

        Args:
            logits: What the model gave, [..., V/p] or [..., V].

        Raises:
            TypeError: The model has no logits over a vocabulary.
        """
        return self._losses.whole(logits)

    def cross_entropy(self, logits: Tensor, labels: Tensor, shift: bool = True) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all tokens that count, and their number, which other ranks' sums may be added to.

        Args:
            logits: What the model gave, [..., V/p] or [..., V].
            labels: Classes [...], int64; -100 does not count.
            shift: Whether the logits of a token are for the label of the next one.

        Raises:
            TypeError: The model has no logits over a vocabulary.
            ValueError: A label is no class; on an accelerator it is a device-side assertion.
        """
        return self._losses.summed(logits, labels, shift=shift)

    @contextmanager
    def cut_logits(self) -> Iterator[None]:
        """A context in which logits stay cut over the vocabulary, for a loss that `cross_entropy` computes of them."""
        before = self.head is not None and self.head.held
        if self.head is not None:
            self.head.held = True
        try:
            yield
        finally:
            if self.head is not None:
                self.head.held = before

    @property
    def _losses(self) -> VocabularyLoss:
        if self.over is None:
            raise TypeError(
                "`gather` and `cross_entropy` need logits over a vocabulary, which this model lacks; compute its loss "
                "from its outputs, as before"
            )
        return self.over


def parallelization_of(model: nn.Module) -> Parallelization | None:
    """How a model was cut in place; None if it was not.

    Args:
        model: A model that was given to `parallelize`, or a module that holds one.
    """
    return next((found for module in model.modules() if (found := module.__dict__.get(KEPT_AS)) is not None), None)


def table_of(model: nn.Module, plan: dict[str, Style]) -> tuple[tuple[str, ...], ...]:
    """Lines about the parameters of a model that was cut, numbers in their names written as `*`.

    Args:
        model: The model.
        plan: The style of every name.
    """
    lines = []
    for name, parameter in model.named_parameters():
        style = plan.get(name) or plan.get(name.rpartition(".")[0])
        record = sharding_of(parameter)
        over = sorted({axis for box in record.boxes for axis in box.sum_over})
        cells: list[Any] = [
            re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name),
            "whole" if style is None else style,
            list(record.shape),
            list(parameter.shape),
            " x ".join(over),
        ]
        lines.append(tuple(map(str, cells)))
    return tuple(lines)
