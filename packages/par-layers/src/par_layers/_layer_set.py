"""The layer set: constructors of the layers of one mode. A model is written once and runs in every mode."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from par_groups import LaneCounts, ProcessGroups, Topology, axis_size

from ._activations import LayerSetOperations
from .experts.balance import LoadBalancing
from .experts.moe import MoE, MoEOptions, make_moe
from .experts.selection import ExpertConfig, RouterConfig
from .layers.classifier import ParallelClassifier, ParallelVocabClassifier
from .layers.debug import watched
from .layers.dropout import ParallelDropout
from .layers.embedding import (
    ParallelEmbedding,
    ParallelPatchEmbedding,
    ParallelPositionEmbedding,
    ParallelVocabEmbedding,
)
from .layers.linear import ParallelLinear, block_rows, check_divides, local_rows
from .layers.norm import ParallelNorm
from .layers.parameter import Init, Rows
from .modes.grid import EXPERTS, Axes, Grid
from .modes.lanes import HEAD, check_head, check_lanes, rules_in_lanes
from .modes.layout import ActivationLayout
from .modes.modes import rules_of
from .modes.rules import ModeRules

M = TypeVar("M", bound=nn.Module)


def layer_set(
    mode: str | None = "auto",
    groups: ProcessGroups | None = None,
    *,
    sequence_parallel: bool | None = None,
    options: Mapping[str, Any] | None = None,
    lanes: LaneCounts | None = None,
    debug: bool = False,
) -> "LayerSet":
    """Make the layer set of a tensor mode.

    Args:
        mode: Tensor mode: "1d", "2d", "2.5d", "3d" or a registered mode; None for one device. "auto" reads the mode,
            and the options that you do not pass, from the topology of the groups.
        groups: Live groups; None for one device.
        sequence_parallel: Whether mode "1d" shards the activations between its layers along the sequence. Default: the
            topology's option with "auto", else False.
        options: Further options of a registered mode, by name.
        lanes: Numbers of lanes, for layers whose bits do not depend on the number of tensor ranks, in mode "1d" or on
            one device. Default: ordinary layers.
        debug: Whether activations carry their layout, so that a layer raises for an activation in another one. Slow.

    Raises:
        ValueError: The mode is unknown or needs groups, an option is unknown, or the topology lacks an axis, a mode for
            its axis `tensor`, or the view "experts" for its axis `expert`.

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
            # Options of the call override those of the topology.
            given = {**of_topology, **given}
            if mode is None and axis_size(topology, "tensor") > 1:
                raise ValueError(
                    f"mode='auto': the topology has {topology.size('tensor')} ranks on the axis 'tensor', but no mode "
                    "for it; pass a mode, such as layer_set('1d', groups)"
                )
    if mode is not None and groups is None:
        raise ValueError(f"mode={mode!r}: it needs live groups; use layer_set({mode!r}, groups)")
    # One device has a grid, too: its parameters are replicas of those of other data-parallel ranks.
    grid = Grid(groups)
    # More lanes than one on one device, too: it must compute in the same parts as several ranks.
    if lanes is not None and lanes.in_layers:
        rules = rules_in_lanes(mode, grid, given, lanes)
    else:
        rules = rules_of(mode, grid, given)
    if lanes is not None:
        rules = replace(rules, expert_lanes=lanes)
    if groups is not None:
        unknown = [axis for axis in ("sequence", "expert") if _is_unknown(axis, groups.topology, rules)]
        if "expert" in unknown and EXPERTS not in groups.topology.views:
            raise ValueError(
                f"expert={grid.size(('expert',))}: the topology has no view 'experts', which places experts; use "
                f"Topology.from_config({{'expert': {grid.size(('expert',))}, ...}})"
            )
        if "sequence" in unknown:
            rules = _over_context(rules, grid.larger(groups.topology.leaves("sequence")))
    if rules.lanes.sequence > 1:
        rules = _over_context(rules, ("sequence",))  # also on one rank, where attention consists of lanes, too
    return LayerSet(mode, grid, rules, debug=debug)


def _is_unknown(axis: str, topology: Topology, rules: ModeRules) -> bool:
    """Return whether the topology has several ranks on an axis that the mode does not use."""
    known = {*rules.residual.tokens, *rules.residual.features, *rules.inner.tokens, *rules.inner.features}
    if axis not in (*topology.axes, *topology.products) or not known.isdisjoint((axis, *topology.leaves(axis))):
        return False
    return topology.size(axis) > 1


def _over_context(rules: ModeRules, axes: Axes) -> ModeRules:
    """Return the rules of a mode for sequences that `Context.cut` has split over further axes."""
    residual, inner = replace(rules.residual, context=axes), replace(rules.inner, context=axes)
    return replace(rules, residual=residual, inner=inner)


