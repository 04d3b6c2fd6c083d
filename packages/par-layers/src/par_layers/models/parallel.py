"""Description of a model that `parallelize` sharded in place: plan, layouts, and functions for its logits."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from par_groups import sharding_of

from .._layer_set import LayerSet
from .linear import GatheredLogits
from .loss import VocabularyLoss, shard_of
from .plans.styles import Style

LogitsLayout = Literal["auto", "full", "sharded"]

KEPT_AS = "par_parallel"
"""Attribute of a model that was sharded in place."""


@dataclass(frozen=True)
class Parallelization:
    """Sharding of a model in place, as `parallelization_of` returns it.

    Args:
        plan: Style of each module and parameter that has one, by name.
        unmatched: Patterns of the model's own plan without a match.
        layers: Layer set whose tensor group shards the model.
        logits: Layout of the logits: "sharded" over the vocabulary, "full" for gathered, and "auto" for gathered,
            except that a forward in training with labels gathers them when they are read.
        vocabulary: Size of the logits' last dim; None for a model without logits.
        table: Lines about the parameters: name, style, full shape, local shape, and axes of partial gradients.
        over: Loss functions for logits that are sharded over the vocabulary; None for a model without logits.
        digest: Hash that all ranks agreed on.
        head: Switch of the output embedding, which gathers logits or not; None without a sharded output embedding.
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
        """Return a table of the parameters, with one line for identical layers."""
        header = ("parameter", "style", "whole", "on this rank", "summed over")
        rows = [header, *dict.fromkeys(self.table)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.unmatched:
            lines.append(f"rules that match nothing here: {', '.join(self.unmatched)}")
        return "\n".join(lines)

    def gather(self, logits: Tensor) -> Tensor:
        """All-gather logits to [..., V]; backward: this rank's part of the gradient, which is identical on all ranks.

        Args:
            logits: Logits of the model, [..., V/p] or [..., V].

        Raises:
            TypeError: The model has no logits over a vocabulary.
        """
        return self._losses.whole(shard_of(logits))

    def cross_entropy(self, logits: Tensor, labels: Tensor, shift: bool = True) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all tokens and the number of these tokens.

        Both are sums, so that you can add the sums of other data-parallel or sequence ranks before you divide.

        Args:
            logits: Logits of the model, [..., V/p] or [..., V].
            labels: Classes [...], int64; -100 does not count.
            shift: Whether the logits of a token predict the label of the next token.

        Raises:
            TypeError: The model has no logits over a vocabulary.
            ValueError: A label is no class. On an accelerator this is a device-side assertion.
        """
        return self._losses.summed(shard_of(logits), labels, shift=shift)

    @contextmanager
    def sharded_logits(self) -> Iterator[None]:
        """Leave logits sharded over the vocabulary inside a `with` block, for the loss by `cross_entropy`."""
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
    """Return how a model was sharded in place; None if it was not.

    Args:
        model: A model that you passed to `parallelize`, or a module that contains one.
    """
    return next((found for module in model.modules() if (found := module.__dict__.get(KEPT_AS)) is not None), None)


def table_of(model: nn.Module, plan: dict[str, Style]) -> tuple[tuple[str, ...], ...]:
    """Return lines about the parameters of a sharded model, with `*` for numbers in their names.

    Args:
        model: The model.
        plan: Style of each module and parameter, by name.
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
