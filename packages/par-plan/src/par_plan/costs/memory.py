"""Bytes on one rank: persistent state, and activations that autograd saves.

torch is here for its dtypes alone, which `par_zero.memory` takes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from par_zero import MixedPrecision, Overlap, memory

from ..budget.tiers import Offloadable
from ..inputs import NumberWidths, TrainingJob
from ..shape import ParameterCount, Shape, TensorSplit

BUCKET = Overlap().bucket_of(1)
"""Bytes of parameters that par-zero packs together."""

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Peak memory of one rank, in bytes.

    Args:
        parameters: Parameters as the model uses them.
        gradients: Gradients between their reduction and the optimizer's step.
        optimizer: The optimizer's state, and its own copies of parameters.
        buffers: Buffers for reductions, and gathered parameters.
        activations: Activations that autograd saves, for all microbatches in flight; without `logits`.
        logits: Logits over a large vocabulary, what the loss keeps of them, and their gradient.
        attention: Keys and values of other ranks of a sequence, or all tokens of some heads, and their gradients, that
            one attention holds in backward; logits are gone by then.
        arriving: Gradients of one piece as autograd makes them, before they are taken to where they are reduced.
        step: fp32 gradients while the optimizer steps; activations are free by then.
        kept: Buffers and gathered parameters that are still there when these are made.
        host: Offloaded optimizer state, gradients and parameters in host memory. Staging buffers of the disk (200 MB at
            most) are not included.
        disk: Offloaded state on a disk.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    attention: float = 0.0
    arriving: float = 0.0
    step: float = 0.0
    kept: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    @property
    def state(self) -> float:
        """Bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def backward(self) -> float:
        """Bytes beside that at the fullest moment of backward; gradients of parameters arrive when logits are gone."""
        return self.buffers + self.activations + max(self.logits, self.attention + self.arriving)

    @property
    def total(self) -> float:
        """Bytes of the device at the fullest moment."""
        return self.state + max(self.backward, self.step + self.kept)


@dataclass(frozen=True, kw_only=True)
class ZeroSharding:
    """The data-parallel replicas of one rank's parameters: how they share them, and in which pieces.

    Args:
        zero: ZeRO stage, 0 to 3.
        ranks: Number of ranks that share.
        accumulates: Whether gradients of several backward passes are added up before they are reduced, as in a
            pipeline.
        gloo: Whether a reduce-scatter receives as much as it sends.
        elements: Number of elements in this rank's parameters, before they are shared.
        chunk: Number of elements in the largest piece that is reduced as one.
        chunks: Number of pieces that are reduced as one.
        gathered: Number of elements that are whole at a time, at stage 3.
        stays: Number of those that are gathered once a pass, and not again for backward.
        reduced: Number of elements for which there are buffers that pieces are reduced in, one after the other.
        frozen: Number of elements in this rank's frozen parameters, which are sharded at stage 3 only.
        frozen_chunks: Number of pieces of frozen parameters, which stage 3 gathers one by one.
    """

    zero: int
    ranks: int
    accumulates: bool = False
    gloo: bool = False
    elements: int
    chunk: int
    chunks: int
    gathered: int
    stays: int
    reduced: int
    frozen: int = 0
    frozen_chunks: int = 0

    @property
    def received(self) -> float:
        """The part of a piece that its reduction receives into a buffer: that of gloo receives all of it.

        Between two ranks that share nothing one sum in place is enough. Other backends receive sharded gradients where
        they stay.
        """
        if self.ranks == 1:
            return 0.0
        if self.gloo:
            # gloo runs a reduce-scatter as an all-reduce of the full chunk.
            return 1.0 if self.zero or self.ranks > 2 else 0.0
        return 1 / self.ranks if self.zero == 1 else 0.0


