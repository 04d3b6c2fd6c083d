"""Operations on activations between the layers of a layer set: attention, losses, splits and gathers."""

from contextlib import nullcontext
from functools import cached_property, lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._collectives import gather_from, reduce_from, scatter_to
from ._torch_private import disable_dynamo
from .context.context import Context
from .context.mask import Mask
from .context.tokens import Tokens
from .layers.debug import Mark, check, common, mark
from .layers.dropout import numbers_of_rank
from .layers.embedding import cut_tokens
from .layers.linear import block_rows
from .layers.losses import accuracy, cross_entropy, linear_cross_entropy
from .layers.places import Places
from .modes.grid import Axes, Grid
from .modes.layout import ActivationLayout, part
from .modes.rules import ModeRules
from .modes.token_losses import LossOptions


class LayerSetOperations:
    """Base class of `LayerSet`: operations on activations in the layouts of one mode.

    Args:
        mode: Name of the mode; None for one device.
        grid: Coordinates of this rank.
        rules: Layouts, weight shardings and matmuls of the mode.
        debug: Whether activations carry their layout, so that operations can check it.
    """

    def __init__(self, mode: str | None, grid: Grid, rules: ModeRules, *, debug: bool = False) -> None:
        self.mode = mode
        self.grid = grid
        self.rules = rules
        self.debug = debug

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the layer set itself: the copy of a model uses the same groups."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickle. The context holds plans, and is made again on first use."""
        return {name: value for name, value in self.__dict__.items() if name != "context"}

    @cached_property
    def context(self) -> Context:
        """Context parallelism over the axis `sequence`: it splits batches and computes attention over all ranks.

        Without that axis it splits nothing, so a model can pass documents there, too. Splits are multiples of the ranks
        that sequence parallelism uses.
        """
        rules, groups = self.rules, self.grid.groups
        if rules.lanes.sequence > 1:
            return Context(groups, lanes=rules.lanes)
        return Context(groups if rules.residual.context else None, multiple=self.grid.size(rules.residual.sequence))

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        head: int,
        causal: bool = False,
        mask: Mask | None = None,
        tokens: Tokens | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Compute attention of this rank's heads over the full sequence.

        It communicates only if the layer set has an axis `sequence` with several ranks.

        Args:
            q: Local queries in the inner layout, [b, S, heads * head]; S is the number of tokens of this sequence rank.
            k: Local keys, [b, S, key heads * head]. With fewer key heads than heads, consecutive heads share one.
            v: Local values, [b, S, key heads * head].
            head: Number of features per head.
            causal: Whether each token attends only to itself and to earlier tokens.
            mask: Mask inside a document, instead of `causal`; None for none.
            tokens: Split of the batch along the sequence, and its documents; None for rows of one document.
            sinks: Attention sinks of this rank's heads, [heads]: a score per head that takes part in the softmax and
                has no value; None for none.
            dropout: Probability of dropping an attention weight. Each rank drops other weights, so results equal one
                device only in distribution.

        Returns:
            Local output in the inner layout, [b, S, heads * head].

        Raises:
            ValueError: Both `causal` and `mask` are set, `tokens` do not fit the activations, or dropout is combined
                with a mask, tokens, sinks or several sequence ranks.
        """
        if causal and mask is not None:
            raise ValueError(f"causal=True: it cannot be combined with mask={mask}; pass Mask(causal=True, ...) only")
        if self.rules.inner.context or not (mask is None and tokens is None and sinks is None):
            mask = Mask(causal=causal) if mask is None else mask
            return self._attention((q, k, v), head, mask, tokens=tokens, sinks=sinks, dropout=dropout)
        queries, keys, values = (x.unflatten(-1, (-1, head)).transpose(1, 2) for x in (q, k, v))  # [b, heads, S, head]
        shared = keys.shape[1] != queries.shape[1]
        # Tensor ranks have other heads but the same seed. With it, they would all drop the same weights.
        own_seed = dropout > 0.0 and self.grid.size(self.grid.tensor_axes) > 1
        with numbers_of_rank(q.device, self.grid) if own_seed else nullcontext():
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, dropout_p=dropout, is_causal=causal, enable_gqa=shared
            )
        return mixed.transpose(1, 2).flatten(-2)

    @disable_dynamo  # attention over several ranks breaks the graph anyway
    def _attention(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        head: int,
        mask: Mask,
        *,
        tokens: Tokens | None,
        sinks: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Compute attention with documents, masks, sinks or the tokens of other ranks."""
        if dropout > 0.0:
            raise ValueError(f"dropout={dropout}: masks, tokens and sinks do not support attention dropout; pass 0")
        takes = self._mark(self.rules.inner, tokens)
        carried = common(qkv, "attention")
        q, k, v = (check(x, takes, "attention") for x in qkv)
        places = self._places(self.rules.inner)
        # Without tokens and without an axis "sequence", each row is one document.
        known = places.tokens_of(q, tokens, "attention") or self.context.static(q.shape[1])
        q, k, v = (x.unflatten(-1, (-1, head)) for x in (q, k, v))  # [b, s, heads, head]
        mixed = self.context.attention(q, k, v, self._rows(known), mask=mask, sinks=sinks).flatten(-2)
        return mixed if carried is None else mark(mixed, carried)

    def positions(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Return the position of each token inside its document, for rotary embeddings.

        Args:
            x: Local activations in the inner layout, such as queries, [b, s, ...].
            tokens: Split of the batch along the sequence, and its documents; None for rows of one document.

        Returns:
            Positions, int64 [b, s], or [1, s] if all rows have the same documents; 0 for padding.

        Raises:
            ValueError: `tokens` do not fit the activations.
        """
        positions, _ = self._places(self.rules.inner).in_document(x, tokens, "positions")
        return positions

    def _rows(self, tokens: Tokens) -> Tokens:
        """Return the tokens of this rank's rows of the batch."""
        if len(tokens.documents) == 1 or self.grid.size(self.rules.inner.batch) == 1:
            return tokens
        rows = part(len(tokens.documents), self.rules.inner.batch, self.grid, "the batch")
        return _rows_of(tokens, rows.start, rows.stop)

    def local_heads(self, heads: int) -> int:
        """Return the number of heads on this rank. Fewer heads than ranks are replicated, one per rank.

        Args:
            heads: Number of heads on one device.
        """
        (rows,) = block_rows(heads, 1, 1, self.rules.column.rows, self.grid)
        return heads // self.grid.size(rows.axes)

    def cross_entropy(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        classes: int,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        """Compute the cross entropy over the tokens of the tensor group, in at least fp32, equal on every rank.

        With an axis `sequence` it covers the tokens of all sequence ranks. Ranks exchange three numbers per token and
        never gather the logits.

        Args:
            logits: Local logits of a classifier, [b, ..., classes or fewer].
            target: Full targets of the tensor group, int64 [B, ...].
            classes: Number of classes of the full vocabulary.
            ignore_index: Target that does not count.
            label_smoothing: Weight of the uniform distribution over all classes, 0 to 1.
            reduction: "mean" over the counted tokens; or "sum", which is 0 if no token counts.

        Raises:
            ValueError: A target is out of range (on an accelerator: a device-side assertion), or an option is.
        """
        options = LossOptions(
            classes=classes, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
        logits = check(logits, self._mark(self.rules.inner), "cross_entropy")
        return cross_entropy(logits, target, self.rules, self.grid, options)

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        classifier: nn.Module,
        target: Tensor,
        *,
        classes: int,
        chunks: int = 8,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        """Compute classifier and cross entropy in chunks of the sequence, so that memory holds one chunk of logits.

        Args:
            hidden: Activations in the residual layout, [b, s, h].
            classifier: `VocabClassifier` of this layer set.
            target: Full targets of the tensor group, int64 [B, S].
            classes: Number of classes of the full vocabulary.
            chunks: Number of chunks; more chunks need less memory.
            ignore_index: Target that does not count.
            label_smoothing: Weight of the uniform distribution over all classes, 0 to 1.
            reduction: "mean" over the counted tokens; or "sum", which is 0 if no token counts.

        Raises:
            ValueError: A target is out of range (on an accelerator: a device-side assertion), or an option is.
        """
        options = LossOptions(
            classes=classes, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
        hidden = check(hidden, self._mark(self.rules.residual), "linear_cross_entropy")
        return linear_cross_entropy(hidden, classifier, target, self.rules, self.grid, options=options, chunks=chunks)

    def accuracy(self, logits: Tensor, target: Tensor, *, classes: int, ignore_index: int = -100) -> Tensor:
        """Compute the fraction of the tensor group's tokens whose largest logit is at the target, equal on every rank.

        Args:
            logits: Local logits of a classifier, [b, ..., classes or fewer].
            target: Full targets of the tensor group, int64 [B, ...].
            classes: Number of classes of the full vocabulary.
            ignore_index: Target that does not count.
        """
        logits = check(logits, self._mark(self.rules.inner), "accuracy")
        options = LossOptions(classes=classes, ignore_index=ignore_index)
        return accuracy(logits, target, self.rules, self.grid, options)

    def split(self, x: Tensor) -> Tensor:
        """Return this rank's shard of a replicated activation, in the residual layout. Backward gathers the gradient.

        Args:
            x: Replicated activations [B, ..., features], or ids [B, S].
        """
        layout: ActivationLayout = self.rules.residual
        # Integers such as ids have no gradient, so they need no collective in backward.
        if not x.is_floating_point():
            return cut_tokens(x, layout, self.grid)
        for axes, dim in self._cuts(layout, x.dim()):
            x = scatter_to(x, self.grid.group(axes), dim)
        return mark(x, Mark(layout, self)) if self.debug else x

    def gather(self, y: Tensor, *, inner: bool = False) -> Tensor:
        """Gather a local activation on every rank. Backward takes this rank's shard of the replicated gradient.

        Args:
            y: Local activations.
            inner: Whether they are in the inner layout instead of the residual one.
        """
        layout: ActivationLayout = self.rules.inner if inner else self.rules.residual
        y = check(y, Mark(layout, self), "gather")
        # The fastest axis comes first, because its parts are adjacent.
        for axes, dim in reversed(self._cuts(layout, y.dim())):
            y = gather_from(y, self.grid.group(axes), dim)
        return y

    def first_token(self, x: Tensor) -> Tensor:
        """Return the first token of each sequence, [b, s, features] to [b, features], on all ranks of the same batch.

        Args:
            x: Activations in the residual layout.

        Raises:
            ValueError: The layer set splits sequences over ranks before the layers.
        """
        self._refuse_context("first_token", "use context.gather(x, tokens)[:, 0]")
        axes: Axes = self.rules.residual.sequence
        token: Tensor = check(x, self._mark(self.rules.residual), "first_token")[:, 0]
        if self.grid.size(axes) == 1:
            return token
        # All ranks add up, all but the first add zeros. A mask, and not zeros_like, keeps x in every rank's graph: each
        # rank must take part in backward.
        elsewhere = torch.full((), self.grid.index(axes) > 0, device=x.device)
        return reduce_from(token.masked_fill(elsewhere, 0.0), self.grid.group(axes))

    def _mark(self, layout: ActivationLayout | None, tokens: Tokens | None = None) -> Mark | None:
        return Mark(layout, self, tokens) if self.debug and layout is not None else None

    def _places(self, layout: ActivationLayout) -> Places:
        return Places(layout=layout, grid=self.grid, static=self._static if layout.context else None)

    def _static(self, local: int) -> Tokens:
        """Return the split of rows of one document into `local` tokens per sequence rank."""
        # The context is created at the first call, not when a layer is created.
        return self.context.static(local)

    def _refuse_context(self, who: str, remedy: str) -> None:
        axes = self.rules.residual.context
        if axes:
            raise ValueError(
                f"{who} does not support sequences that are split over {self.grid.size(axes)} ranks "
                f"({' x '.join(axes)}); {remedy}"
            )

    def _cuts(self, layout: ActivationLayout, dims: int) -> list[tuple[Axes, int]]:
        """Return the axes that shard an activation and the dim of each, slowest axis first."""
        cuts: list[tuple[Axes, int]] = [((axis,), 0) for axis in layout.batch]
        if dims > 2:
            cuts.append((layout.sequence, 1))
        cuts.append((layout.features, dims - 1))
        return [(axes, dim) for axes, dim in cuts if self.grid.size(axes) > 1]


@lru_cache(maxsize=64)  # plans are cached by tokens, so all layers need the same object
def _rows_of(tokens: Tokens, start: int, stop: int) -> Tokens:
    return tokens.rows(start, stop)
