"""Logits of a training step with labels: sharded in memory, gathered when the program reads them."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from .loss import VocabularyLoss

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
            return func(*_read(args), **_read(keywords))
        part, over = first._part, first._over
        # A property arrives as the `__get__` of its descriptor.
        name = getattr(getattr(func, "__self__", None), "__name__", None)
        if func in _BY_SHARD:
            others = (each._part if isinstance(each, DeferredLogits) else each for each in args[1:])
            return cls.of(func(part, *others, **keywords), over)
        if func is Tensor.size or name == "shape":
            return func(part.new_empty(()).expand(*part.shape[:-1], over.vocabulary), *args[1:], **keywords)
        if func is Tensor.__repr__:  # a program may print on rank 0 only, where a collective would hang
            return f"DeferredLogits(shape={list(first.shape)}, dtype={part.dtype}, device={part.device})"
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
