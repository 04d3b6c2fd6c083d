"""Communication cost of each layer, as exact formulas. Pure; tests count the collectives and compare.

Counted are elements that a rank receives: an all-reduce of n over g ranks 2(g-1)/g n, an all-gather or reduce-scatter
(g-1)/g of the full size, a broadcast or reduce, averaged over roots, (g-1)/g n, a swap n.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from .context.cost import AttentionShape, received


@dataclass(frozen=True)
class LayerCost:
    """Elements that one rank receives.

    Args:
        each: Elements in every forward and backward pass.
        once: Elements once a step, when partial gradients are summed.
    """

    each: Fraction = Fraction(0)
    once: Fraction = Fraction(0)

    def __add__(self, other: "LayerCost") -> "LayerCost":
        return LayerCost(self.each + other.each, self.once + other.once)

    def __rmul__(self, factor: int) -> "LayerCost":
        return LayerCost(factor * self.each, factor * self.once)


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """A linear layer without bias: from `tokens` x `k` to `tokens` x `n`.

    Args:
        tokens: Number of tokens, batch x sequence.
        k: Features of the input.
        n: Features of the output.
        role: Whether it opens a pair or closes one.
    """

    tokens: int | Fraction
    k: int
    n: int
    role: Literal["column", "row"] = "column"


@dataclass(frozen=True, kw_only=True)
class NormShape:
    """LayerNorm, or RMSNorm without the mean.

    Args:
        tokens: Number of tokens, batch x sequence.
        features: Features that are normalised.
        mean: Whether the mean is subtracted, as in LayerNorm.
    """

    tokens: int | Fraction
    features: int
    mean: bool = True


@dataclass(frozen=True, kw_only=True)
class EmbeddingShape:
    """Vocabulary table, as an embedding or as a classifier that shares it.

    Args:
        tokens: Number of tokens, batch x sequence.
        features: Features of a row.
        vocabulary: Number of rows.
        role: Use of the table.
    """

    tokens: int | Fraction
    features: int
    vocabulary: int
    role: Literal["embedding", "tied classifier"] = "embedding"


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The linears of a transformer layer: q, k and v, output, and an MLP of four times the width.

    Args:
        tokens: Number of tokens, batch x sequence.
        width: Features of the residual stream.
    """

    tokens: int | Fraction
    width: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Model sharded in place in mode 1d: embedding, layers of attention and an MLP, and sharded logits with a loss.

    Args:
        tokens: Number of tokens, batch x sequence.
        width: Features of the residual stream.
        layers: Number of layers.
        expert_layers: Number of layers with sharded experts in place of an MLP.
        experts_per_token: Number of experts that a token is routed to.
        shared_experts: Number of shared experts in each of these layers, MLPs that every token passes.
        latent: Whether attention is latent. It saves its gathered input, so backward does not gather it again.
        norms: Number of vectors of the model's width in each layer outside of the sharded weights, such as those of
            norms.
    """

    tokens: int | Fraction
    width: int
    layers: int
    expert_layers: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    latent: bool = False
    norms: int = 2


Shape = LinearShape | NormShape | EmbeddingShape | TransformerShape | ModelShape | AttentionShape


def layer_cost(
    mode: str | None,
    sizes: Mapping[str, int],
    shape: Shape,
    *,
    sequence_parallel: bool = False,
    keep: bool = False,
    recompute: bool = False,
    outer: Literal["ring", "gather"] = "ring",
) -> LayerCost:
    """Return the cost of a layer in a mode.

    Args:
        mode: "1d", "2d", "2.5d" or "3d"; for an `AttentionShape` "gather", "ring", "ulysses" or "2d". None: one device,
            which costs nothing.
        sizes: Number of ranks on the mode's axes, such as `{"row": 4, "col": 4}` or a topology's `axes`. Mode 1d reads
            "tensor". Attention reads "sequence", and in mode 2d "ring" and "ulysses". Other shapes read these axes as
            well: they split tokens, but no parameters.
        shape: Kind and sizes of the layer.
        sequence_parallel: Whether activations are split along the sequence, in mode 1d. Default: False.
        keep: Whether attention in mode "gather" keeps the fetched keys for backward. Default: False.
        recompute: Whether backward recomputes the forward of attention. Default: False.
        outer: Mode in which groups of ranks exchange keys, for attention in mode "2d".

    Raises:
        ValueError: The mode has no formulas, or a size is missing.
    """
    if mode is None:
        return LayerCost()
    if isinstance(shape, AttentionShape):
        return LayerCost(received(mode, sizes, shape, keep=keep, recompute=recompute, outer=outer))
    ranks = sizes.get("sequence", sizes.get("ring", 1) * sizes.get("ulysses", 1))
    if ranks > 1:
        sizes = {axis: size for axis, size in sizes.items() if axis not in ("sequence", "ring", "ulysses")}
        # Exact fractions let tests compare the formulas with counted elements, without a tolerance.
        shape = replace(shape, tokens=Fraction(shape.tokens, ranks))
    if isinstance(shape, TransformerShape):
        return _transformer(mode, sizes, shape, sequence_parallel=sequence_parallel)
    if mode not in _MODES:
        raise ValueError(f"there are no formulas for mode {mode!r}; there are for {', '.join(_MODES)}")
    missing = [axis for axis in _MODES[mode] if axis not in sizes]
    if missing:
        raise ValueError(f"mode {mode!r} needs the sizes of {', '.join(_MODES[mode])}; {missing[0]!r} is missing")
    if mode == "1d":
        return _one_d(sizes["tensor"], shape, sequence_parallel=sequence_parallel)
    if mode == "3d":
        return _cube(sizes["weight"], shape)
    return _square(sizes["row"], sizes["depth"] if mode == "2.5d" else 1, shape)


_MODES = {"1d": ("tensor",), "2d": ("row", "col"), "2.5d": ("depth", "row", "col"), "3d": ("output", "input", "weight")}


def _transformer(mode: str, sizes: Mapping[str, int], shape: TransformerShape, *, sequence_parallel: bool) -> LayerCost:
    m, h = shape.tokens, shape.width
    linears = [
        LinearShape(tokens=m, k=h, n=3 * h),
        LinearShape(tokens=m, k=h, n=h, role="row"),
        LinearShape(tokens=m, k=h, n=4 * h),
        LinearShape(tokens=m, k=4 * h, n=h, role="row"),
    ]
    total = LayerCost()
    for linear in linears:
        total += layer_cost(mode, sizes, linear, sequence_parallel=sequence_parallel)
    return total


def _one_d(p: int, shape: Shape, *, sequence_parallel: bool) -> LayerCost:
    """Return the cost in mode 1d. A column all-reduces its input gradient, a row its output.

    With sequence parallelism a gather and a reduce-scatter each take half an all-reduce, and the column gathers its
    input once more in backward.
    """
    full = Fraction(p - 1, p) * shape.tokens
    match shape:
        case LinearShape(role="row", n=n):
            return LayerCost(2 * full * n)
        case LinearShape(k=k):
            return LayerCost((3 if sequence_parallel else 2) * full * k)
        case EmbeddingShape(role="embedding", features=h):
            # Either one all-reduce in forward, or a reduce-scatter in forward and an all-gather in backward.
            return LayerCost(2 * full * h)
        case EmbeddingShape(features=h):
            return LayerCost((3 if sequence_parallel else 2) * full * h)
        case NormShape(features=h, mean=mean) if sequence_parallel:
            # The gradients of the weights are partial over ranks with different tokens, and are summed once a step.
            return LayerCost(once=2 * Fraction(p - 1, p) * (2 if mean else 1) * h)
        case ModelShape():
            return _model(p, shape, sequence_parallel=sequence_parallel)
    return LayerCost()


def _model(p: int, shape: ModelShape, *, sequence_parallel: bool) -> LayerCost:
    """Return the cost of a model in mode 1d.

    Attention and MLP each begin one sharded region and end it with one sum: 8 times the activations for a dense layer,
    forward and backward. With sequence parallelism each gathers its input again in backward, experts gather their input
    and split their output, and both ends of the layers split and gather once. Experts also sum the gradient of the
    tokens' routing weights. The loss sums three numbers per token.
    """
    one = Fraction(p - 1, p)
    activations = one * shape.tokens * shape.width
    half = 5 if sequence_parallel else 4  # of an attention or an MLP, there and back
    halves = 2 * shape.layers - shape.expert_layers
    kept = shape.layers * activations if sequence_parallel and shape.latent else Fraction(0)
    experts = (6 if sequence_parallel else 4) * activations + 2 * one * shape.tokens * shape.experts_per_token
    experts += 4 * activations * shape.shared_experts
    ends = (6 if sequence_parallel else 4) * activations + 2 * one * 3 * shape.tokens
    once = 2 * one * shape.layers * shape.norms * shape.width if sequence_parallel else Fraction(0)
    return LayerCost(halves * half * activations - kept + shape.expert_layers * experts + ends, once)


def _square(q: int, depth: int, shape: Shape) -> LayerCost:
    """Return the cost of SUMMA. Forward and backward broadcast both operands, and backward reduces both gradients."""
    m = Fraction(shape.tokens, depth)
    # A rank holds one of q * q blocks of an operand, and receives those of the q - 1 other ranks in its row or column.
    one = Fraction(q - 1, q * q)
    # All layers of the depth axis hold the same weights and see different tokens, so they sum the weights' gradients.
    over_depth = 2 * Fraction(depth - 1, depth) / (q * q)
    match shape:
        case LinearShape(k=k, n=n):
            # Forward broadcasts both operands, backward broadcasts them again and reduces both gradients.
            return LayerCost(3 * one * (m * k + k * n), over_depth * k * n)
        case EmbeddingShape(role="embedding", features=h, vocabulary=v):
            # The look-up ends in a reduce-scatter over "row", and its backward is an all-gather.
            return LayerCost(2 * one * m * h, over_depth * v * h)
        case EmbeddingShape(features=h, vocabulary=v):
            swaps = Fraction(2 * h * v, q * q) if q > 1 else Fraction(0)  # off the diagonal; nothing on it
            return LayerCost(3 * one * (m * h + h * v) + swaps, over_depth * v * h)
        case NormShape(features=h, mean=mean):
            ranks = q * depth
            vectors = 2 * Fraction(ranks - 1, ranks) * (2 if mean else 1) * Fraction(h, q)
            # Forward sums the mean, then the variance; backward sums two means. An all-reduce counts twice.
            return LayerCost((8 if mean else 4) * one * m, vectors)
    return LayerCost()


def _cube(d: int, shape: Shape) -> LayerCost:
    """Return the cost in mode 3d.

    Forward and backward gather activations and weight; backward reduce-scatters both gradients.
    """
    m = shape.tokens
    # A rank holds one of d**3 blocks, and receives those of the d - 1 other ranks on one axis of the cube.
    one = Fraction(d - 1, d**3)
    match shape:
        case LinearShape(k=k, n=n):
            # Forward gathers both operands, backward gathers them again and reduce-scatters both gradients. The
            # output is reduce-scattered, and its gradient is gathered.
            return LayerCost(one * (3 * m * k + 3 * k * n + 2 * m * n))
        case EmbeddingShape(role="embedding", features=h, vocabulary=v):
            return LayerCost(2 * one * (m * h + v * h))
        case EmbeddingShape(features=h, vocabulary=v):
            return LayerCost(one * (3 * m * h + 3 * h * v + 2 * m * v))
        case NormShape(features=h, mean=mean):
            vectors = 2 * Fraction(d * d - 1, d * d) * (2 if mean else 1) * Fraction(h, d)
            return LayerCost((8 if mean else 4) * one * m, vectors)
    return LayerCost()
