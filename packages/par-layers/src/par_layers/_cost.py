"""What each layer costs in communication, as exact formulas. Pure; tests count the collectives and compare.

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
        mean: Whether it is LayerNorm.
    """

    tokens: int | Fraction
    features: int
    mean: bool = True


@dataclass(frozen=True, kw_only=True)
class EmbeddingShape:
    """A vocabulary table, as an embedding or as a classifier that shares it.

    Args:
        tokens: Number of tokens, batch x sequence.
        features: Features of a row.
        vocabulary: Number of rows.
        role: What the table is used for.
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
    """A model of layers that was cut in place, in mode 1d: embedding, attention and MLPs, and cut logits with a loss.

    Args:
        tokens: Number of tokens, batch x sequence.
        width: Features of the residual stream.
        layers: Number of layers.
        expert_layers: Number of those that have experts in the place of an MLP, each of which is cut.
        experts_per_token: Number of experts that a token goes to.
        shared_experts: Number of shared experts in each of these layers, which are MLPs that every token goes to.
        latent: Whether attention is latent, whose whole input is kept, so that it is not gathered once more.
        norms: Number of vectors of the width in each layer, outside what is cut, as norms have.
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
    """What a layer costs in a mode.

    Args:
        mode: "1d", "2d", "2.5d", "3d"; for an `AttentionShape` "gather", "ring", "ulysses", "2d"; None is one device
            and costs nothing.
        sizes: Number of ranks on the mode's axes, such as `{"row": 4, "col": 4}` or a topology's `axes`; 1d takes
            "tensor", attention takes "sequence", and in 2d "ring" and "ulysses". Other shapes take these too: over them
            tokens are cut, and parameters are not.
        shape: The kind and the sizes of the layer.
        sequence_parallel: Whether activations are cut along the sequence, in 1d.
        keep: Whether attention in mode "gather" keeps what it fetched in forward for backward.
        recompute: Whether attention's forward is computed once more in backward.
        outer: How keys travel between the groups that exchange tokens for heads, for attention in mode "2d".

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
    """Column: the all-reduce of the input gradient; row: that of the output.

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
            return LayerCost(2 * full * h)
        case EmbeddingShape(features=h):
            return LayerCost((3 if sequence_parallel else 2) * full * h)
        case NormShape(features=h, mean=mean) if sequence_parallel:
            return LayerCost(once=2 * Fraction(p - 1, p) * (2 if mean else 1) * h)
        case ModelShape():
            return _model(p, shape, sequence_parallel=sequence_parallel)
    return LayerCost()


def _model(p: int, shape: ModelShape, *, sequence_parallel: bool) -> LayerCost:
    """Attention and MLP are entered once, and summed once: 8 times the activations for a dense layer, there and back.

    With sequence parallelism each of them gathers its input once more in backward, experts gather theirs and cut their
    output, and both ends of the layers cut and gather once. Experts also sum the gradient of the weights that tokens
    have for them. The loss sums three numbers a token.
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
    """SUMMA: both operands are broadcast in forward and again in backward, where both gradients are reduced."""
    m = Fraction(shape.tokens, depth)
    one = Fraction(q - 1, q * q)
    over_depth = 2 * Fraction(depth - 1, depth) / (q * q)
    match shape:
        case LinearShape(k=k, n=n):
            return LayerCost(3 * one * (m * k + k * n), over_depth * k * n)
        case EmbeddingShape(role="embedding", features=h, vocabulary=v):
            return LayerCost(2 * one * m * h, over_depth * v * h)
        case EmbeddingShape(features=h, vocabulary=v):
            swaps = Fraction(2 * h * v, q * q) if q > 1 else Fraction(0)  # off the diagonal; nothing on it
            return LayerCost(3 * one * (m * h + h * v) + swaps, over_depth * v * h)
        case NormShape(features=h, mean=mean):
            ranks = q * depth
            vectors = 2 * Fraction(ranks - 1, ranks) * (2 if mean else 1) * Fraction(h, q)
            return LayerCost((8 if mean else 4) * one * m, vectors)
    return LayerCost()


def _cube(d: int, shape: Shape) -> LayerCost:
    """Activations and weight are gathered in forward and in backward, where both gradients are reduce-scattered."""
    m = shape.tokens
    one = Fraction(d - 1, d**3)
    match shape:
        case LinearShape(k=k, n=n):
            return LayerCost(one * (3 * m * k + 3 * k * n + 2 * m * n))
        case EmbeddingShape(role="embedding", features=h, vocabulary=v):
            return LayerCost(2 * one * (m * h + v * h))
        case EmbeddingShape(features=h, vocabulary=v):
            return LayerCost(one * (3 * m * h + 3 * h * v + 2 * m * v))
        case NormShape(features=h, mean=mean):
            vectors = 2 * Fraction(d * d - 1, d * d) * (2 if mean else 1) * Fraction(h, d)
            return LayerCost((8 if mean else 4) * one * m, vectors)
    return LayerCost()
