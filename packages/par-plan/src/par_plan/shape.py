"""The sizes of a transformer, and what pipeline stages and tensor modes leave of them on one rank. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from par_groups import Topology, axis_size

from .experts.mixture import Mixture
from .experts.spread import ALONE, ExpertPlacement, expert_placement, expert_tensors

MODES = ("1d", "2d", "2.5d", "3d")
"""The tensor modes that there are formulas for."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayers:
    """Mixtures of experts that replace the MLP in the blocks of a GPT.

    Args:
        number: Number of experts in a block.
        top_k: Number of experts that each token is routed to.
        hidden: Number of features inside an expert; None means the width of the MLP.
        shared: Number of shared experts, which process every token.
        dense_layers: Number of first blocks that keep their MLP.
        gated: Whether an expert has a gate, and so three matrices instead of two.

    Raises:
        ValueError: A size is too small, or `top_k` exceeds the number of experts.
    """

    number: int
    top_k: int = 2
    hidden: int | None = None
    shared: int = 0
    dense_layers: int = 0
    gated: bool = True

    def __post_init__(self) -> None:
        _check_sizes(vars(self), may_be_0=("shared", "dense_layers"))
        if self.top_k > self.number:
            raise ValueError(
                f"top_k={self.top_k}: it must not exceed the {self.number} experts; pass 1 to {self.number}"
            )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a GPT with learned positions, pre-norm blocks with biases, and a classifier without a bias.

    Args:
        layers: Number of transformer blocks.
        width: Number of features of the residual stream.
        heads: Number of attention heads; it divides the width.
        context: Number of tokens in a sequence.
        vocabulary: Number of different tokens; the default 256 is for bytes.
        hidden: Number of features inside the MLP; None means four times `width`.
        kv_heads: Number of key and value heads; None means as many as `heads`.
        tied: Whether the embedding's table is also the classifier's weight.
        experts: Mixtures of experts in the place of the MLP; None means none.

    Raises:
        ValueError: A size is below 1, or the heads do not divide the width.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256
    hidden: int | None = None
    kv_heads: int | None = None
    tied: bool = False
    experts: ExpertLayers | None = None

    def __post_init__(self) -> None:
        _check_sizes({name: value for name, value in vars(self).items() if name != "experts"})
        if self.width % self.heads or self.heads % self.keys:
            raise ValueError(
                f"width={self.width}, heads={self.heads} and kv_heads={self.keys}: each must be a multiple of the "
                "next; change one of them"
            )

    @property
    def mlp(self) -> int:
        """Number of features inside the MLP."""
        return self.hidden or 4 * self.width

    @property
    def keys(self) -> int:
        """Number of heads of keys, and of values."""
        return self.kv_heads or self.heads

    @property
    def attended(self) -> int:
        """Number of features of queries, keys and values together."""
        return self.width + 2 * self.keys * (self.width // self.heads)

    @cached_property
    def mixture(self) -> Mixture | None:
        """The layer of experts that takes the place of the MLP, if there is one."""
        if self.experts is None:
            return None
        return Mixture(
            hidden=self.width,
            intermediate=self.experts.hidden or self.mlp,
            experts=self.experts.number,
            top_k=self.experts.top_k,
            shared=self.experts.shared,
            gated=self.experts.gated,
        )

    def mixtures(self, start: int, stop: int) -> int:
        """Return the number of blocks with experts in a range of block numbers."""
        return 0 if self.experts is None else max(0, stop - max(start, self.experts.dense_layers))

    @property
    def attention_matrices(self) -> int:
        """Number of elements in the matrices into attention and out of it."""
        return self.width * (self.attended + self.width)

    @property
    def block_matrices(self) -> int:
        """Number of elements in the four matrices of a block: into attention, out of it, into the MLP, out of it."""
        return self.attention_matrices + 2 * self.width * self.mlp

    @property
    def parameters(self) -> int:
        """Number of elements in all parameters of the model."""
        whole = ModelSlice(blocks=self.layers, first=True, last=True, mixtures=self.mixtures(0, self.layers))
        return count(self, TensorSplit(), whole).total

    def flops(self, part: "ModelSlice") -> tuple[float, float]:
        """Return the floating-point operations per token of matmuls and of attention.

        In forward a matrix takes two operations for each of its elements; backward takes twice as many as forward.
        Attention is causal, so that half of its products, 4 * context * width operations, are computed. It includes
        only the experts that a token is routed to.
        """
        # A token passes all matrices of a dense block, but those of its own experts alone.
        blocks = (part.blocks - part.mixtures) * self.block_matrices
        if self.mixture is not None:
            blocks += part.mixtures * (self.attention_matrices + self.mixture.active)
        matrices = 2 * blocks + part.last * 2 * self.width * self.vocabulary
        # 3 = 1 forward + 2 backward: the gradients of the input and of the weight each cost as much as the product.
        return 3.0 * matrices, 3.0 * part.blocks * 2 * self.context * self.width


def _check_sizes(sizes: Mapping[str, int | None], may_be_0: tuple[str, ...] = ()) -> None:
    for name, value in sizes.items():
        least = 0 if name in may_be_0 else 1
        if value is not None and value < least and not isinstance(value, bool):
            raise ValueError(f"{name}={value}: it must be {least} or more; pass such a size")


@dataclass(frozen=True, kw_only=True)
class ModelSlice:
    """Slice of a model on a pipeline rank.

    Args:
        blocks: Number of blocks.
        first: Whether the slice contains the embeddings.
        last: Whether the slice contains the last norm and the classifier.
        runs: Kinds of blocks with their numbers in each stage, if blocks differ.
        mixtures: Number of blocks with experts.
    """

    blocks: int
    first: bool
    last: bool
    runs: tuple[tuple[tuple[int, int], ...], ...] = ()
    mixtures: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorSplit:
    """Number of parts into which a tensor mode splits weights and activations. The default is one device.

    Activations have two layouts. Residual stream and norms use the residual layout. Attention and the MLP's activation
    use the inner layout, between a column-parallel layer and the next row-parallel layer.

    Args:
        mode: "1d", "2d", "2.5d" or "3d"; None without a tensor mode.
        sequence: Whether mode 1d splits the tokens in the residual layout (sequence parallelism).
        ranks: Number of ranks in a tensor group.
        tokens: Number of parts of the tokens in the residual layout.
        features: Number of parts of the features in the residual layout.
        inner_tokens: Number of parts of the tokens in the inner layout.
        inner: Number of parts of the features in the inner layout.
        matrix: Number of parts of a linear layer's weight.
        axes: Names and sizes of the mode's axes.
        experts: Placement of experts on ranks.
    """

    mode: str | None = None
    sequence: bool = False
    ranks: int = 1
    tokens: int = 1
    features: int = 1
    inner_tokens: int = 1
    inner: int = 1
    matrix: int = 1
    axes: tuple[tuple[str, int], ...] = ()
    experts: ExpertPlacement = ALONE

    @cached_property
    def dense(self) -> "TensorSplit":
        """The same split for layers without experts, independent of the placement of experts."""
        return replace(self, experts=ALONE)

    @property
    def batch(self) -> int:
        """Number of parts of the rows of a microbatch."""
        return 1 if self.sequence else self.tokens

    @property
    def label(self) -> str:
        """Text for a table, such as "1d 8 sp" with sequence parallelism, "2.5d 2x4x4", or "-" without one."""
        if self.mode is None:
            return "-"
        sizes = self.ranks if self.mode == "1d" else "x".join(str(size) for _, size in self.axes)
        return f"{self.mode} {sizes}{' sp' if self.sequence else ''}"


def averaged_ranks(topology: Topology) -> int:
    """Return the number of ranks that average gradients of dense layers."""
    # Ranks of the axis "expert" see other tokens, too: for a dense layer they are further data ranks.
    return topology.size("data") * axis_size(topology, "sequence") * axis_size(topology, "expert")


def tensor_split(topology: Topology) -> TensorSplit:
    """Return the split of a topology's tensor mode, with the placement of experts.

    Raises:
        ValueError: There are no formulas for its mode.
    """
    ranks, (mode, options) = topology.size("tensor"), topology.modes.get("tensor", (None, {}))
    axes = {name: topology.size(name) for name in topology.leaves("tensor")}
    split = split_of_mode(mode, ranks, axes, sequence=bool(options.get("sequence_parallel", False)))
    return replace(split, experts=expert_placement(topology))


def split_of_mode(mode: str | None, ranks: int, axes: dict[str, int], *, sequence: bool = False) -> TensorSplit:
    """Return the split of a tensor mode.

    Args:
        mode: Name of the mode, or None.
        ranks: Number of ranks in a tensor group.
        axes: Sizes of the mode's axes by their names.
        sequence: Whether mode 1d uses sequence parallelism.

    Raises:
        ValueError: There are no formulas for the mode.
    """
    if ranks == 1 or mode is None:
        return TensorSplit()
    sizes: dict[str, Any] = {"mode": mode, "ranks": ranks, "axes": tuple(axes.items())}
    if mode == "1d":
        return TensorSplit(**sizes, sequence=sequence, tokens=ranks if sequence else 1, inner=ranks, matrix=ranks)
    if mode in ("2d", "2.5d"):
        # 2.5D is `depth` squares side by side: each square has other rows, and all have the same weights.
        q = axes["col"]
        tokens = q * axes.get("depth", 1)
        return TensorSplit(**sizes, tokens=tokens, features=q, inner_tokens=tokens, inner=q, matrix=q * q)
    if mode == "3d":
        # In 3D rows lie on two of the cube's three axes, and a weight on all three.
        d = axes["weight"]
        return TensorSplit(**sizes, tokens=d * d, features=d, inner_tokens=d * d, inner=d, matrix=d**3)
    raise ValueError(f"there are no formulas for tensor mode {mode!r}; there are for {', '.join(MODES)}")


def why_not_sharded(shape: Shape, split: TensorSplit, rows: int = 0) -> str | None:
    """Return why a tensor mode cannot split a model; None if it can.

    Args:
        shape: The model's sizes.
        split: The cut of the tensor mode.
        rows: Number of rows in a microbatch; 0 skips their check.
    """
    columns = split.matrix // split.inner  # parts of a column weight's input features, and of a row weight's output
    rules = [
        ("model.heads", shape.heads, split.inner),
        ("the heads of keys", shape.keys, split.inner),
        ("model.width", shape.width, max(split.features, columns, split.inner)),
        ("the MLP's width", shape.mlp, split.matrix // split.features),
        ("model.context", shape.context, split.tokens if split.sequence else 1),
        ("the rows of a microbatch", rows, split.batch),
    ]
    if shape.mixture is not None:
        if split.mode not in (None, "1d"):
            return f"experts need tensor mode '1d' or none, the config has {split.mode!r}"
        # Shared experts see every token, so the tensor group divides them as it does a dense MLP.
        rules.append(("features of shared experts", shape.mixture.shared * shape.mixture.intermediate, split.ranks))
        rules.append(("features of an expert", shape.mixture.intermediate, split.experts.tensor))
    for what, length, parts in rules:
        if length % parts:
            return f"{what} is {length}, which tensor mode {split.label} cuts into {parts} parts"
    return None


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Number of parameters on a rank. All values except `blocks` and `tensors` are numbers of elements.

    Args:
        total: Elements of all parameters of the rank.
        block: Elements of one block, of the last if they differ.
        blocks: Number of blocks.
        ends: Elements of embeddings, last norm and classifier on the rank.
        table: Elements of the embedding's table, if the rank has it.
        largest: Elements of the largest tensor.
        tensors: Number of tensors.
        items: Trained and frozen elements of each module in a container outside the blocks, such as the blocks of an
            encoder of images. Like a block, such a module is a unit of ZeRO stage 3.
        frozen: Frozen elements among the total.
        frozen_block: Frozen elements of one block.
    """

    total: int
    block: int
    blocks: int
    ends: int
    table: int
    largest: int
    tensors: int
    items: tuple[tuple[int, int], ...] = ()
    frozen: int = 0
    frozen_block: int = 0


def count(shape: Shape, split: TensorSplit, part: ModelSlice) -> ParameterCount:
    """Return the parameter count of one rank, with padded vocabularies if they are split.

    Args:
        shape: The model's sizes.
        split: The cut of the tensor mode.
        part: Slice of the model on the rank's pipeline stages.
    """
    h = shape.width
    table = padded(shape.vocabulary, split.matrix // split.features) * h // split.matrix
    head = table if shape.tied else padded(shape.vocabulary, split.inner) * h // split.matrix
    own_head = part.last and not (shape.tied and part.first)  # a tied head beside its table is the same parameter
    ends = {
        "table": table if part.first else 0,
        "positions": shape.context * h // split.features if part.first else 0,
        "norm": 2 * h // split.features if part.last else 0,
        "head": head if own_head else 0,
    }
    blocks = [_block(shape, split.dense)] * (part.blocks - part.mixtures)
    if shape.mixture is not None:
        blocks += [_block_with_experts(shape, shape.mixture, split)] * part.mixtures
    return ParameterCount(
        total=sum(block.elements for block in blocks) + sum(ends.values()),
        block=blocks[-1].elements if blocks else 0,
        blocks=part.blocks,
        ends=sum(ends.values()),
        table=table,
        largest=max(*(block.largest for block in blocks), *ends.values()),
        tensors=sum(block.tensors for block in blocks) + 2 * part.first + 2 * part.last + own_head,
    )


@dataclass(frozen=True)
class _BlockCount:
    """Elements of a rank's part of a block, those of the largest tensor, and the number of tensors."""

    elements: int
    largest: int
    tensors: int


@lru_cache(maxsize=4096)
def _block(shape: Shape, split: TensorSplit) -> _BlockCount:
    """Return the elements of a block with an MLP."""
    h, matrices = shape.width, shape.block_matrices // split.matrix
    # Biases of column layers are split like their outputs. Two biases of row layers and four vectors of two norms are
    # split like the residual stream.
    biases_and_norms = (shape.attended + shape.mlp) // split.inner + 6 * h // split.features
    return _BlockCount(matrices + biases_and_norms, h * max(shape.mlp, shape.attended) // split.matrix, 12)


@lru_cache(maxsize=4096)
def _block_with_experts(shape: Shape, mixture: Mixture, split: TensorSplit) -> _BlockCount:
    """Return the elements of a block with experts, without distributed experts."""
    h = shape.width
    matrices = [h * shape.attended // split.matrix, h**2 // split.matrix, mixture.router]
    if mixture.shared:
        matrices += [mixture.shared * mixture.intermediate * h // split.ranks] * (3 if mixture.gated else 2)
    if not split.experts.is_dealt:
        matrices += expert_tensors(mixture, split.experts)
    # Two biases of attention, and four vectors of two norms: a block with experts has no biases of an MLP.
    return _BlockCount(
        sum(matrices) + shape.attended // split.inner + 5 * h // split.features, max(matrices), 6 + len(matrices)
    )


def count_experts(mixture: Mixture, spread: ExpertPlacement, layers: int) -> ParameterCount:
    """Return the parameter count of one rank in distributed experts.

    Args:
        mixture: Layer of experts.
        spread: Placement of the experts on ranks.
        layers: Number of layers with experts that the rank has.
    """
    tensors = expert_tensors(mixture, spread)
    return ParameterCount(
        total=layers * sum(tensors),
        block=sum(tensors),
        blocks=layers,
        ends=0,
        table=0,
        largest=max(tensors),
        tensors=layers * len(tensors),
    )


def padded(length: int, parts: int) -> int:
    """Return the smallest multiple of `parts` that is at least `length`."""
    return math.ceil(length / parts) * parts