class LayerSet(LayerSetOperations):
    """Constructors of layers, and operations on activations, of one mode. `layer_set` makes it.

    Pass sizes of one device everywhere. Each rank passes the full ids, images and targets of its tensor group;
    embeddings and losses shard them. With an axis `sequence`, `context.cut` splits the batch before that.

    Activations have one of two layouts. Between layers they are in the mode's *residual* layout, and between a
    `ColumnLinear` and the `RowLinear` that follows it in the *inner* layout.

    Args:
        mode: Name of the mode; None for one device.
        grid: Coordinates of this rank.
        rules: Layouts, weight shardings and matmuls of the mode.
        debug: Whether activations carry their layout, and layers check it.
    """

    # The method names are the class names of torch.nn and Megatron-Core, so that a model reads as if it used those.

    def Linear(  # noqa: N802
        self, in_features: int, out_features: int, bias: bool = True, init: Init | None = None
    ) -> ParallelLinear:
        """Make a linear layer from the residual layout to the residual layout.

        Args:
            in_features: Number of input features, K.
            out_features: Number of output features, N.
            bias: Whether the layer has a bias.
            init: Init rule of the weight; default: torch.nn.Linear's, uniform in +-1/sqrt(K).
        """
        check_divides(out_features, self.rules.column.rows, self.grid, "out_features")
        check_lanes(out_features, self.rules.lanes, "out_features")
        rows = [Rows(length=out_features, axes=self.rules.column.rows)]
        # A column product, whose output then changes its layout: alone it needs no row-parallel partner.
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
        """Make a column-parallel linear layer, from the residual layout to the inner one.

        Args:
            in_features: Number of input features, K.
            out_features: Number of output features of all blocks together, N.
            bias: Whether the layer has a bias.
            blocks: Number or sizes of the blocks of output features that are sharded separately: q, k and v, or gate
                and up.
            unit: Number of consecutive features that stay on one rank, such as the features of a head.
            init: Init rule of the weight; default: torch.nn.Linear's, uniform in +-1/sqrt(K).
        """
        rows = block_rows(out_features, blocks, unit, self.rules.column.rows, self.grid)
        # A unit of 1 is a plain linear layer without heads, so every size passes.
        check_head(unit if unit > 1 else HEAD, self.rules.lanes)
        for run in rows:
            check_lanes(run.length, self.rules.lanes, "a block of out_features")
            if run.sum_over and self.rules.lanes.tensor > 1:
                raise ValueError(
                    f"a block of {run.length} features has fewer units of {unit} than tensor ranks, which would add "
                    "partial gradients of copies; use fewer tensor ranks with numerics='canonical'"
                )
        column = self._column(rows, in_features, bias, init)
        return self._made(column, self.rules.residual, self.rules.inner)

    def RowLinear(  # noqa: N802
        self, in_features: int, out_features: int, bias: bool = True, init: Init | None = None
    ) -> ParallelLinear:
        """Make a row-parallel linear layer, from the inner layout to the residual one.

        Args:
            in_features: Number of input features, K.
            out_features: Number of output features, N.
            bias: Whether the layer has a bias.
            init: Init rule of the weight; default: torch.nn.Linear's, uniform in +-1/sqrt(K).
        """
        rules = self.rules
        check_divides(out_features, rules.row.rows, self.grid, "out_features")
        check_lanes(in_features, rules.lanes, "in_features")
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
        """Make an embedding whose table is sharded along its features only, for small vocabularies.

        Args:
            vocabulary: Number of ids, V; ids are 0 .. V - 1.
            features: Features of the residual stream.
            init: Init rule of the table; default: torch.nn.Embedding's, normal(1).
        """
        made = ParallelEmbedding(vocabulary, features, self.rules, self.grid, init)
        return self._made(made, None, self.rules.residual)

    def VocabEmbedding(  # noqa: N802
        self, vocabulary: int, features: int, *, padding_id: int | None = None, init: Init | None = None
    ) -> ParallelVocabEmbedding:
        """Make an embedding whose table is sharded along the vocabulary, from full ids to the residual layout.

        Args:
            vocabulary: Number of ids, V; ids are 0 .. V - 1.
            features: Features of the residual stream.
            padding_id: Id whose row starts as zero and gets no gradient; None for no such id.
            init: Init rule of the table; default: torch.nn.Embedding's, normal(1).
        """
        made = ParallelVocabEmbedding(vocabulary, features, self.rules, self.grid, padding_id=padding_id, init=init)
        return self._made(made, None, self.rules.residual)

    def PositionEmbedding(  # noqa: N802
        self, length: int, features: int, init: Init | None = None
    ) -> ParallelPositionEmbedding:
        """Make a layer that adds a learned vector to each position, in the residual layout.

        Args:
            length: Length of the longest sequence, in tokens.
            features: Features of the residual stream.
            init: Init rule of the vectors; default: normal(0.02).
        """
        places, parameters = self._places(self.rules.residual), self.rules.token_parameters
        made = ParallelPositionEmbedding(length, features, places, parameters, init)
        return self._made(made, self.rules.residual, self.rules.residual)

    def PatchEmbedding(self, patch: int, channels: int, features: int) -> ParallelPatchEmbedding:  # noqa: N802
        """Make a layer from full images to projected patches, with a learned class token in front.

        Args:
            patch: Side of a square patch, in pixels.
            channels: Number of image channels.
            features: Features of the residual stream.

        Raises:
            ValueError: The layer set splits sequences over ranks, which is not supported for images.
        """
        self._refuse_context("PatchEmbedding", "move the ranks of 'sequence' to data or tensor")
        made = ParallelPatchEmbedding(patch, channels, features, self.rules, self.grid)
        return self._made(made, None, self.rules.residual)

    def LayerNorm(self, features: int, eps: float = 1e-5) -> ParallelNorm:  # noqa: N802
        """Make a LayerNorm in the residual layout.

        Args:
            features: Features of the residual stream.
            eps: Addend of the variance.
        """
        norm = ParallelNorm(features, self.rules, self.grid, mean=True, eps=eps)
        return self._made(norm, self.rules.residual, self.rules.residual)

    def RMSNorm(self, features: int, eps: float = 1e-6) -> ParallelNorm:  # noqa: N802
        """Make an RMSNorm in the residual layout.

        Args:
            features: Features of the residual stream.
            eps: Addend of the mean square.
        """
        norm = ParallelNorm(features, self.rules, self.grid, mean=False, eps=eps)
        return self._made(norm, self.rules.residual, self.rules.residual)

    def Dropout(self, p: float, *, inner: bool = False) -> ParallelDropout:  # noqa: N802
        """Make a dropout layer that drops the same elements in every mode.

        Args:
            p: Probability that an element is dropped, 0 <= p < 1.
            inner: Whether its activations are in the inner layout instead of the residual one.
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
        # A mode on a single rank has the rules of one device, and so may have experts.
        if self.mode not in (None, "1d") and self.rules != ModeRules():
            raise ValueError(f"mode={self.mode!r}: experts need mode '1d' or one device; use layer_set('1d', groups)")
        if self.rules.lanes.sequence > 1:
            raise ValueError(
                f"the layers have {self.rules.lanes.sequence} sequence lanes, and experts have no products in these; "
                "use one sequence lane with numerics='canonical'"
            )
        if self.rules.expert_lanes is not None and capacity_factor is not None:
            raise ValueError(
                f"capacity_factor={capacity_factor} with numerics='canonical': the longest lane of all expert ranks "
                "sets the capacity, so that it depends on the topology; pass capacity_factor=None"
            )
        options = MoEOptions(
            router=RouterConfig() if router is None else router,
            expert=ExpertConfig() if expert is None else expert,
            num_shared_experts=num_shared_experts,
            shared_expert_gate=shared_expert_gate,
            capacity_factor=capacity_factor,
            balance=balance,
            init=init,
        )
        made = make_moe(
            hidden_size, intermediate_size, num_experts, top_k, options=options, rules=self.rules, grid=self.grid
        )
        return self._made(made, self.rules.residual, self.rules.residual)

    def Classifier(self, hidden: int, classes: int, bias: bool = True) -> ParallelClassifier:  # noqa: N802
        """Make a classifier with full logits on every rank, for few classes.

        The input has the shape [B, hidden]. Its batch and features are sharded as in the residual layout.

        Args:
            hidden: Features of the residual stream, h.
            classes: Number of logits.
            bias: Whether the layer has a bias.
        """
        made = ParallelClassifier(hidden, classes, bias, self.rules, self.grid)
        return self._made(made, self.rules.residual, None)

    def VocabClassifier(  # noqa: N802
        self, hidden: int, vocabulary: int, *, tied: ParallelVocabEmbedding | None = None, init: Init | None = None
    ) -> ParallelVocabClassifier:
        """Make a classifier whose logits are sharded along the vocabulary, for `cross_entropy`.

        Args:
            hidden: Features of the residual stream, h.
            vocabulary: Number of classes, V.
            tied: Embedding of this layer set whose table is the weight; None for a weight of its own.
            init: Init rule of an own weight; default: uniform in +-1/sqrt(h).
        """
        check_lanes(vocabulary, self.rules.lanes, "the vocabulary")
        made = ParallelVocabClassifier(hidden, vocabulary, self.rules, self.grid, tied=tied, init=init)
        return self._made(made, self.rules.residual, self.rules.inner)

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
            product=rules.of_runs(rules.column_product, local_rows(rows, self.grid)),
            grid=self.grid,
            init=init,
            then=then,
        )

    def _made(self, module: M, takes: ActivationLayout | None, gives: ActivationLayout | None) -> M:
        return watched(module, self._mark(takes), self._mark(gives)) if self.debug else module