def zero_sharding(
    count: ParameterCount,
    numbers: NumberWidths,
    *,
    zero: int,
    ranks: int,
    accumulates: bool = False,
    gloo: bool = False,
) -> ZeroSharding:
    """Return how data ranks shard the parameters of a GPT, in par-zero's default chunks without padding.

    Args:
        count: Parameter count of a rank.
        numbers: Widths of numbers.
        zero: ZeRO stage, 0 to 3.
        ranks: Number of data-parallel ranks.
        accumulates: Whether gradients accumulate over microbatches before they are reduced, as in `ZeroSharding`.
            Default: False.
        gloo: Whether a reduce-scatter needs a receive buffer as large as its input, as in `ZeroSharding`. Default:
            False.
    """
    elements, bucket = count.total - count.frozen, BUCKET // numbers.master
    frozen_pieces: list[int] = []
    if zero < 3:  # parameters fill buckets in their order
        # A chunk closes behind the parameter that fills it, so it may exceed the bucket by this parameter.
        chunk = min(elements, bucket + count.largest)
        chunks = min(count.tensors, math.ceil(elements / bucket))
        gathered = stays = elements
        # One chunk fills while the other one is reduced.
        reduced = min(elements, 2 * chunk)
    else:  # a unit is as many blocks as fill a bucket; embeddings, last norm and classifier are one more
        block = (count.block - count.frozen_block, count.frozen_block)
        units = _joined([*count.items, *[block] * count.blocks], bucket)
        frozen_ends = count.frozen - sum(frozen for _, frozen in units)
        sizes, reductions = [sum(unit) for unit in units], [trained for trained, _ in units if trained]
        chunk = max([*reductions, count.ends - frozen_ends])
        chunks = len(reductions) + (count.ends > frozen_ends)
        frozen_pieces = [frozen for frozen in (*(frozen for _, frozen in units), frozen_ends) if frozen > 0]
        # The next unit is gathered while one computes; embeddings and classifier stay gathered during the pass.
        gathered = min(count.total, count.ends + 2 * max(sizes))
        # The last two units of forward are the first of backward, and stay gathered between them. No gradient reaches
        # frozen units in front of all trained ones, so backward does not gather them.
        first = next((number for number, (trained, _) in enumerate(units) if trained), len(units))
        last = max(first, len(units) - 2)
        stays = count.ends + sum(sizes[:first]) + sum(sizes[last:])
        # A larger chunk that comes later makes both buffers larger.
        reduced = 2 * chunk if len(units) > 1 or count.ends > sizes[0] else elements
    return ZeroSharding(
        zero=zero,
        ranks=ranks,
        accumulates=accumulates,
        gloo=gloo,
        elements=elements,
        chunk=chunk,
        chunks=chunks,
        gathered=gathered,
        stays=stays,
        reduced=reduced,
        frozen=count.frozen,
        frozen_chunks=len(frozen_pieces),
    )


def _joined(modules: Sequence[tuple[int, int]], bucket: int) -> list[tuple[int, int]]:
    """Return the trained and frozen elements of units: neighbours that together have at most `bucket` elements."""
    units: list[tuple[int, int]] = []
    for trained, frozen in modules:
        # A module larger than the bucket is a unit of its own.
        if units and sum(units[-1]) + trained + frozen <= bucket:
            units[-1] = (units[-1][0] + trained, units[-1][1] + frozen)
        else:
            units.append((trained, frozen))
    return units


def share_buffers(replicas: Sequence[ZeroSharding]) -> tuple[ZeroSharding, ...]:
    """Return the shardings of several parts of a model, such as experts, with common buffers.

    One after the other is reduced in the same buffers. With sharded gradients, all reductions may be in flight at once,
    because backward does not wait for ranks outside its group.

    Args:
        replicas: Sharding of each part, computed separately.
    """
    if len(replicas) == 1:
        return tuple(replicas)
    if replicas[0].zero >= 2:
        return tuple(replace(each, reduced=each.elements if each.ranks > 1 else 0) for each in replicas)
    receive = [each for each in replicas if each.received]
    # At most two reductions are in flight, and a buffer must hold the largest chunk.
    lent = max((each.chunk for each in receive), default=0) * min(2, sum(each.chunks for each in receive))
    # The same elements take the most bytes in the part with the fewest ranks, so the buffers are counted there.
    lends = max(receive, key=lambda each: each.received, default=None)
    return tuple(replace(each, reduced=lent if each is lends else 0) for each in replicas)


