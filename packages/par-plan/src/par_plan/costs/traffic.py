"""Bytes that one rank receives in a step: the formulas of par-layers and par-zero, put together for a GPT."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

from par_groups import Topology, axis_size
from par_layers import EmbeddingShape, LayerCost, LinearShape, NormShape, layer_cost
from par_zero import traffic

from ..experts.costs import all_reduced, partial_elements, routed_traffic, tensor_bytes, tensor_operations
from ..experts.mixture import Load, Mixture
from ..inputs import NumberWidths
from ..shape import ModelSlice, Shape, TensorSplit, padded
from .memory import ZeroSharding
from .pipeline import PipelineRank

HEADER = 512
"""Bytes in front of each message between pipeline stages."""

MESSAGE_NUMBER = 4
"""Bytes of a number in such a message: a stage gives fp32, whatever it computes in."""


@dataclass(frozen=True, kw_only=True)
class AxisTraffic:
    """One kind of traffic over one axis in a step.

    Args:
        axis: Name of the topology's axis; "data" are all ranks that average gradients, those of a sequence among them,
            and "expert_data" those that have copies of the same experts.
        what: Kind of data, such as "gradients".
        operations: Number of collectives, or of messages that are received.
        bytes: Bytes that a rank receives.
    """

    axis: str
    what: str
    operations: float
    bytes: float


def over(transfer: AxisTraffic, topology: Topology) -> str:
    """Return the axes of traffic as text; gradients of a split sequence use "data x sequence"."""
    if transfer.axis == "expert_data":
        return "data x expert_data"
    if transfer.axis != "data":
        return transfer.axis
    more = {axis: axis_size(topology, axis) for axis in ("sequence", "expert")}
    return " x ".join(["data", *(name for name, ranks in more.items() if ranks > 1)])


def data_traffic(
    replicas: ZeroSharding, numbers: NumberWidths, axis: str = "data", *, flags: bool = True
) -> list[AxisTraffic]:
    """Return the traffic of gradients and parameters between data ranks, and of the flags after a reduction.

    Args:
        replicas: The replicas.
        numbers: Widths of numbers.
        axis: Name of the axis, as in `AxisTraffic`.
        flags: Whether there are flags: copies of experts need no more than those of all ranks they are among.
    """
    zero, ranks, accumulates = replicas.zero, replicas.ranks, replicas.accumulates
    if ranks == 1:
        return []
    # Where gradients accumulate, two passes stand for any number of them: only the last one communicates.
    both = traffic(zero, replicas.elements, ranks, microbatches=1 + accumulates, no_sync=accumulates)
    others = (ranks - 1) / ranks
    # An all-reduce receives twice the bytes of a reduce-scatter: the sums arrive after the partial sums.
    gradients = (2 if zero == 0 else 1) * replicas.elements * others
    transfers = [
        AxisTraffic(axis=axis, what="gradients", operations=replicas.chunks, bytes=gradients * numbers.gradient),
    ]
    if flags:
        transfers.append(flags_traffic(ranks, axis))
    if zero:
        again = zero == 3 and not accumulates  # gathered for forward and for backward, but for those that stay
        frozen, of_frozen = (replicas.frozen, replicas.frozen_chunks) if zero == 3 else (0, 0)
        parameters = both - gradients + frozen * others * (1 + again) - (replicas.stays * others if again else 0)
        operations = (replicas.chunks + of_frozen) * (1 + again)
        transfers.append(
            AxisTraffic(axis=axis, what="parameters", operations=operations, bytes=parameters * numbers.weight)
        )
    return transfers


def flags_traffic(ranks: int, axis: str) -> AxisTraffic:
    """Return the traffic of the flags after a reduction.

    Flags report whether a rank computed all gradients and whether the order of reductions is unchanged. Two more
    compare the steps that the ranks have taken; at stage 3 they also compare how the pass ended.

    Args:
        ranks: Number of data ranks.
        axis: Name of the axis, as in `AxisTraffic`.
    """
    numbers = 4  # int32
    return AxisTraffic(axis=axis, what="flags", operations=1, bytes=2 * (ranks - 1) / ranks * 4 * numbers)


def tensor_traffic(
    shape: Shape,
    split: TensorSplit,
    numbers: NumberWidths,
    part: ModelSlice,
    microbatches: Mapping[int, int],
    replicas: ZeroSharding,
) -> list[AxisTraffic]:
    """Return the traffic of activations, weights and partial gradients over the tensor axis.

    Args:
        shape: The model's sizes.
        split: The cut of the tensor mode.
        numbers: Widths of numbers.
        part: Slice of the model on this rank.
        microbatches: Number of microbatches by their number of tokens on all ranks of the tensor group together.
        replicas: The data-parallel replicas; each sums its share of the partial gradients.
    """
    if split.ranks == 1:
        return []
    received = sum(
        times * _microbatch_bytes(shape, split, numbers, part, tokens) for tokens, times in microbatches.items()
    )
    transfers = [
        AxisTraffic(
            axis="tensor",
            what="activations" if split.mode == "1d" else "activations and weights",
            operations=sum(microbatches.values()) * _microbatch_operations(shape, split, numbers, part),
            bytes=received,
        )
    ]
    partial = _partial_gradients(shape, split, part) / (replicas.ranks if replicas.zero else 1)
    if partial:
        groups = 2 if split.mode == "3d" or dict(split.axes).get("depth") else 1  # two kinds of groups that sum
        transfers.append(
            AxisTraffic(axis="tensor", what="partial gradients", operations=groups, bytes=partial * numbers.master)
        )
    return transfers


def exchange_traffic(
    mixture: Mixture | None,
    split: TensorSplit,
    numbers: NumberWidths,
    layers: int,
    microbatches: Mapping[int, int],
    load: Load,
) -> list[AxisTraffic]:
    """Return the traffic between expert ranks: dispatched tokens, combined outputs, and token counts.

    Args:
        mixture: Layer of experts; None: the model has no experts.
        split: Tensor split, and placement of experts.
        numbers: Widths of numbers.
        layers: Number of layers with experts that the rank has.
        microbatches: Number of microbatches by their number of tokens on all ranks of the tensor group together.
        load: Relative load of the experts; the result is for the rank with the most tokens.
    """
    if mixture is None or split.experts.parallel == 1 or not layers:
        return []
    each = [
        (routed_traffic(mixture, split.experts, numbers, tokens, load), layers * times)
        for tokens, times in microbatches.items()
    ]
    passes = sum(times for _, times in each)
    return [
        AxisTraffic(
            axis="expert_parallel",
            what=what,
            # Tokens and outputs travel in forward and, as gradients, in backward. Counts are exchanged once.
            operations=passes * (1 if what == "counts" else 2),
            bytes=sum(getattr(one, what) * times for one, times in each),
        )
        for what in ("dispatch", "combine", "counts")
    ]


class Residual(Protocol):
    """Residual stream of a model, which stages send to each other."""

    @property
    def width(self) -> int:
        """Number of features."""

    @property
    def tied(self) -> bool:
        """Whether the table of the embedding is the classifier's weight, too."""


