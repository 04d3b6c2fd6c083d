"""A layer set: the layers of one mode. A model is written once against it and runs in every mode."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from par_groups import ProcessGroups, Topology

from ._collectives import gather_from, reduce_from, scatter_to
from ._torch_private import disable_dynamo
from .context.context import Context
from .context.mask import Mask
from .context.tokens import Tokens
from .experts.balance import LoadBalancing
from .experts.config import ExpertConfig, RouterConfig
from .experts.moe import MoE, make_moe
from .layers.classifier import ParallelClassifier, ParallelVocabClassifier
from .layers.debug import Mark, check, common, mark, watched
from .layers.dropout import ParallelDropout, numbers_of_rank
from .layers.embedding import (
    ParallelEmbedding,
    ParallelPatchEmbedding,
    ParallelPositionEmbedding,
    ParallelVocabEmbedding,
    cut_tokens,
)
from .layers.linear import ParallelLinear, block_rows, check_divides
from .layers.losses import LossOptions, accuracy, cross_entropy, linear_cross_entropy
from .layers.norm import ParallelNorm
from .layers.parameter import Init, Rows
from .layers.places import Places
from .modes.grid import EXPERTS, Axes, Grid
from .modes.layout import ActivationLayout, part
from .modes.modes import rules_of
from .modes.rules import ModeRules

M = TypeVar("M", bound=nn.Module)


def layer_set(
    mode: str | None = "auto",
    groups: ProcessGroups | None = None,
    *,
    sequence_parallel: bool | None = None,
    options: Mapping[str, Any] | None = None,
    debug: bool = False,
) -> "LayerSet":
    """The layers of a tensor mode over live groups.

    Args:
        mode: "1d", "2d", "2.5d", "3d" or a registered mode; None for one device; "auto" takes the mode, and those of
            its options that are not given here, from the topology of the groups.
        groups: The live groups; None for one device.
        sequence_parallel: Whether activations between the layers of mode "1d" are cut along the sequence; default:
            what the topology says under "auto", else not.
        options: Further options of the mode, by name, for modes that are registered elsewhere.
        debug: Whether activations carry their layout, so that a layer that was not made for it raises. Slow.

    Raises:
        ValueError: The mode is unknown or needs groups, it does not take an option, the topology lacks the mode's axes,
            or the mode is "auto" and the topology has a tensor axis without a mode. Or the topology has several ranks
            on an axis "expert", and no view "experts".

    Example:
        layers = layer_set("auto", groups)
        hidden = layers.RowLinear(4096, 1024)(functional.gelu(layers.ColumnLinear(1024, 4096)(x)))
    """
    given = dict(options or {})
    if sequence_parallel is not None:
        given["sequence_parallel"] = sequence_parallel
    if mode == "auto":
        mode = None
        if groups is not None:
            topology = groups.topology
            mode, of_topology = topology.modes.get("tensor", (None, {}))
            given = {**of_topology, **given}
            if mode is None and "tensor" in (*topology.axes, *topology.products) and topology.size("tensor") > 1:
                raise ValueError(
                    f"the axis 'tensor' has {topology.size('tensor')} ranks, but the topology names no mode for it, "
                    "and 'auto' must know how layers are cut; name one: layer_set('1d', groups)"
                )
    if mode is not None and groups is None:
        raise ValueError(f"mode {mode!r} needs live groups: layer_set({mode!r}, groups)")
    grid = Grid(groups)  # in mode None too: data-parallel replicas are copies
    rules = rules_of(mode, grid, given)
    if groups is not None:
        unknown = [axis for axis in ("sequence", "expert") if _is_unknown(axis, groups.topology, rules)]
        if "expert" in unknown and EXPERTS not in groups.topology.views:
            raise ValueError(
                f"the topology has expert={grid.size(('expert',))}, but no view 'experts' that says which ranks hold "
                f"which experts; make it by Topology.from_config({{'expert': {grid.size(('expert',))}, ...}})"
            )
        if "sequence" in unknown:
            rules = _over_context(rules, grid.larger(groups.topology.leaves("sequence")))
    return LayerSet(mode, grid, rules, debug=debug)


def _is_unknown(axis: str, topology: Topology, rules: ModeRules) -> bool:
    """Whether the topology has several ranks on an axis that the mode itself has no use for."""
    known = {*rules.residual.tokens, *rules.residual.features, *rules.inner.tokens, *rules.inner.features}
    if axis not in (*topology.axes, *topology.products) or not known.isdisjoint((axis, *topology.leaves(axis))):
        return False
    return topology.size(axis) > 1


def _over_context(rules: ModeRules, axes: Axes) -> ModeRules:
    """The rules of a mode for tokens that were cut over further axes before the layers see them."""
    residual, inner = replace(rules.residual, context=axes), replace(rules.inner, context=axes)
    return replace(rules, residual=residual, inner=inner)


class LayerSet:
    """Makes layers, and cuts and measures what flows through them. `layer_set` makes one.

    Each rank is given the whole ids, images and targets of its tensor group: embeddings and losses cut them. Over an
    axis `sequence` they were cut before, by `context.cut`: then they are those of one sequence rank. Every size that is
    given here is that of one device. Activations between layers are in the mode's *residual* layout; between a
    `ColumnLinear` and the `RowLinear` that closes the pair they are in its *inner* layout.

    Args:
        mode: The name of the mode; None for one device.
        grid: This rank's place among the ranks of the mode.
        rules: How the mode cuts and multiplies.
        debug: Whether activations carry their layout, and layers check it.
    """

    def __init__(self, mode: str | None, grid: Grid, rules: ModeRules, *, debug: bool = False) -> None:
        self.mode = mode
        self.grid = grid
        self.rules = rules
        self.debug = debug

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a model are of the same layer set."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle keeps; the context, with its plans, is made again."""
        return {name: value for name, value in self.__dict__.items() if name != "context"}

    @cached_property
    def context(self) -> Context:
        """What cuts batches along the sequence over the ranks of the axis `sequence`, and attends over them.

        On ranks that have whole sequences it cuts nothing, so that a model may be given documents there, too. It knows
        by itself that sequence parallelism cuts a rank's tokens further.
        """
        rules = self.rules
        multiple = self.grid.size(rules.residual.sequence)
        return Context(self.grid.groups if rules.residual.context else None, multiple=multiple)

    # Layers; the names are torch's and Megatron's

    def Linear(  # noqa: N802
        self, in_features: int, out_features: int, bias: bool = True, init: Init | None = None
    ) -> ParallelLinear:
        """A linear layer from the residual layout to the residual layout.

        Args:
            in_features: Features of the input, K.
            out_features: Features of the output, N.
            bias: Whether there is a bias.
            init: How the weight is filled; default: as torch.nn.Linear, uniform in +-1/sqrt(K).
        """
        check_divides(out_features, self.rules.column.rows, self.grid, "out_features")
        rows = [Rows(length=out_features, axes=self.rules.column.rows)]
        column = self._column(rows, in_features, bias, init, then=self.rules.to_residual)
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
        """A linear layer that opens a pair: from the residual layout to the inner one.

        Args:
            in_features: Features of the input, K.
            out_features: Features of the output, N, all blocks together.
            bias: Whether there is a bias.
            blocks: Number or sizes of the parts that are each cut by themselves: q, k and v, or gate and up.
            unit: Number of features that stay together on a rank, such as those of a head.
            init: How the weight is filled; default: as torch.nn.Linear, uniform in +-1/sqrt(K).
        """
        rows = block_rows(out_features, blocks, unit, self.rules.column.rows, self.grid)
        column = self._column(rows, in_features, bias, init)
        return self._made(column, self.rules.residual, self.rules.inner)

    def RowLinear(  # noqa: N802
        self, in_features: int, out_features: int, bias: bool = True, init: Init | None = None
    ) -> ParallelLinear:
        """A linear layer that closes a pair: from the inner layout back to the residual one.

        Args:
            in_features: Features of the input, K.
            out_features: Features of the output, N.
            bias: Whether there is a bias.
            init: How the weight is filled; default: as torch.nn.Linear, uniform in +-1/sqrt(K).
        """
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

    def Embedding(self, vocabulary: int, features: int, init: Init | None = None) -> ParallelEmbedding:  # noqa: N802
        """A small table, which is cut by features alone: from whole ids to the residual layout.

        Args:
            vocabulary: Number of ids; they are 0 .. vocabulary - 1.
            features: Features of the residual stream.
            init: How the table is filled; default: normal(1), as torch.nn.Embedding.
        """
        made = ParallelEmbedding(vocabulary, features, self.rules, self.grid, init)
        return self._made(made, None, self.rules.residual)

    def VocabEmbedding(  # noqa: N802
        self, vocabulary: int, features: int, *, padding_id: int | None = None, init: Init | None = None
    ) -> ParallelVocabEmbedding:
        """A table that is cut by vocabulary too: from whole ids to the residual layout.

        Args:
            vocabulary: Number of ids; they are 0 .. vocabulary - 1.
            features: Features of the residual stream.
            padding_id: An id whose row starts as zero and gets no gradient, or None.
            init: How the table is filled; default: normal(1), as torch.nn.Embedding.
        """
        made = ParallelVocabEmbedding(vocabulary, features, self.rules, self.grid, padding_id=padding_id, init=init)
        return self._made(made, None, self.rules.residual)

    def PositionEmbedding(  # noqa: N802
        self, length: int, features: int, init: Init | None = None
    ) -> ParallelPositionEmbedding:
        """Adds a learned vector for every position, in the residual layout.

        Args:
            length: The longest sequence.
            features: Features of the residual stream.
            init: How the vectors are filled; default: normal(0.02).
        """
        made = ParallelPositionEmbedding(length, features, self._places(self.rules.residual), init)
        return self._made(made, self.rules.residual, self.rules.residual)

    def PatchEmbedding(self, patch: int, channels: int, features: int) -> ParallelPatchEmbedding:  # noqa: N802
        """From whole images to projected patches with a learned class token in front, in the residual layout.

        Args:
            patch: Side of a patch, in pixels.
            channels: Channels of the images.
            features: Features of the residual stream.

        Raises:
            ValueError: Sequences are cut over ranks before the layers see them, but images are not.
        """
        self._refuse_context("PatchEmbedding", "give the ranks of 'sequence' to data or tensor")
        made = ParallelPatchEmbedding(patch, channels, features, self.rules, self.grid)
        return self._made(made, None, self.rules.residual)

    def LayerNorm(self, features: int, eps: float = 1e-5) -> ParallelNorm:  # noqa: N802
        """LayerNorm in the residual layout.

        Args:
            features: Features of the residual stream.
            eps: What is added to the variance.
        """
        norm = ParallelNorm(features, self.rules.residual, self.grid, mean=True, eps=eps)
        return self._made(norm, self.rules.residual, self.rules.residual)

    def RMSNorm(self, features: int, eps: float = 1e-6) -> ParallelNorm:  # noqa: N802
        """RMSNorm in the residual layout.

        Args:
            features: Features of the residual stream.
            eps: What is added to the mean square.
        """
        norm = ParallelNorm(features, self.rules.residual, self.grid, mean=False, eps=eps)
        return self._made(norm, self.rules.residual, self.rules.residual)

    def Dropout(self, p: float, *, inner: bool = False) -> ParallelDropout:  # noqa: N802
        """Dropout that drops the same elements in every mode.

        Args:
            p: Probability that an element is dropped, 0 <= p < 1.
            inner: Whether it is used on activations in the inner layout, and not in the residual one.
        """
        layout = self.rules.inner if inner else self.rules.residual
        return self._made(ParallelDropout(p, self._places(layout)), layout, layout)

    def MoE(  # noqa: N802
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        router: RouterConfig | None = None,
        expert: ExpertConfig | None = None,
        num_shared_experts: int = 0,
        shared_expert_gate: bool = False,
        capacity_factor: float | None = None,
        balance: LoadBalancing | None = None,
        init: Init | None = None,
    ) -> MoE:
        """Make a mixture of experts in the residual layout, whose experts are partitioned over ranks.

        The topology's view "experts" determines which rank holds which experts. The names and global shapes of the
        parameters are those of Hugging Face Transformers models.

        Args:
            hidden_size: Features of the residual stream, h.
            intermediate_size: Features of an expert's activation, f.
            num_experts: Number of experts on all ranks, E.
            top_k: Number of experts per token, k.
            router: Scoring and selection options; default: Mixtral's, `RouterConfig()`.
            expert: Activation, bias and weight layout of an expert; default: SwiGLU without bias, `ExpertConfig()`.
            num_shared_experts: Number of experts that every token uses in addition. They are one feed-forward layer of
                `num_shared_experts` * f features.
            shared_expert_gate: Whether a linear layer's sigmoid multiplies the output of the shared experts.
            capacity_factor: Capacity of an expert for each rank, as a multiple of the mean M * k / E; None drops none.
            balance: Load balancing; default: none.
            init: Init rule of the weights, applied to each expert separately; default: torch.nn.Linear's, uniform in
                +-1/sqrt(inputs).

        Raises:
            ValueError: Experts or features do not divide by the ranks, numbers do not fit together, or the mode of the
                layers is neither "1d" nor one device.

        Example:
            balance = LoadBalancing(bias_update_rate=1e-3)
            router = RouterConfig(correction_bias=True)
            moe = layers.MoE(64, 32, num_experts=8, top_k=2, router=router, num_shared_experts=1, balance=balance)
        """
        if self.mode not in (None, "1d") and self.rules != ModeRules():
            raise ValueError(f"mode={self.mode!r}: experts need mode '1d' or one device; use layer_set('1d', groups)")
        made = make_moe(
            hidden_size,
            intermediate_size,
            num_experts,
            top_k,
            router=RouterConfig() if router is None else router,
            expert=ExpertConfig() if expert is None else expert,
            num_shared_experts=num_shared_experts,
            shared_expert_gate=shared_expert_gate,
            capacity_factor=capacity_factor,
            balance=balance,
            init=init,
            residual=self.rules.residual,
            axes=self.rules.inner.features,
            grid=self.grid,
        )
        return self._made(made, self.rules.residual, self.rules.residual)

    def Classifier(self, hidden: int, classes: int, bias: bool = True) -> ParallelClassifier:  # noqa: N802
        """Whole logits of few classes, from [B, hidden] with batch and features cut as in the residual layout.

        Args:
            hidden: Features of the residual stream.
            classes: Number of logits.
            bias: Whether there is a bias.
        """
        made = ParallelClassifier(hidden, classes, bias, self.rules, self.grid)
        return self._made(made, self.rules.residual, None)

    def VocabClassifier(  # noqa: N802
        self, hidden: int, vocabulary: int, *, tied: ParallelVocabEmbedding | None = None, init: Init | None = None
    ) -> ParallelVocabClassifier:
        """Logits over a vocabulary, cut in the inner layout, for `cross_entropy`.

        Args:
            hidden: Features of the residual stream.
            vocabulary: Number of classes.
            tied: An embedding of this layer set whose table the classifier shares, or None.
            init: How the weight is filled unless it is shared; default: uniform in +-1/sqrt(hidden).
        """
        made = ParallelVocabClassifier(hidden, vocabulary, self.rules, self.grid, tied=tied, init=init)
        return self._made(made, self.rules.residual, self.rules.inner)

    # What models do between layers

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
        """Attention of this rank's heads, each of which is in one piece on one rank, over the whole sequence.

        Args:
            q: Queries [b, S, heads * head], local, in the inner layout; S are the tokens of this sequence rank.
            k: Keys [b, S, key heads * head], local; fewer heads than the queries' are shared among them.
            v: Values [b, S, key heads * head], local.
            head: Number of features of a head.
            causal: Whether a position attends only to itself and those before it.
            mask: What a token sees of its document; in the place of `causal`.
            tokens: How the batch was cut along the sequence, and its documents; None for rows of one document.
            sinks: What each query may attend to beside keys, [heads], of this rank's heads: a score that takes its part
                of the weights, and has no value.
            dropout: Probability that an attention weight is dropped; each rank drops others. Equal to one device in
                distribution only.

        Returns:
            [b, S, heads * head], local, in the inner layout.

        Raises:
            ValueError: `causal` and `mask` are both given, the activations are no part of a batch that was cut so, or
                there is a dropout with a mask, tokens or sinks, or over several sequence ranks.
        """
        if causal and mask is not None:
            raise ValueError(f"causal=True and mask={mask} are given; say it in the mask alone: Mask(causal=True, ...)")
        if self.rules.inner.context or not (mask is None and tokens is None and sinks is None):
            mask = Mask(causal=causal) if mask is None else mask
            return self._attention((q, k, v), head, mask, tokens=tokens, sinks=sinks, dropout=dropout)
        queries, keys, values = (x.unflatten(-1, (-1, head)).transpose(1, 2) for x in (q, k, v))  # [b, heads, S, head]
        shared = keys.shape[1] != queries.shape[1]
        apart = dropout > 0.0 and self.grid.size(self.grid.tensor_axes) > 1  # else ranks drop alike, as seeds are
        with numbers_of_rank(q.device, self.grid) if apart else nullcontext():
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, dropout_p=dropout, is_causal=causal, enable_gqa=shared
            )
        return mixed.transpose(1, 2).flatten(-2)

    @disable_dynamo  # which attention over other ranks leaves out of graphs anyway
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
        """Attention that knows documents, masks and other ranks' tokens."""
        if dropout > 0.0:
            raise ValueError(f"dropout is {dropout}: attention dropout cannot be equal over ranks; set it to 0")
        takes = self._mark(self.rules.inner, tokens)
        carried = common(qkv, "attention")
        q, k, v = (check(x, takes, "attention") for x in qkv)
        places = self._places(self.rules.inner)
        known = places.tokens_of(q, tokens, "attention") or self.context.static(q.shape[1])
        q, k, v = (x.unflatten(-1, (-1, head)) for x in (q, k, v))  # [b, s, heads, head]
        mixed = self.context.attention(q, k, v, self._rows(known), mask=mask, sinks=sinks).flatten(-2)
        return mixed if carried is None else mark(mixed, carried)

    def positions(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """The place of each token inside its document, as rotary embeddings of queries and keys need it.

        Args:
            x: A local activation in the inner layout, [b, s, ...], such as queries.
            tokens: How the batch was cut along the sequence, and its documents; None for rows of one document.

        Returns:
            int64 [b, s]; [1, s] where all rows have the same documents. 0 for padding.

        Raises:
            ValueError: The activation is no part of a batch that was cut so.
        """
        positions, _ = self._places(self.rules.inner).in_document(x, tokens, "positions")
        return positions

    def _rows(self, tokens: Tokens) -> Tokens:
        """The tokens of this rank's rows, of all that the batch has."""
        if len(tokens.documents) == 1 or self.grid.size(self.rules.inner.batch) == 1:
            return tokens
        rows = part(len(tokens.documents), self.rules.inner.batch, self.grid, "the batch")
        return _rows_of(tokens, rows.start, rows.stop)

    def local_heads(self, heads: int) -> int:
        """The number of heads on this rank; fewer heads than ranks are one on each rank, copied.

        Args:
            heads: The number of heads on one device.
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
        """The mean over the tensor group's tokens that are not ignored, on every rank alike; in fp32 at least.

        Over an axis `sequence` it is that over the tokens of all sequence ranks.

        Args:
            logits: [b, ..., classes or less], as a classifier gave them.
            target: The whole targets [B, ...], int64.
            classes: Number of classes in the whole vocabulary.
            ignore_index: The target that does not count.
            label_smoothing: Weight of the uniform distribution over all classes, 0 to 1.
            reduction: "mean"; or "sum", which is 0 where no token counts.

        Raises:
            ValueError: A target is no class (on an accelerator a device-side assertion), the smoothing is out of range,
                or the reduction unknown.
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
        """Classifier and cross entropy in parts of the sequence, so that the whole logits are never in memory.

        Args:
            hidden: [b, s, h] in the residual layout.
            classifier: A `VocabClassifier`.
            target: The whole targets [B, S], int64.
            classes: Number of classes in the whole vocabulary.
            chunks: Number of parts; more of them take less memory.
            ignore_index: The target that does not count.
            label_smoothing: Weight of the uniform distribution over all classes, 0 to 1.
            reduction: "mean"; or "sum", which is 0 where no token counts.

        Raises:
            ValueError: A target is no class (on an accelerator a device-side assertion), the smoothing is out of range,
                or the reduction unknown.
        """
        options = LossOptions(
            classes=classes, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
        hidden = check(hidden, self._mark(self.rules.residual), "linear_cross_entropy")
        return linear_cross_entropy(hidden, classifier, target, self.rules, self.grid, options=options, chunks=chunks)

    def accuracy(self, logits: Tensor, target: Tensor, *, classes: int, ignore_index: int = -100) -> Tensor:
        """The share of the tensor group's tokens whose largest logit is the target's, on every rank alike.

        Args:
            logits: [b, ..., classes or less], as a classifier gave them.
            target: The whole targets [B, ...], int64.
            classes: Number of classes in the whole vocabulary.
            ignore_index: The target that does not count.
        """
        logits = check(logits, self._mark(self.rules.inner), "accuracy")
        options = LossOptions(classes=classes, ignore_index=ignore_index)
        return accuracy(logits, target, self.rules, self.grid, options)

    def split(self, x: Tensor) -> Tensor:
        """This rank's part of what all ranks have whole; backward: gathers.

        Args:
            x: An activation [B, ..., features], or ids [B, S].
        """
        layout: ActivationLayout = self.rules.residual
        if not x.is_floating_point():
            return cut_tokens(x, layout, self.grid)
        for axes, dim in self._cuts(layout, x.dim()):
            x = scatter_to(x, self.grid.group(axes), dim)
        return mark(x, Mark(layout, self)) if self.debug else x

    def gather(self, y: Tensor, *, inner: bool = False) -> Tensor:
        """The whole of a local activation; backward: this rank's part of the gradient, which all ranks have alike.

        Args:
            y: A local activation.
            inner: Whether it is in the inner layout, and not in the residual one.
        """
        layout: ActivationLayout = self.rules.inner if inner else self.rules.residual
        y = check(y, Mark(layout, self), "gather")
        for axes, dim in reversed(self._cuts(layout, y.dim())):
            y = gather_from(y, self.grid.group(axes), dim)
        return y

    def first_token(self, x: Tensor) -> Tensor:
        """The first token of each sequence, [b, s, features] to [b, features], on every rank that shares the batch.

        Args:
            x: An activation in the residual layout.

        Raises:
            ValueError: The sequence was cut over ranks before the layers saw it.
        """
        self._refuse_context("first_token", "use context.gather(x, tokens)[:, 0]")
        axes: Axes = self.rules.residual.sequence
        token: Tensor = check(x, self._mark(self.rules.residual), "first_token")[:, 0]
        if self.grid.size(axes) == 1:
            return token
        elsewhere = torch.tensor(self.grid.index(axes) > 0, device=x.device)  # a mask, so that x stays in the graph
        return reduce_from(token.masked_fill(elsewhere, 0.0), self.grid.group(axes))

    # The parts

    def _column(
        self,
        rows: Sequence[Rows],
        in_features: int,
        bias: bool,
        init: Init | None,
        then: Callable[[Tensor], Tensor] | None = None,
    ) -> ParallelLinear:
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
            then=then,
        )

    def _made(self, module: M, takes: ActivationLayout | None, gives: ActivationLayout | None) -> M:
        return watched(module, self._mark(takes), self._mark(gives)) if self.debug else module

    def _mark(self, layout: ActivationLayout | None, tokens: Tokens | None = None) -> Mark | None:
        return Mark(layout, self, tokens) if self.debug and layout is not None else None

    def _places(self, layout: ActivationLayout) -> Places:
        return Places(layout=layout, grid=self.grid, static=self._static if layout.context else None)

    def _static(self, local: int) -> Tokens:
        """The cut of rows of one document, of which each sequence rank has `local` tokens."""
        return self.context.static(local)

    def _refuse_context(self, who: str, remedy: str) -> None:
        axes = self.rules.residual.context
        if axes:
            raise ValueError(
                f"{who} does not know that a sequence was cut over {self.grid.size(axes)} ranks ({' x '.join(axes)}) "
                f"before the layers saw it; {remedy}"
            )

    def _cuts(self, layout: ActivationLayout, dims: int) -> list[tuple[Axes, int]]:
        """The axes that cut an activation, with the dim that they cut; the slowest first."""
        cuts: list[tuple[Axes, int]] = [((axis,), 0) for axis in layout.batch]
        if dims > 2:
            cuts.append((layout.sequence, 1))
        cuts.append((layout.features, dims - 1))
        return [(axes, dim) for axes, dim in cuts if self.grid.size(axes) > 1]


@lru_cache(maxsize=64)  # plans are looked up by tokens, and so are to be the same objects in all layers
def _rows_of(tokens: Tokens, start: int, stop: int) -> Tokens:
    return tokens.rows(start, stop)