def added(memories: Sequence[MemoryUse]) -> MemoryUse:
    """Return the sum of the memory of several parts; gradients of one part arrive at a time.

    Args:
        memories: Memory of each part.
    """
    sums = {one.name: sum(getattr(each, one.name) for each in memories) for one in fields(MemoryUse)}
    # Autograd makes the gradients of one part after the other, so their largest piece counts, and not their sum.
    return MemoryUse(**{**sums, "arriving": max(each.arriving for each in memories)})


def sources_of(replicas: Sequence[ZeroSharding], numbers: NumberWidths) -> tuple[Offloadable, ...]:
    """Return the state of all parts of a model that can be offloaded, the optimizer's state first.

    Args:
        replicas: The replicas of each part.
        numbers: Widths of numbers.
    """
    found: dict[str, list[Offloadable]] = {}
    for each in replicas:
        for source in (_optimizer_of(each, numbers), parameters_offloaded(each, numbers)):
            if source is not None:
                found.setdefault(source.name, []).append(source)
    return tuple(
        replace(
            parts[0],
            frees=sum(part.frees for part in parts),
            takes={tier: sum(part.takes[tier] for part in parts) for tier in parts[0].takes},
            beside=sum(part.beside for part in parts),
        )
        for parts in found.values()
    )


def state_memory(replicas: ZeroSharding, numbers: NumberWidths) -> MemoryUse:
    """Return the bytes of parameters, gradients, Adam's state and the buffers of reductions and gathers.

    While gradients accumulate they are whole, at stages 2 and 3 too, and parameters stay gathered.

    Args:
        replicas: The replicas.
        numbers: Widths of numbers.
    """
    zero, ranks, elements = replicas.zero, replicas.ranks, replicas.elements
    state = memory(
        zero,
        elements,
        ranks,
        dtype=_DTYPES[numbers.master],
        precision=MixedPrecision(param_dtype=_DTYPES[numbers.weight]),
    )
    reduced = replicas.reduced
    received = reduced * replicas.received
    whole_gradients = gathered = 0
    if zero >= 2:
        # Accumulated gradients stay unsharded until the last microbatch. Otherwise only chunks in reduction are
        # unsharded.
        whole_gradients = elements if replicas.accumulates else reduced
    if zero == 3:
        gathered = elements + replicas.frozen if replicas.accumulates else replicas.gathered
    copies = elements / (ranks if zero else 1) if numbers.copied else 0
    # Of each kind par-zero keeps two buffers, and units are freed last.
    kept = min(2 * replicas.chunk, elements) * ((zero >= 2) + replicas.received) * numbers.gradient
    return MemoryUse(
        parameters=state.parameters + replicas.frozen / (ranks if zero == 3 else 1) * numbers.weight,
        gradients=state.gradients,
        optimizer=state.optimizer,
        buffers=(received + whole_gradients) * numbers.gradient + gathered * numbers.weight,
        arriving=replicas.chunk * numbers.weight,
        step=copies * numbers.master,
        kept=kept + gathered * numbers.weight if copies else 0.0,
    )


