"""Bytes that one rank receives in a step: the formulas of par-layers and par-zero, put together for a GPT."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from par_layers import Cost, LinearShape, NormShape, TableShape, cost
from par_zero import traffic

from .inputs import Numbers
from .memory import Chunks, Sharing
from .pipeline import Place
from .shape import Cut, Part, Shape, padded

HEADER = 512
"""Bytes in front of what a pipeline's stages send each other."""

BORDER = 4
"""Bytes of a number between stages: each gives fp32, whatever it computes in."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """What goes over one axis in a step.

    Args:
        axis: Of the topology.
        what: Is moved.
        operations: Collectives, or messages received.
        bytes: That a rank receives.
    """

    axis: str
    what: str
    operations: float
    bytes: float


def data_traffic(chunks: Chunks, numbers: Numbers, sharing: Sharing) -> list[Move]:
    """Gradients and parameters over the data axis, and for each reduction a word: that a rank had all gradients."""
    zero, ranks, size = sharing.zero, sharing.ranks, chunks.total
    if ranks == 1:
        return []
    held = sharing.held
    elements = traffic(zero, size, ranks, microbatches=1 + held, no_sync=held)  # the number of passes does not matter
    share = (ranks - 1) / ranks
    gradients = (2 if zero == 0 else 1) * size * share
    parameters = elements - gradients - (chunks.stays * share if zero == 3 and not held else 0)
    moves = [
        Move(axis="data", what="gradients", operations=chunks.chunks, bytes=gradients * numbers.gradient),
        Move(axis="data", what="flags", operations=1, bytes=2 * share * 4),
    ]
    if zero:
        times = 2 if zero == 3 and not held else 1
        moves.append(
            Move(axis="data", what="parameters", operations=times * chunks.chunks, bytes=parameters * numbers.weight)
        )
    return moves


def tensor_traffic(
    shape: Shape, cut: Cut, numbers: Numbers, part: Part, microbatches: Mapping[int, int], sharing: Sharing
) -> list[Move]:
    """Activations, weights and partial gradients over the tensor axis.

    Args:
        shape: The model.
        cut: The tensor mode.
        numbers: Bytes of each.
        part: What this rank has of the model.
        microbatches: By tokens, on all ranks of the tensor group together: how many there are.
        sharing: Of the gradients that are summed.
    """
    if cut.ranks == 1:
        return []
    moved = sum(times * _each(shape, cut, numbers, part, tokens) for tokens, times in microbatches.items())
    moves = [
        Move(
            axis="tensor",
            what="activations" if cut.mode == "1d" else "activations and weights",
            operations=sum(microbatches.values()) * _operations(shape, cut, numbers, part),
            bytes=moved,
        )
    ]
    partial = _once(shape, cut, part) / (sharing.ranks if sharing.zero else 1)
    if partial:
        sets = 1 if cut.mode != "3d" and not dict(cut.axes).get("depth") else 2
        width = 4 if numbers.copied else numbers.gradient
        moves.append(Move(axis="tensor", what="partial gradients", operations=sets, bytes=partial * width))
    return moves


def pipeline_traffic(
    shape: Shape, cut: Cut, place: Place, part: Part, microbatches: Mapping[int, int], table: float
) -> list[Move]:
    """Activations and their gradients from neighbouring stages; at the end each neighbour says that it is done.

    Args:
        shape: The model.
        cut: The tensor mode.
        place: In the pipeline.
        part: What this rank has of the model.
        microbatches: By tokens, on all ranks of the tensor group together: how many there are.
        table: Bytes of the gradient of the embedding's table; sent where the first and the last rank use it.
    """
    if not place.neighbours:
        return []
    share = shape.width * BORDER / cut.tokens / cut.features
    bodies = sum(times * math.ceil(tokens * share / 64) * 64 for tokens, times in microbatches.items())
    messages = place.received * sum(microbatches.values())
    moves = [
        Move(
            axis="pipeline",
            what="activations",
            operations=messages + place.neighbours,
            bytes=place.received * bodies + (messages + place.neighbours) * HEADER,
        )
    ]
    if shape.tied and part.first != part.last:
        moves.append(Move(axis="pipeline", what="tied table", operations=1, bytes=table))
    return moves


@lru_cache(maxsize=4096)
def _each(shape: Shape, cut: Cut, numbers: Numbers, part: Part, tokens: int) -> float:
    """Bytes of the forward and backward of one microbatch."""
    total = part.blocks * _block(shape, cut, numbers, tokens)
    if part.first:
        table = TableShape(tokens=tokens, features=shape.width, vocabulary=_table_rows(shape, cut))
        total += float(_cost(cut, table).each) * numbers.residual
    if part.last:
        total += float(_cost(cut, NormShape(tokens=tokens, features=shape.width)).each) * 4
        total += float(_cost(cut, _head(shape, cut, tokens)).each) * numbers.product
        total += _loss(cut, tokens)
    return total


@lru_cache(maxsize=4096)
def _block(shape: Shape, cut: Cut, numbers: Numbers, tokens: int) -> float:
    linears = sum((_cost(cut, linear) for linear in _linears(shape, tokens)), Cost())
    again = 2 * Fraction(cut.ranks - 1, cut.ranks) * tokens * shape.width if _keeps_gathered(cut, numbers) else 0
    norms = 2 * _cost(cut, NormShape(tokens=tokens, features=shape.width))  # their sums are fp32
    return float(linears.each - again) * numbers.product + float(norms.each) * 4


def _keeps_gathered(cut: Cut, numbers: Numbers) -> bool:
    """Whether column layers keep their gathered input, in float8, and so need not gather it again for backward."""
    return cut.sequence and numbers.saved < numbers.product


def _loss(cut: Cut, tokens: int) -> float:
    """Three fp32 numbers a token over those who share the logits, and the mean over those who share the tokens."""
    parts, others = cut.inner, cut.inner_tokens
    return 4 * (2 * (parts - 1) / parts * 3 * tokens / others + 2 * (others - 1) / others)


@lru_cache(maxsize=4096)
def _once(shape: Shape, cut: Cut, part: Part) -> float:
    """Elements of partial gradients: of weights over the depth, of what else is added or scaled over the tokens."""
    h = shape.width
    linears = sum((_cost(cut, linear).once for linear in _linears(shape, 1)), Fraction(0))
    opened = _all_reduce(cut.inner_tokens, (shape.attended + shape.mlp) / cut.inner)
    closed = _all_reduce(cut.tokens, 2 * h / cut.features)
    norm = float(_cost(cut, NormShape(tokens=1, features=h)).once)
    total = part.blocks * (float(linears) + opened + closed + 2 * norm)
    if part.first:
        table = TableShape(tokens=1, features=h, vocabulary=_table_rows(shape, cut))
        total += float(_cost(cut, table).once) + _all_reduce(cut.tokens, shape.context * h / cut.features)
    if part.last:
        shared = shape.tied and part.first  # one table, which is summed once
        total += norm + (0.0 if shared else float(_cost(cut, _head(shape, cut, 1)).once))
    return total


def _operations(shape: Shape, cut: Cut, numbers: Numbers, part: Part) -> int:
    """Collectives of one microbatch, forward and backward."""
    q = cut.inner
    column, row, embedding = {
        "1d": (3, 2, 2) if cut.sequence else (1, 1, 1),
        "2d": (6 * q, 6 * q, 2),
        "2.5d": (6 * q, 6 * q, 2),
        "3d": (8, 8, 4),
    }[cut.mode or "1d"]
    norm = 3 if cut.features > 1 else 0
    head = column + (2 if shape.tied and cut.mode in ("2d", "2.5d") else 0)
    loss = 2 + (cut.inner_tokens > 1)
    block = 2 * (column - _keeps_gathered(cut, numbers) + row + norm)
    return part.blocks * block + part.first * embedding + part.last * (norm + head + loss)


def _linears(shape: Shape, tokens: int) -> list[LinearShape]:
    h = shape.width
    return [
        LinearShape(tokens=tokens, k=h, n=shape.attended),
        LinearShape(tokens=tokens, k=h, n=h, role="row"),
        LinearShape(tokens=tokens, k=h, n=shape.mlp),
        LinearShape(tokens=tokens, k=shape.mlp, n=h, role="row"),
    ]


def _head(shape: Shape, cut: Cut, tokens: int) -> LinearShape | TableShape:
    if shape.tied:
        rows = _table_rows(shape, cut)
        return TableShape(tokens=tokens, features=shape.width, vocabulary=rows, role="tied classifier")
    return LinearShape(tokens=tokens, k=shape.width, n=padded(shape.vocabulary, cut.inner))


def _table_rows(shape: Shape, cut: Cut) -> int:
    return padded(shape.vocabulary, cut.matrix // cut.features)


def _cost(cut: Cut, shape: LinearShape | NormShape | TableShape) -> Cost:
    return cost(cut.mode, _sizes(cut), shape, sequence_parallel=cut.sequence)


def _sizes(cut: Cut) -> dict[str, int]:
    return {"tensor": cut.ranks} if cut.mode == "1d" else dict(cut.axes)


def _all_reduce(ranks: int, elements: float) -> float:
    return 2 * (ranks - 1) / ranks * elements