def pipeline_traffic(
    shape: Residual,
    split: TensorSplit,
    place: PipelineRank,
    part: ModelSlice,
    microbatches: Mapping[int, int],
    table: float,
) -> list[AxisTraffic]:
    """Return the traffic between neighbouring stages, with a final message from each neighbour.

    Args:
        shape: The model's sizes.
        split: The cut of the tensor mode.
        place: The rank's place in the pipeline.
        part: Slice of the model on this rank.
        microbatches: Number of microbatches by their number of tokens on all ranks of the tensor group together.
        table: Bytes of the gradient of the embedding's table, which is sent if the first and the last rank share it.
    """
    if not place.neighbours:
        return []
    # Each tensor rank sends its part of the residual stream to the same rank of the next stage.
    token = shape.width * MESSAGE_NUMBER / split.tokens / split.features
    # Messages are padded to the 64 bytes to which tensors in them are aligned.
    bodies = sum(times * math.ceil(tokens * token / 64) * 64 for tokens, times in microbatches.items())
    messages = place.received * sum(microbatches.values()) + place.neighbours
    received = place.received * bodies + messages * HEADER
    transfers = [AxisTraffic(axis="pipeline", what="activations", operations=messages, bytes=received)]
    # With a tied table, the first and the last stage each have a part of its gradient and exchange it once per step.
    if shape.tied and part.first != part.last:
        transfers.append(AxisTraffic(axis="pipeline", what="tied table", operations=1, bytes=table))
    return transfers


@lru_cache(maxsize=4096)
def _microbatch_bytes(shape: Shape, split: TensorSplit, numbers: NumberWidths, part: ModelSlice, tokens: int) -> float:
    """Return the bytes over the tensor axis for forward and backward of one microbatch."""
    total = (part.blocks - part.mixtures) * _block_bytes(shape, split.dense, numbers, tokens)
    if shape.mixture is not None:
        attention = _block_bytes(shape, split.dense, numbers, tokens, halves=1)
        total += part.mixtures * (attention + tensor_bytes(shape.mixture, split.experts, numbers, tokens))
    if part.first:
        table = EmbeddingShape(tokens=tokens, features=shape.width, vocabulary=_table_rows(shape, split))
        total += float(_cost(split, table).each) * numbers.residual
    if part.last:
        total += float(_cost(split, NormShape(tokens=tokens, features=shape.width)).each) * 4
        total += float(_cost(split, _classifier(shape, split, tokens)).each) * numbers.product
        # The loss: three fp32 numbers a token over those who share logits, and a mean over those who share tokens.
        total += 4 * (all_reduced(split.inner, 3 * tokens / split.inner_tokens) + all_reduced(split.inner_tokens, 1))
    return total