def optimizer_offloaded(
    state: float, *, copies: float, gradients: float, numbers: NumberWidths, zero: int, gloo: bool
) -> Offloadable:
    """Return the optimizer's state and master weights as a source for offloading.

    Off an accelerator its host steps what it has, by gradients that follow, and by copies of parameters in any case.
    On a CPU, where host and device are one memory, neither is needed.

    Args:
        state: Bytes of the state and of the master weights.
        copies: Bytes of master weights for all parameters that the rank steps.
        gradients: Bytes of their gradients.
        numbers: Widths of numbers.
        zero: ZeRO stage.
        gloo: Whether the model computes on a CPU.
    """
    if gloo:
        return Offloadable(name="optimizer", frees=state, takes={"host": state, "disk": state})
    # The host steps a copy of the parameters of its own, even if the device has no masters.
    away = state if numbers.copied else state + copies
    # Clipping and norms read a copy of the gradients in the optimizer's dtype.
    casts = copies if numbers.gradient != numbers.master else 0.0
    return Offloadable(
        name="optimizer",
        frees=state + (gradients if zero >= 2 else 0),
        takes={"host": away, "disk": away},
        beside=gradients + casts,
    )


def _stepped(replicas: ZeroSharding) -> float:
    """Return the number of elements that the optimizer of a rank steps."""
    return replicas.elements / (replicas.ranks if replicas.zero else 1)


def _optimizer_of(replicas: ZeroSharding, numbers: NumberWidths) -> Offloadable:
    """Return Adam's state as a source for offloading."""
    own = _stepped(replicas)
    return optimizer_offloaded(
        own * numbers.master * (2 + numbers.copied),
        copies=own * numbers.master,
        gradients=own * numbers.gradient,
        numbers=numbers,
        zero=replicas.zero,
        gloo=replicas.gloo,
    )


def parameters_offloaded(replicas: ZeroSharding, numbers: NumberWidths) -> Offloadable | None:
    """Return the parameters as a source for offloading between gathers, at stage 3.

    Two units stay, as buffers. Nothing is gained while parameters stay gathered, as for several microbatches.

    Args:
        replicas: The replicas.
        numbers: Widths of numbers.
    """
    if replicas.zero < 3 or replicas.accumulates:
        return None
    own = replicas.elements / replicas.ranks * numbers.weight
    return Offloadable(name="parameters", frees=own, takes={"host": own, "disk": own})


def with_offload(memory: MemoryUse, replicas: ZeroSharding, numbers: NumberWidths, job: TrainingJob) -> MemoryUse:
    """Return a rank's memory with the job's offloaded fractions.

    If parameters are in host memory in the master's dtype, the host's step needs no copies of them.

    Args:
        memory: Memory of the rank without offloading.
        replicas: Sharding of the parameters over data-parallel ranks.
        numbers: Widths of numbers.
        job: Training job with the offloaded fractions.
    """
    away = job.optimizer_offloaded
    if away:
        source = _optimizer_of(replicas, numbers)
        # Only sharded gradients follow the state to the host. Below stage 2 the device keeps them until the step.
        gradients = 0.0 if replicas.gloo or replicas.zero < 2 else away * _stepped(replicas) * numbers.gradient
        memory = replace(
            memory,
            optimizer=memory.optimizer - (away * source.frees - gradients),
            gradients=memory.gradients - gradients,
            step=memory.step * (1 if replicas.gloo else 1 - away),
            host=job.host * source.takes["host"] + away * source.beside,
            disk=job.disk * source.takes["disk"],
        )
    parameters = parameters_offloaded(replicas, numbers)
    if parameters is None or not job.parameters_offloaded:
        return memory
    # Offloaded parameters in the master's dtype are the masters, so the host stores them once.
    copies = 0.0 if replicas.gloo or numbers.copied else parameters.frees
    spared = min(job.parameters_host, away)
    on_host = min(spared, job.host)
    return replace(
        memory,
        parameters=memory.parameters - job.parameters_offloaded * parameters.frees,
        host=memory.host + job.parameters_host * parameters.takes["host"] - on_host * copies,
        disk=memory.disk + job.parameters_disk * parameters.takes["disk"] - (spared - on_host) * copies,
    )


