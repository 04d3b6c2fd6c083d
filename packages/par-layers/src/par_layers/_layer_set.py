"""A layer set: the layers of one mode. A model is written once against it and runs in every mode."""

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from par_groups import ProcessGroups

from ._collectives import gather_from, reduce_from, scatter_to
from .layers import classifier as _classifier
from .layers import dropout as _dropout
from .layers import embedding as _embedding
from .layers.debug import Mark, check, mark, watched
from .layers.embedding import cut_tokens
from .layers.linear import ParallelLinear, block_rows, check_divides
from .layers.losses import LossOptions, accuracy, cross_entropy, linear_cross_entropy
from .layers.norm import ParallelNorm
from .layers.parameter import Init, Rows
from .modes.grid import Axes, Grid
from .modes.layout import Layout
from .modes.modes import rules_of, tensor_mode
from .modes.rules import Rules

M = TypeVar("M", bound=nn.Module)


def layer_set(
    mode: str | None = "auto", groups: ProcessGroups | None = None, *, debug: bool = False, **options: Any
) -> "LayerSet":
    """The layers of a tensor mode over live groups.

    Args:
        mode: "1d", "2d", "2.5d", "3d" or a registered one; None for one device; "auto" takes the mode and the options
            that the groups' topology was made with.
        groups: The live groups; None for one device.
        debug: Activations carry their layout, and a layer that was not made for it raises. Slow.
        **options: The mode's own, such as `sequence_parallel=True`.

    Raises:
        ValueError: An unknown mode, an option that it does not take, a topology without the mode's axes, or "auto"
            where it has a tensor axis without a mode.
    """
    if mode == "auto":
        mode, found = (None, {}) if groups is None else _mode_of(groups)
        options = {**found, **options}
    if mode is not None and groups is None:
        raise ValueError(f"mode {mode!r} needs live groups: layer_set({mode!r}, groups)")
    grid = Grid(groups)  # in mode None too: data-parallel replicas are copies
    return LayerSet(mode, grid, rules_of(mode, grid, options), debug=debug)


def _mode_of(groups: ProcessGroups) -> tuple[str | None, dict[str, Any]]:
    """The tensor mode of a topology, and its options; (None, {}) where there is nothing to cut."""
    mode, options = tensor_mode(groups)
    topology = groups.topology
    if mode is None and "tensor" in (*topology.axes, *topology.products) and topology.size("tensor") > 1:
        raise ValueError(
            f"the axis 'tensor' has {topology.size('tensor')} ranks, but the topology names no mode for it, and 'auto' "
            "must know how layers are cut; name one: layer_set('1d', groups)"
        )
    return mode, options


