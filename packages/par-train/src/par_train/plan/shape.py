"""The sizes of a transformer, and what a tensor mode leaves of them on one rank. Pure arithmetic, no torch."""

import math
from dataclasses import dataclass
from typing import Any

from par_groups import Topology

MODES = ("1d", "2d", "2.5d", "3d")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT: learned positions, pre-norm blocks with biases, a classifier over the vocabulary without one.

    Args:
        layers: Blocks.
        width: Of the residual stream.
        heads: Of attention; they divide the width.
        context: Tokens of a window.
        vocabulary: Classes; of bytes 256.
        hidden: Width inside the MLP; None: four times `width`.
        kv_heads: Heads of keys and values; None: as many as `heads`.
        tied: Whether the embedding's table is the classifier's too.

    Raises:
        ValueError: A size below 1, or heads that do not divide.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256
    hidden: int | None = None
    kv_heads: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1 and name != "tied":
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.width % self.heads or self.heads % self.keys:
            raise ValueError(
                f"width {self.width}, heads {self.heads} and kv_heads {self.keys}: each must be a multiple of the next"
            )

    @property
    def mlp(self) -> int:
        """The width inside the MLP."""
        return self.hidden or 4 * self.width

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def attended(self) -> int:
        """Features of queries, keys and values together."""
        return self.width + 2 * self.keys * (self.width // self.heads)

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return count(self, Cut(), Part(blocks=self.layers, first=True, last=True)).total

    def flops(self, part: "Part") -> float:
        """Floating-point operations of a token in forward and backward: twice as many in backward.

        Attention is causal, so that half of its products are computed. Two for each element of a matrix.
        """
        h = self.width
        matrices = h * self.attended + h * h + 2 * h * self.mlp
        block = 2 * matrices + 2 * self.context * h
        return 3.0 * (part.blocks * block + part.last * 2 * h * self.vocabulary)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank of a pipeline has of a model.

    Args:
        blocks: How many.
        first: Whether it has the embeddings.
        last: Whether it has the last norm and the classifier.
    """

    blocks: int
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a tensor mode cuts: into how many parts. The default is one device.

    Args:
        mode: "1d", "2d", "2.5d", "3d"; None without one.
        sequence: Whether 1d cuts tokens where they are normed.
        ranks: Of a tensor group.
        tokens: Parts of the tokens in the residual layout.
        features: Parts of its features.
        inner_tokens: Parts of the tokens between a column and a row layer.
        inner: Parts of the features there.
        matrix: Parts of a weight.
        axes: Names and sizes of the mode's axes.
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

    @property
    def batch(self) -> int:
        """Parts of the rows of a microbatch."""
        return 1 if self.sequence else self.tokens

    @property
    def label(self) -> str:
        """Such as "1d 8, sequence"."""
        if self.mode is None:
            return "-"
        sizes = "x".join(str(size) for _, size in self.axes)
        return f"{self.mode} {sizes}{' sp' if self.sequence else ''}"


def cut_of(topology: Topology) -> Cut:
    """How the tensor mode of a topology cuts.

    Raises:
        ValueError: A mode without formulas.
    """
    ranks, (mode, options) = topology.size("tensor"), topology.modes.get("tensor", (None, {}))
    axes = {name: topology.size(name) for name in topology.leaves("tensor")}
    return make_cut(mode, ranks, axes, sequence=bool(options.get("sequence_parallel", False)))


def make_cut(mode: str | None, ranks: int, axes: dict[str, int], *, sequence: bool = False) -> Cut:
    """The cut of a mode with these axes.

    Raises:
        ValueError: A mode without formulas.
    """
    if ranks == 1 or mode is None:
        return Cut()
    sizes: dict[str, Any] = {"mode": mode, "ranks": ranks, "axes": tuple(axes.items())}
    if mode == "1d":
        return Cut(**sizes, sequence=sequence, tokens=ranks if sequence else 1, inner=ranks, matrix=ranks)
    if mode in ("2d", "2.5d"):
        q = axes["col"]
        tokens = q * axes.get("depth", 1)
        return Cut(**sizes, tokens=tokens, features=q, inner_tokens=tokens, inner=q, matrix=q * q)
    if mode == "3d":
        d = axes["weight"]
        return Cut(**sizes, tokens=d * d, features=d, inner_tokens=d * d, inner=d, matrix=d**3)
    raise ValueError(f"there are no formulas for tensor mode {mode!r}; there are for {', '.join(MODES)}")


def misfit(shape: Shape, cut: Cut, rows: int = 0) -> str | None:
    """Why a mode cannot cut a model, or a microbatch of so many rows (0: any); None if it can."""
    columns = cut.matrix // cut.inner  # parts of a column weight's input features, and of a row weight's output
    rules = [
        ("model.heads", shape.heads, cut.inner),
        ("the heads of keys", shape.keys, cut.inner),
        ("model.width", shape.width, max(cut.features, columns, cut.inner)),
        ("the MLP's width", shape.mlp, cut.matrix // cut.features),
        ("model.context", shape.context, cut.tokens if cut.sequence else 1),
        ("the rows of a microbatch", rows, cut.batch),
    ]
    for what, length, parts in rules:
        if length % parts:
            return f"{what} is {length}, which tensor mode {cut.label} cuts into {parts} parts"
    return None


@dataclass(frozen=True, kw_only=True)
class Count:
    """Elements on one rank.

    Args:
        block: Of one block.
        blocks: How many there are.
        ends: Of embeddings, last norm and classifier.
        matrices: Of the weights that are multiplied with, in all.
        table: Of the embedding's table.
        largest: Of the largest tensor.
        tensors: How many tensors there are.
    """

    block: int
    blocks: int
    ends: int
    matrices: int
    table: int
    largest: int
    tensors: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.block * self.blocks + self.ends


def count(shape: Shape, cut: Cut, part: Part) -> Count:
    """The parameters of one rank. Vocabularies are padded where they are cut."""
    h, matrix = shape.width, _block_matrices(shape) // cut.matrix
    vectors = (shape.attended + shape.mlp) // cut.inner + 6 * h // cut.features  # biases, and two norms of two
    table = padded(shape.vocabulary, cut.matrix // cut.features) * h // cut.matrix
    head = padded(shape.vocabulary, cut.inner) * h // cut.matrix
    own_head = part.last and not (shape.tied and part.first)  # else the same parameter
    sizes = {
        "table": table if part.first else 0,
        "positions": shape.context * h // cut.features if part.first else 0,
        "norm": 2 * h // cut.features if part.last else 0,
        "head": (table if shape.tied else head) if own_head else 0,
    }
    return Count(
        block=matrix + vectors,
        blocks=part.blocks,
        ends=sum(sizes.values()),
        matrices=part.blocks * matrix + (head if part.last else 0),
        table=table,
        largest=max(h * max(shape.mlp, shape.attended) // cut.matrix if part.blocks else 0, *sizes.values()),
        tensors=12 * part.blocks + 2 * part.first + 2 * part.last + own_head,
    )


def _block_matrices(shape: Shape) -> int:
    h = shape.width
    return h * shape.attended + h * h + 2 * h * shape.mlp


def padded(length: int, parts: int) -> int:
    """The next multiple."""
    return math.ceil(length / parts) * parts