def saved_block(
    shape: Shape,
    split: TensorSplit,
    numbers: NumberWidths,
    tokens: int,
    *,
    cheap: bool = False,
    mixture: float | None = None,
) -> float:
    """Return the bytes that autograd saves of one block for one microbatch.

    In the residual layout, autograd saves the inputs of both norms and of both column layers, and the statistics of the
    norms. In the inner layout, it saves queries, keys, values, the output of attention, and the MLP before and after
    its activation.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for attention that does not keep its weights.

    Args:
        shape: The model's sizes.
        split: The cut of the tensor mode.
        numbers: Widths of numbers.
        tokens: Number of tokens in the microbatch, on all ranks of the tensor group together.
        cheap: Whether norms and the activation are computed again. Their outputs are still saved if a matmul saves a
            copy in another dtype, or if a norm sums over ranks.
        mixture: Bytes of the mixture of experts that is in the place of the MLP, with its input; None: it is an MLP.
    """
    h, own = shape.width, tokens / split.tokens
    inner = tokens / split.inner_tokens / split.inner
    float8 = numbers.saved != numbers.product  # keeps what was gathered, and a copy of what attention gives
    column_input = tokens * h if float8 else own * h / split.features
    # A norm over cut features calls a collective, so it is not computed again in backward.
    norms_again = cheap and split.features == 1 and numbers.saved == numbers.residual
    activation_again = cheap and numbers.saved == numbers.product
    residual = 2 * own * h / split.features * numbers.residual
    inputs = 2 if mixture is None else 1
    residual += 0 if norms_again else inputs * column_input * numbers.saved
    statistics = own * 4 * (2 if split.features > 1 else 4)
    # Attention saves one fp32 number for each head and token, the logarithm of its sum, and makes its weights again
    # from it.
    attention = (shape.attended + h) * numbers.product + float8 * h * numbers.saved + shape.heads * 4
    mlp = shape.mlp * (numbers.product + (0 if activation_again else numbers.saved))
    casts = numbers.cast * shape.block_matrices / split.matrix
    if mixture is not None:
        mlp, casts = 0, numbers.cast * shape.attention_matrices / split.matrix
    return residual + statistics + inner * (attention + mlp) + casts + (mixture or 0.0)


def saved_ends(
    shape: Shape, split: TensorSplit, numbers: NumberWidths, tokens: int, *, first: bool = False, last: bool = False
) -> float:
    """Return the bytes that autograd saves of token ids, last norm, logits and loss per microbatch.

    Args:
        shape: The model's sizes.
        split: The cut of the tensor mode.
        numbers: Widths of numbers.
        tokens: Number of tokens in the microbatch, on all ranks of the tensor group together.
        first: Whether this rank has the embeddings.
        last: Whether it has the last norm and the loss.
    """
    saved: float = 0
    if first:
        # Ids are int64; a cut table also keeps which of them are its own.
        saved += tokens * (9 if split.ranks > 1 else 8)
    if last:
        h, own, inner = shape.width, tokens / split.tokens, tokens / split.inner_tokens
        saved += own * h / split.features * (numbers.residual + numbers.product) + own * 8  # the norm
        saved += inner * (4 * shape.vocabulary / split.inner + (22 if split.ranks > 1 else 8))  # logits and loss
        saved += numbers.cast * h * shape.vocabulary / split.matrix
    return saved


def shadow_memory(elements: float, ranks: int, numbers: NumberWidths) -> MemoryUse:
    """Return what a rank holds of its neighbour's shard, so that the neighbour can be lost: `par_checkpoint.Shadow`.

    The gradient of the shard travels to the copy in each step, so its bytes are also the traffic of a step.

    Args:
        elements: Trained elements that the ranks shard.
        ranks: Number of these ranks.
        numbers: Widths of numbers.
    """
    # A copy is a weight as the optimizer updates it, and Adam's two moments of the same width.
    shard = elements / ranks if ranks > 1 else 0.0
    return MemoryUse(parameters=0.0, gradients=shard * numbers.master, optimizer=3 * shard * numbers.master)