class LayerSet:
    """Makes layers, and cuts and measures what flows through them; see `layer_set`.

    Each rank is given its tensor group's whole ids, images and targets: embeddings and losses cut them.
    """

    def __init__(self, mode: str | None, grid: Grid, rules: Rules, *, debug: bool = False) -> None:
        self.mode = mode
        self.grid = grid
        self.rules = rules
        self.debug = debug

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a model are of the same layer set."""
        return self

    # Layers; the names are torch's and Megatron's

    def Linear(  # noqa: N802
        self, in_features: int, out_features: int, bias: bool = True, init: Init | None = None
    ) -> ParallelLinear:
        """From the residual layout to the residual layout."""
        column = self._column([Rows(length=out_features, axes=self.rules.column.rows)], in_features, bias, init)
        check_divides(out_features, self.rules.column.rows, self.grid, "out_features")
        column._then = self.rules.to_residual
        return self._made(column, self.rules.residual, self.rules.residual)

    def ColumnLinear(  # noqa: N802
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        blocks: int | Sequence[int] = 1,
        unit: int = 1,
        init: Init | None = None,
    ) -> ParallelLinear:
        """Opens a pair: from the residual layout to the inner one.

        Args:
            in_features: K.
            out_features: N, all blocks together.
            bias: Whether there is one.
            blocks: Number or sizes of parts that are each cut by themselves: q, k and v, or gate and up.
            unit: Features that stay together, such as a head's.
            init: How the weight is filled.
        """
        rows = block_rows(out_features, blocks, unit, self.rules.column.rows, self.grid)
        column = self._column(rows, in_features, bias, init)
        return self._made(column, self.rules.residual, self.rules.inner)

    def RowLinear(  # noqa: N802
        self, in_features: int, out_features: int, bias: bool = True, init: Init | None = None
    ) -> ParallelLinear:
        """Closes a pair: from the inner layout back to the residual one."""
        rules = self.rules
        check_divides(out_features, rules.row.rows, self.grid, "out_features")
        row = ParallelLinear(
            [Rows(length=out_features, axes=rules.row.rows)],
            in_features,
            bias,
            cut=rules.row,
            takes=rules.inner,
            out=rules.residual,
            product=rules.row_product,
            grid=self.grid,
            init=init,
        )
        return self._made(row, rules.inner, rules.residual)

    def Embedding(self, vocabulary: int, features: int, init: Init | None = None) -> _embedding.Embedding:  # noqa: N802
        """A small table, cut by features alone."""
        made = _embedding.Embedding(vocabulary, features, self.rules, self.grid, init)
        return self._made(made, None, self.rules.residual)

    def VocabEmbedding(  # noqa: N802
        self, vocabulary: int, features: int, *, padding_id: int | None = None, init: Init | None = None
    ) -> _embedding.VocabEmbedding:
        """A table that is cut by vocabulary too."""
        made = _embedding.VocabEmbedding(vocabulary, features, self.rules, self.grid, padding_id=padding_id, init=init)
        return self._made(made, None, self.rules.residual)

    def PositionEmbedding(self, length: int, features: int, init: Init | None = None) -> _embedding.PositionEmbedding:  # noqa: N802
        """Adds learned positions."""
        made = _embedding.PositionEmbedding(length, features, self.rules, self.grid, init)
        return self._made(made, self.rules.residual, self.rules.residual)

    def PatchEmbedding(self, patch: int, channels: int, features: int) -> _embedding.PatchEmbedding:  # noqa: N802
        """From whole images to patches with a class token in front."""
        made = _embedding.PatchEmbedding(patch, channels, features, self.rules, self.grid)
        return self._made(made, None, self.rules.residual)

    def LayerNorm(self, features: int, eps: float = 1e-5) -> ParallelNorm:  # noqa: N802
        """In the residual layout."""
        norm = ParallelNorm(features, self.rules.residual, self.grid, mean=True, eps=eps)
        return self._made(norm, self.rules.residual, self.rules.residual)

    def RMSNorm(self, features: int, eps: float = 1e-6) -> ParallelNorm:  # noqa: N802
        """In the residual layout."""
        norm = ParallelNorm(features, self.rules.residual, self.grid, mean=False, eps=eps)
        return self._made(norm, self.rules.residual, self.rules.residual)

    def Dropout(self, p: float, *, inner: bool = False) -> _dropout.Dropout:  # noqa: N802
        """In the residual layout, or in the inner one."""
        layout = self.rules.inner if inner else self.rules.residual
        return self._made(_dropout.Dropout(p, layout, self.grid), layout, layout)

    def Classifier(self, hidden: int, classes: int, bias: bool = True) -> _classifier.Classifier:  # noqa: N802
        """Whole logits of few classes, from [B, hidden] with the batch and features of the residual layout."""
        made = _classifier.Classifier(hidden, classes, bias, self.rules, self.grid)
        return self._made(made, self.rules.residual, None)

    def VocabClassifier(  # noqa: N802
        self, hidden: int, vocabulary: int, *, tied: _embedding.VocabEmbedding | None = None, init: Init | None = None
    ) -> _classifier.VocabClassifier:
        """Logits cut over the vocabulary, for `cross_entropy`; `tied` shares an embedding's table."""
        made = _classifier.VocabClassifier(hidden, vocabulary, self.rules, self.grid, tied=tied, init=init)
        return self._made(made, self.rules.residual, self.rules.inner)

    # What models do between layers

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, head: int, causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """Attention of this rank's heads, which are whole.

        Args:
            q: [b, S, heads * head], local, in the inner layout.
            k: [b, S, key heads * head]; fewer heads than q's are shared.
            v: As k.
            head: Features of a head.
            causal: Whether a position sees only those before it.
            dropout: Of the attention weights; equal to one device in distribution only.

        Returns:
            As q.
        """
        queries, keys, values = (each.unflatten(-1, (-1, head)).transpose(1, 2) for each in (q, k, v))
        shared = keys.shape[1] != queries.shape[1]
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=causal, enable_gqa=shared
        )
        return mixed.transpose(1, 2).flatten(-2)

    def local_heads(self, heads: int) -> int:
        """Heads on this rank; fewer heads than ranks are one each, copied."""
        (rows,) = block_rows(heads, 1, 1, self.rules.column.rows, self.grid)
        return heads // self.grid.size(rows.axes)

    def cross_entropy(
        self, logits: Tensor, target: Tensor, *, classes: int, ignore_index: int = -100, label_smoothing: float = 0.0
    ) -> Tensor:
        """Mean over the tensor group's tokens that are not ignored, on every rank alike.

        Args:
            logits: As a classifier gave them.
            target: Whole, int64.
            classes: Of the whole vocabulary.
            ignore_index: Targets that do not count.
            label_smoothing: Weight of the uniform distribution over all classes.

        Raises:
            ValueError: A target that is no class (on an accelerator a device-side assertion), or wrong smoothing.
        """
        options = LossOptions(classes=classes, ignore_index=ignore_index, label_smoothing=label_smoothing)
        logits = check(logits, self._mark(self.rules.inner), "cross_entropy")
        return cross_entropy(logits, target, self.rules, self.grid, options)

    def linear_cross_entropy(
        self, hidden: Tensor, classifier: nn.Module, target: Tensor, *, classes: int, chunks: int = 8, **options: Any
    ) -> Tensor:
        """Classifier and cross entropy in `chunks` parts of the sequence; the whole logits are never in memory.

        Args:
            hidden: [b, s, h] in the residual layout.
            classifier: A `VocabClassifier`.
            target: Whole [B, S].
            classes: Of the whole vocabulary.
            chunks: More take less memory.
            **options: `ignore_index`, `label_smoothing`.
        """
        loss = LossOptions(classes=classes, **options)
        hidden = check(hidden, self._mark(self.rules.residual), "linear_cross_entropy")
        return linear_cross_entropy(hidden, classifier, target, self.rules, self.grid, options=loss, chunks=chunks)

    def accuracy(self, logits: Tensor, target: Tensor, *, classes: int, ignore_index: int = -100) -> Tensor:
        """Share of the tensor group's tokens that are right; ignored ones do not count."""
        logits = check(logits, self._mark(self.rules.inner), "accuracy")
        options = LossOptions(classes=classes, ignore_index=ignore_index)
        return accuracy(logits, target, self.rules, self.grid, options)

    def split(self, x: Tensor) -> Tensor:
        """This rank's part of a whole activation [B, ..., features], or of whole ids; backward: gathers."""
        layout: Layout = self.rules.residual
        if not x.is_floating_point():
            return cut_tokens(x, layout, self.grid)
        for axes, dim in self._cuts(layout, x.dim()):
            x = scatter_to(x, self.grid.group(axes), dim)
        return mark(x, Mark(layout, self)) if self.debug else x

    def gather(self, y: Tensor, *, inner: bool = False) -> Tensor:
        """The whole of a local activation; backward: this rank's part of the gradient, which all have alike."""
        layout: Layout = self.rules.inner if inner else self.rules.residual
        y = check(y, Mark(layout, self), "gather")
        for axes, dim in reversed(self._cuts(layout, y.dim())):
            y = gather_from(y, self.grid.group(axes), dim)
        return y

    def first_token(self, x: Tensor) -> Tensor:
        """The first token of each sequence, [b, S, features] to [b, features], on every rank that shares the batch."""
        axes: Axes = self.rules.residual.sequence
        token: Tensor = check(x, self._mark(self.rules.residual), "first_token")[:, 0]
        if self.grid.size(axes) == 1:
            return token
        elsewhere = torch.tensor(self.grid.index(axes) > 0, device=x.device)  # a mask, so that x stays in the graph
        return reduce_from(token.masked_fill(elsewhere, 0.0), self.grid.group(axes))

    def _made(self, module: M, takes: Layout | None, gives: Layout | None) -> M:
        return watched(module, self._mark(takes), self._mark(gives)) if self.debug else module

    def _mark(self, layout: Layout | None) -> Mark | None:
        return None if layout is None else Mark(layout, self)

    def _cuts(self, layout: Layout, dims: int) -> list[tuple[Axes, int]]:
        """The axes that cut, one by one, with the dim that each cuts; the slowest first."""
        cuts: list[tuple[Axes, int]] = [((axis,), 0) for axis in layout.batch]
        cuts += [(layout.sequence, 1)] if dims > 2 and layout.sequence else []
        cuts += [(layout.features, dims - 1)] if layout.features else []
        return [(axes, dim) for axes, dim in cuts if self.grid.size(axes) > 1]

    def _column(self, rows: Sequence[Rows], in_features: int, bias: bool, init: Init | None) -> ParallelLinear:
        rules = self.rules
        return ParallelLinear(
            rows,
            in_features,
            bias,
            cut=rules.column,
            takes=rules.residual,
            out=rules.inner,
            product=rules.column_product,
            grid=self.grid,
            init=init,
        )
