"""The loss of an existing model over sharded logits, and such logits for the other readers of a training step."""

import inspect
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._collectives import gather_from
from ..layers.losses import check_targets
from ..modes.grid import Axes, Grid
from ..modes.token_losses import LossOptions, TokenLosses


@dataclass(frozen=True)
class VocabularyLoss:
    """Cross entropies over a vocabulary that is perhaps cut.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group; () for one rank.
        vocabulary: Number of classes.
        token_losses: Function from logits to the loss of each token.
    """

    grid: Grid
    axes: Axes
    vocabulary: int
    token_losses: TokenLosses

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
        # Labels are shifted and not logits: a slice of the logits would be copied by the reshape below.
        if shift:
            labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        check_targets(labels, options)
        flat, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        if self.is_sharded(logits):
            flat = self._padded(flat)
        losses = self.token_losses(flat, targets, self.grid, self.axes, options)
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


_BY_SHARD = frozenset(
    {Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.detach, Tensor.clone, Tensor.view_as}
)
"""Functions whose result is sharded as their argument is."""

_ABOUT_SHARD = frozenset({Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.register_hook})
"""Functions whose result is the same for the shard."""

_OF_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad", "nbytes"})
"""Properties of a tensor that the shard does not have."""


class DeferredLogits(Tensor):
    """The logits that a sharded model returns in training with labels; the first read of their values gathers them.

    The model has computed its loss from the shards, so most programs never read the logits. Metrics, distillation and
    `argmax` read them, and get full logits. A read is collective, as a read of a DTensor is: all tensor ranks must
    read. Shape, dtype, `to`, `detach`, printing and gradient hooks, which get the shard's gradient, do not communicate.
    """

    _part: Tensor
    _over: VocabularyLoss
    _whole: Tensor | None

    @classmethod
    def of(cls, part: Tensor, over: VocabularyLoss) -> Self:
        """Wrap this rank's shard of logits.

        Args:
            part: The shard, [..., V/p].
            over: The loss over the vocabulary, which gathers logits.
        """
        logits = part.as_subclass(cls)
        logits._part, logits._over, logits._whole = part, over, None
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function on the shard if that is enough, and on the full logits otherwise."""
        del types
        first, keywords = args[0] if args else None, kwargs or {}
        if not isinstance(first, DeferredLogits):
            # The logits are inside a list or a later argument, so the function reads their values.
            return func(*_read(args), **_read(keywords))
        part, over = first._part, first._over
        # A property arrives as the `__get__` of its descriptor.
        name = getattr(getattr(func, "__self__", None), "__name__", None)
        if func in _BY_SHARD:
            others = (each._part if isinstance(each, DeferredLogits) else each for each in args[1:])
            return cls.of(func(part, *others, **keywords), over)
        if func is Tensor.size or name == "shape":
            # An expanded scalar has the full shape, and the memory of one element.
            return func(part.new_empty(()).expand(*part.shape[:-1], over.vocabulary), *args[1:], **keywords)
        if func is Tensor.__repr__:  # a program may print on rank 0 only, where a collective would hang
            return f"DeferredLogits(shape={list(first.shape)}, dtype={part.dtype}, device={part.device})"
        # All other properties, such as dtype and device, are those of the shard.
        if func in _ABOUT_SHARD or (name is not None and name not in _OF_VALUES):
            return func(part, *args[1:], **keywords)
        return func(*_read(args), **_read(keywords))


def _read(value: Any) -> Any:
    """Return a value with full logits in place of deferred ones, also in lists, tuples and dicts."""
    if isinstance(value, DeferredLogits):
        # Logits that were gathered without a graph do not serve a reader that needs gradients.
        needs_graph = torch.is_grad_enabled() and value._part.requires_grad
        if value._whole is None or (needs_graph and not value._whole.requires_grad):
            value._whole = value._over.whole(value._part)
        return value._whole
    if isinstance(value, dict):
        return {key: _read(each) for key, each in value.items()}
    return type(value)(map(_read, value)) if type(value) in (list, tuple) else value


def shard_of(logits: Tensor) -> Tensor:
    """Return this rank's shard of deferred logits, and other logits unchanged."""
    return logits._part if isinstance(logits, DeferredLogits) else logits


def defer_logits(output: Any, over: VocabularyLoss) -> Any:
    """Return the output of a forward with labels in which sharded logits are gathered when they are read.

    Args:
        output: A mapping with `logits`, which is changed in place; or a tuple of loss, logits and other tensors.
        over: The loss over the vocabulary, which gathers logits.
    """
    # With labels and return_dict=False, a model of transformers returns the loss first and then the logits.
    place: Any = "logits" if isinstance(output, MutableMapping) else 1
    is_pair = isinstance(output, tuple) and len(output) > 1
    logits = output.get(place) if isinstance(output, MutableMapping) else output[1] if is_pair else None
    if not isinstance(logits, Tensor) or not over.is_sharded(logits):
        return output
    # A compiled graph returns plain tensors, which could not be gathered later.
    later = over.whole(logits) if torch.compiler.is_compiling() else DeferredLogits.of(logits, over)
    if is_pair:
        return (output[0], later, *output[2:])
    output[place] = later
    return output