@lru_cache(maxsize=4096)
def _block_bytes(shape: Shape, split: TensorSplit, numbers: NumberWidths, tokens: int, halves: int = 2) -> float:
    """Return the bytes over the tensor axis for one block and microbatch; one half is attention."""
    linears = sum((_cost(split, linear) for linear in _linears(shape, tokens)[: 2 * halves]), LayerCost())
    products = linears.each
    if _keeps_gathered_input(split, numbers):
        # Each half of a block gathers one input, and with a saved copy backward does not gather it again.
        products -= halves * Fraction(split.ranks - 1, split.ranks) * tokens * shape.width
    norms = halves * _cost(split, NormShape(tokens=tokens, features=shape.width))  # their sums are fp32
    return float(products) * numbers.product + float(norms.each) * 4


def _keeps_gathered_input(split: TensorSplit, numbers: NumberWidths) -> bool:
    """Return whether column layers save their gathered input in float8, which saves a gather in backward."""
    return split.sequence and numbers.saved < numbers.product


@lru_cache(maxsize=4096)
def _partial_gradients(shape: Shape, split: TensorSplit, part: ModelSlice) -> float:
    """Return the elements that a rank receives per step to sum partial gradients.

    Gradients of weights are summed over the depth axis, gradients of biases, norms and positions over the tokens.
    """
    h, linears = shape.width, _once_of_linears(shape, split.dense)
    column_biases = all_reduced(split.inner_tokens, (shape.attended + shape.mlp) / split.inner)
    row_biases = all_reduced(split.tokens, 2 * h / split.features)
    norm = float(_cost(split, NormShape(tokens=1, features=h)).once)
    total = part.blocks * (linears + column_biases + row_biases + 2 * norm)
    if shape.mixture is not None:  # in mode 1d, where of these the biases of rows alone are partial, one of them less
        total += part.mixtures * (partial_elements(shape.mixture, split.experts) - row_biases / 2)
    if part.first:
        table = EmbeddingShape(tokens=1, features=h, vocabulary=_table_rows(shape, split))
        total += float(_cost(split, table).once) + all_reduced(split.tokens, shape.context * h / split.features)
    if part.last:
        total += norm
        if not (shape.tied and part.first):  # else it is the table, which is summed once
            total += float(_cost(split, _classifier(shape, split, 1)).once)
    return total


@lru_cache(maxsize=4096)
def _once_of_linears(shape: Shape, split: TensorSplit) -> float:
    """Return the elements that a rank receives per step to sum partial gradients of a block's weights."""
    return float(sum((_cost(split, linear).once for linear in _linears(shape, 1)), Fraction(0)))


def _microbatch_operations(shape: Shape, split: TensorSplit, numbers: NumberWidths, part: ModelSlice) -> int:
    """Return the number of collectives over the tensor axis for one microbatch."""
    q = split.inner
    # In mode 1d, a column layer reduces its input gradient and a row layer its output. With sequence parallelism, a
    # column layer gathers its input in forward and again in backward, and reduce-scatters its gradient; a row layer
    # reduce-scatters its output and gathers the gradient.
    column, row, embedding = {
        "1d": (3, 2, 2) if split.sequence else (1, 1, 1),
        "2d": (6 * q, 6 * q, 2),
        "2.5d": (6 * q, 6 * q, 2),
        "3d": (8, 8, 4),
    }[split.mode or "1d"]
    norm = 3 if split.features > 1 else 0
    classifier = column + (2 if shape.tied and split.mode in ("2d", "2.5d") else 0)
    loss = 2 + (split.inner_tokens > 1)
    half = column - _keeps_gathered_input(split, numbers) + row + norm
    blocks = (2 * part.blocks - part.mixtures) * half
    if shape.mixture is not None:
        blocks += part.mixtures * tensor_operations(shape.mixture, split.experts)
    return blocks + part.first * embedding + part.last * (norm + classifier + loss)


def _linears(shape: Shape, tokens: int) -> list[LinearShape]:
    """Return the four linear layers of a block."""
    h = shape.width
    return [
        LinearShape(tokens=tokens, k=h, n=shape.attended),
        LinearShape(tokens=tokens, k=h, n=h, role="row"),
        LinearShape(tokens=tokens, k=h, n=shape.mlp),
        LinearShape(tokens=tokens, k=shape.mlp, n=h, role="row"),
    ]


def _classifier(shape: Shape, split: TensorSplit, tokens: int) -> LinearShape | EmbeddingShape:
    if shape.tied:
        rows = _table_rows(shape, split)
        return EmbeddingShape(tokens=tokens, features=shape.width, vocabulary=rows, role="tied classifier")
    return LinearShape(tokens=tokens, k=shape.width, n=padded(shape.vocabulary, split.inner))


def _table_rows(shape: Shape, split: TensorSplit) -> int:
    """Return the rows of the embedding's table with padding."""
    return padded(shape.vocabulary, split.matrix // split.features)


def _cost(split: TensorSplit, shape: LinearShape | NormShape | EmbeddingShape) -> LayerCost:
    """Return par-layers' cost of a layer of these sizes."""
    sizes = {"tensor": split.ranks} if split.mode == "1d" else dict(split.axes)
    return layer_cost(split.mode, sizes, shape, sequence_parallel=split.sequence)
