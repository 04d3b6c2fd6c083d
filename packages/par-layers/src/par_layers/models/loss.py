"""The loss of an existing model, over logits that may be cut over the vocabulary."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._collectives import gather_from
from ..layers.losses import LossOptions, check_targets, losses_of_cut_vocabulary
from ..modes.grid import Axes, Grid


@dataclass(frozen=True)
class VocabularyLoss:
    """Cross entropies over a vocabulary that is perhaps cut.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group; () for one rank.
        vocabulary: Number of classes.
    """

    grid: Grid
    axes: Axes
    vocabulary: int

    def whole(self, logits: Tensor) -> Tensor:
        """Return full logits [..., V] for sharded or full logits."""
        if not self.is_sharded(logits):
            return logits
        gathered = gather_from(logits, self.grid.group(self.axes), -1)
        return gathered[..., : self.vocabulary].contiguous()

    def summed(self, logits: Tensor, labels: Tensor, *, shift: bool, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all tokens that count, in fp32 at least, and their number.

        Args:
            logits: [..., V], or this rank's [..., V/p].
            labels: Classes [...], int64, whole.
            shift: Whether the logits of a token are for the label of the next one.
            ignore_index: The label that does not count.

        Raises:
            ValueError: A label is no class; on an accelerator it is a device-side assertion.
        """
        options = LossOptions(classes=self.vocabulary, ignore_index=ignore_index)
        labels = labels.to(logits.device)
        if shift:
            labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        check_targets(labels, options)
        flat, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        if self.is_sharded(logits):
            losses = losses_of_cut_vocabulary(self._padded(flat), targets, self.grid, self.axes, options)
        else:
            wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
            losses = functional.cross_entropy(wide, targets, reduction="none", ignore_index=ignore_index)
        return losses.sum(), (targets != ignore_index).sum()

    def _padded(self, flat: Tensor) -> Tensor:
        """Return the logits with -inf in the padding, also if a cap on logits has changed the padding."""
        local = flat.shape[-1]
        real = self.vocabulary - self.grid.index(self.axes) * local
        if real >= local:
            return flat
        return flat.masked_fill(torch.arange(local, device=flat.device) >= real, -torch.inf)

    def is_sharded(self, logits: Tensor) -> bool:
        """Return whether a rank has only its own classes of these logits."""
        return logits.shape[-1] != self.vocabulary


@dataclass(frozen=True)
class AdoptedLoss:
    """Replacement of a Transformers model's `loss_function`: a mean over the tokens that count, in fp32 at least.

    Args:
        over: Loss over the vocabulary.
        shifts: Whether the logits of a token predict the label of the next token, as in causal models.
    """

    over: VocabularyLoss
    shifts: bool

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute the loss as transformers computes it from full logits.

        Args:
            logits: Logits [B, S, V], or this rank's [B, S, V/p].
            labels: Labels [B, S].
            vocab_size: Number of classes from the model's config; ignored, because the head's own number counts.
            num_items_in_batch: Divisor of the sum. Default: the number of tokens that count.
            ignore_index: Label of tokens that do not count. Default: -100.
            shift_labels: Labels that are already shifted. Default: `labels`, shifted here.
            **others: Arguments of other losses; ignored.
        """
        del vocab_size, others
        shift = self.shifts and shift_labels is None
        targets = shift_labels if self.shifts and shift_labels is not None else labels
        total, count = self.over.summed(logits, targets, shift=shift, ignore_index=ignore_index)
        return total / (count if num_items_in_batch is None else num_items_in_batch)


def shifts_labels(model: nn.Module) -> bool | None:
    """Return whether a model's `loss_function` is for the label of the next token; None if that is unknown.

    Args:
        model: A model of transformers, or any other.

    Returns:
        None where `AdoptedLoss` cannot be in its place: the forward computes a loss itself, or it is of another kind.
    """
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if "loss_function" not in getattr(code, "co_names", ()):
        return None
    original = getattr(getattr(model, "loss_function", None), "__name__", "")
    return {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}.get(original)
