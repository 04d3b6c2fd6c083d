"""Bytes on one rank: what stays from step to step, and what autograd keeps in between."""

import math
from dataclasses import dataclass

import torch

from par_zero import ShardOptions, memory

from .inputs import Numbers
from .shape import Count, Cut, Part, Shape

BUCKET = ShardOptions().bucket
"""Bytes of parameters that par-zero packs together."""

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank at its fullest.

    Args:
        parameters: As the model uses them.
        gradients: Between their reduction and the step.
        optimizer: Its state, and its own copies of parameters.
        buffers: What gradients are reduced in, and parameters that are gathered.
        activations: What autograd keeps for backward; of all microbatches that wait.
        step: fp32 gradients while the optimizer steps; activations and buffers are free by then.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float = 0.0
    activations: float = 0.0
    step: float = 0.0

    @property
    def state(self) -> float:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """At the fullest moment."""
        return self.state + max(self.buffers + self.activations, self.step)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """What data-parallel ranks share.

    Args:
        total: Elements of this rank's parameters.
        chunk: Of the largest part that is reduced as one.
        chunks: How many such parts there are.
        gathered: Elements that are whole at a time, where parameters are shared.
        stays: Of these, those that are gathered once a pass and not again for backward.
    """

    total: int
    chunk: int
    chunks: int
    gathered: int
    stays: int


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How data-parallel ranks share.

    Args:
        zero: Stage 0 to 3.
        ranks: That share.
        held: Whether gradients of several backward passes are added up before they are reduced, as in a pipeline.
        gloo: Whether a reduce-scatter receives as much as it sends.
    """

    zero: int
    ranks: int
    held: bool = False
    gloo: bool = False


def chunks_of(count: Count, numbers: Numbers, zero: int) -> Chunks:
    """The chunks of a GPT's parameters, as par-zero makes them with its defaults; padding is left out."""
    total, bucket = count.total, BUCKET // numbers.master
    if zero < 3:
        chunks = min(count.tensors, math.ceil(total / bucket))
        chunk = min(total, bucket + count.largest)
        return Chunks(total=total, chunk=chunk, chunks=chunks, gathered=total, stays=total)
    together = max(1, bucket // count.block)  # blocks that make up a unit
    units = math.ceil(count.blocks / together)
    unit, last = count.block * min(together, count.blocks), count.block * (count.blocks - (units - 1) * together)
    return Chunks(
        total=total,
        chunk=max(unit, count.ends),
        chunks=units + 1,
        gathered=min(total, count.ends + 2 * unit),
        stays=count.ends + last,
    )


def state_memory(chunks: Chunks, numbers: Numbers, sharing: Sharing) -> Memory:
    """Bytes of parameters, gradients, the state of Adam, and what reducing and gathering them takes.

    Where reductions are held back, gradients are whole until then, at stages 2 and 3 too, and parameters stay gathered.

    Args:
        chunks: Of this rank.
        numbers: Bytes of each.
        sharing: Among whom.
    """
    zero, ranks, total = sharing.zero, sharing.ranks, chunks.total
    kept = memory(
        zero,
        total,
        ranks,
        dtype=_DTYPES[numbers.master],
        param_dtype=_DTYPES[numbers.weight],
        slots=2,
    )
    two = min(total, 2 * chunks.chunk)
    received = two * ((zero > 0 or ranks > 2) if sharing.gloo else (zero > 0) / ranks) * (ranks > 1)
    whole = (zero > 1) * (total if sharing.held else two)
    gathered = (zero > 2) * (total if sharing.held else chunks.gathered)
    return Memory(
        parameters=kept.parameters,
        gradients=kept.gradients,
        optimizer=kept.optimizer,
        buffers=(received + whole) * numbers.gradient + gathered * numbers.weight,
        step=4 * numbers.copied * total / (ranks if zero else 1),
    )


def saved_block(shape: Shape, cut: Cut, numbers: Numbers, tokens: int) -> float:
    """Bytes that autograd keeps of one block and microbatch.

    Of the residual layout the inputs of both norms and of both column layers, and what the norms know of each token; of
    the inner layout queries, keys and values, what attention gives, and the MLP before and after its activation.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for attention that does not keep its weights.

    Args:
        shape: The model.
        cut: The tensor mode.
        numbers: Bytes of each.
        tokens: Of a microbatch, on all ranks of the tensor group together.
    """
    h, own = shape.width, tokens / cut.tokens
    inner = tokens / cut.inner_tokens / cut.inner
    float8 = numbers.saved != numbers.product  # keeps what was gathered, and of what attention gives a copy
    opened = tokens * h if float8 else own * h / cut.features
    residual = 2 * own * h / cut.features * numbers.residual + 2 * opened * numbers.saved
    attention = (shape.attended + h) * numbers.product + float8 * h * numbers.saved + shape.heads * 4
    mlp = shape.mlp * (numbers.product + numbers.saved)
    statistics = own * 4 * (2 if cut.features > 1 else 4)
    casts = numbers.cast * (h * shape.attended + h * h + 2 * h * shape.mlp) / cut.matrix
    return residual + inner * (attention + mlp) + statistics + casts


def saved_ends(shape: Shape, cut: Cut, numbers: Numbers, part: Part, tokens: int) -> float:
    """Bytes that autograd keeps of ids, last norm, logits and loss of one microbatch."""
    h, own, inner = shape.width, tokens / cut.tokens, tokens / cut.inner_tokens
    ids = tokens * (9 if cut.ranks > 1 else 8) * part.first
    norm = own * h / cut.features * (numbers.residual + numbers.product) + own * 8
    logits = inner * (4 * shape.vocabulary / cut.inner + (22 if cut.ranks > 1 else 8))
    return ids + (norm + logits + numbers.cast * h * shape.vocabulary / cut.matrix) * part.last
