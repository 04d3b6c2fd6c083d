"""Memory and traffic of each stage, as functions: what is measured equals them within the padding.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, sections 5 and 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ._stage import STAGES
from ._tiers import TIERS, Offload


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank after a step.

    Args:
        parameters: Bytes of the parameters as the module uses them.
        gradients: Bytes of the gradients that are kept between their reduction and the step.
        optimizer: Bytes of the optimizer's state, and of its own copies of parameters.
        buffers: Bytes that reductions work in: those of the chunks that are under way at a time. Between steps at most
            that many stay.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float

    @property
    def total(self) -> float:
        """Bytes of all of it."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


_NOTHING = Offload()
"""Everything lies on the device."""


def memory(
    stage: int,
    parameters: int,
    ranks: int,
    *,
    others: Sequence[tuple[int, int]] = (),
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    slots: int = 2,
    chunk: int = 0,
    assembled: int = 0,
    inflight: int = 2,
    offload: Offload | None = None,
    tier: Literal["device", "host", "disk"] = "device",
) -> Memory:
    """Bytes of one rank after a step on gloo. During it, stage 3 adds the parameters of two units.

    Args:
        stage: Stage of `shard`, 0 to 3.
        parameters: Number of elements of all parameters, without those of `others`.
        ranks: Number of ranks that share.
        others: Of each of the `others` of `shard`, such as experts, the number of elements that a rank has of what it
            shares, and the number of its ranks.
        dtype: Dtype of the parameters that the optimizer updates.
        param_dtype: Dtype of the parameters in use. None: `dtype`.
        reduce_dtype: Dtype of the gradients that are kept. None: `param_dtype`.
        slots: Tensors of the optimizer's state for each parameter, in `dtype`: 2 for Adam, 1 for momentum.
        chunk: Elements of a chunk, of which there are two or more; 0 leaves out the buffers, which do not grow with
            the model. Other backends than gloo bring their own to receive into.
        assembled: Number of those of `parameters` that are put together over tensor ranks, for an optimizer that must
            see whole tensors. A rank steps about as many elements as it has parts of, in tensors of their own.
        inflight: Number of chunks that are reduced at a time, such as the `inflight` of `shard`. By default two, which
            are kept between steps where `shard` was given no number; in backward it is then all that are under way: at
            most all chunks, at stages 2 and 3 with `others` on every device, as nothing there waits in backward.
        offload: What of the optimizer's state, with its copies of parameters, of parameters and of gradients lies
            elsewhere, as given to `shard`.
        tier: Which bytes: on the "device"; on its "host", which has the buffers through which passes what lies on a
            disk; or on the "disk", where each slot of each piece, and each unit's share, is rounded up to 4096, and
            gradients have the optimizer's dtype.

    Raises:
        ValueError: Another tier.
    """
    if others:
        of_each = [
            memory(
                stage,
                elements,
                sharing,
                dtype=dtype,
                param_dtype=param_dtype,
                reduce_dtype=reduce_dtype,
                slots=slots,
                chunk=0 if number else chunk,
                assembled=0 if number else assembled,
                inflight=inflight,
                offload=offload,
                tier=tier,
            )
            for number, (elements, sharing) in enumerate([(parameters, ranks), *others])
        ]
        return Memory(
            parameters=sum(each.parameters for each in of_each),
            gradients=sum(each.gradients for each in of_each),
            optimizer=sum(each.optimizer for each in of_each),
            buffers=of_each[0].buffers,
        )
    if tier not in TIERS:
        raise ValueError(f"tier is {tier!r}; it can be one of {', '.join(TIERS)}")
    cuts = STAGES[stage]
    used, reduced = param_dtype or dtype, reduce_dtype or param_dtype or dtype
    copies = slots + (used != dtype)
    # Of each chunk: the whole gradient where it is not kept, and what a reduce-scatter receives.
    buffers = inflight * (cuts.shards_gradients + (cuts.shards_state or ranks > 2))
    given = offload or _NOTHING
    share = ranks if cuts.shards_state else 1
    own = parameters / share
    state = own * dtype.itemsize * copies
    in_use = parameters * used.itemsize / (ranks if cuts.shards_parameters else 1)
    sums = parameters * reduced.itemsize / (ranks if cuts.shards_gradients else 1)
    stepped = assembled * dtype.itemsize / share
    if tier == "device":
        return Memory(
            parameters=in_use * given.parameter_parts[tier],
            gradients=sums * given.gradient_parts[tier] + stepped,
            optimizer=state * given.parts[tier]
            + (stepped if used == dtype else 0),  # else it is the copy that there is anyway
            buffers=chunk * reduced.itemsize * buffers,
        )
    if tier == "disk":  # where the optimizer takes gradients from there in its own dtype
        sums = own * dtype.itemsize
    return Memory(
        parameters=in_use * given.parameter_parts[tier],
        gradients=sums * given.gradient_parts[tier],
        optimizer=state * given.parts[tier],
        buffers=_host_buffers(given, own, chunk / share, dtype, used, copies) if tier == "host" else 0,
    )


def _host_buffers(
    offload: Offload, own: float, chunk: float, dtype: torch.dtype, used: torch.dtype, copies: int
) -> float:
    """Bytes of the buffers through which passes what lies on a disk.

    Args:
        offload: What lies where.
        own: Number of the elements that a rank steps.
        chunk: Number of those in a chunk.
        dtype: Dtype in which they are stepped.
        used: Dtype of the parameters in use.
        copies: Number of tensors that the optimizer has of each, in its dtype.
    """
    state, parameters, gradients = (
        parts["disk"] for parts in (offload.parts, offload.parameter_parts, offload.gradient_parts)
    )
    most = max(state, parameters, gradients) * own
    piece = min(offload.piece_bytes / dtype.itemsize, most)
    of_element = (
        copies * dtype.itemsize * (state > 0) + used.itemsize * (parameters > 0) + dtype.itemsize * (gradients > 0)
    )
    ahead = used.itemsize * (parameters > 0)  # a unit's share, which is gathered next
    on_their_way = 2 * dtype.itemsize * (gradients > 0)  # sums of two chunks
    return of_element * min(offload.ahead * piece, most) + chunk * (ahead + on_their_way)


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Bytes that one rank's step moves between tiers.

    Args:
        read: Bytes that are read from the disk.
        written: Bytes that are written to the disk.
    """

    read: float
    written: float


def transfers(
    stage: int,
    parameters: int,
    ranks: int,
    *,
    offload: Offload,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    slots: int = 2,
    fetches: float = 2,
    reductions: int = 1,
) -> Transfers:
    """Bytes that a step moves between tiers, within the rounding of each slot of each piece up to 4096.

    A first step reads no state but copies of parameters. A step that is skipped moves nothing of state; what was read
    ahead for it serves the next.

    Args:
        stage: Stage of `shard`, 0 to 3.
        parameters: Number of elements of all parameters.
        ranks: Number of ranks that share.
        offload: What lies elsewhere, as given to `shard`.
        dtype: Dtype of the parameters that the optimizer updates.
        param_dtype: Dtype of the parameters in use. None: `dtype`.
        slots: Tensors of the optimizer's state for each parameter, in `dtype`: 2 for Adam, 1 for momentum.
        fetches: How often a unit is gathered in a step: 2 for a forward and a backward of which none stays gathered; 1
            where all do; or as `simulate` counts.
        reductions: Number of backward passes in a step that reduce gradients, all of which but the first read what is
            there to add to it.
    """
    on_disk = memory(
        stage, parameters, ranks, dtype=dtype, param_dtype=param_dtype, slots=slots, offload=offload, tier="disk"
    )
    stepped = on_disk.parameters if param_dtype in (None, dtype) else 0  # else they are rounded copies, written alone
    return Transfers(
        read=on_disk.optimizer + on_disk.parameters * fetches + stepped + on_disk.gradients * reductions,
        written=on_disk.optimizer + on_disk.parameters + on_disk.gradients * reductions,
    )


def bucket_bytes(ranks: int, *, latency: float = 8e-6, bandwidth: float = 45e9) -> int:
    """Bytes of parameters that are worth a collective of their own: what `shard(bucket="auto")` takes.

    A ring of n ranks takes (n - 1) l for its hops and (n - 1) / n B / w for B bytes. Of max(25 MB, 10 (n - 1) l w)
    bytes the hops take no more than a tenth to a fifth of the time that the bytes take, however many ranks there are.

    Args:
        ranks: Number of ranks n that share.
        latency: Seconds l of a hop. The default is an assumption for hosts with a fast network between them.
        bandwidth: Bytes w that a rank sends in a second. The default is an assumption for the same hosts.

    Raises:
        ValueError: No ranks, or a negative latency or bandwidth.
    """
    if ranks < 1 or latency < 0 or bandwidth < 0:
        raise ValueError(
            f"{ranks} ranks, a latency of {latency} s and a bandwidth of {bandwidth} bytes/s make no ring; give 1 rank "
            "or more, and no negative numbers"
        )
    return max(25_000_000, round(10 * (ranks - 1) * latency * bandwidth))


def traffic(
    stage: int,
    parameters: int,
    ranks: int,
    *,
    microbatches: int = 1,
    no_sync: bool = False,
    keep: bool = True,
    replicas: int = 1,
    assembled: int = 0,
    tensor: int = 1,
) -> float:
    """Elements that one rank receives in a step.

    Args:
        stage: Stage of `shard`, 0 to 3.
        parameters: Number of elements of all parameters, padding included.
        ranks: Number of ranks that share.
        microbatches: Number of backward passes in a step.
        no_sync: Whether all of them but the last are under `no_sync`.
        keep: Whether parameters stay gathered there, at stage 3, as `no_sync` says.
        replicas: Number of ranks that keep the same share.
        assembled: Number of those of `parameters` that are put together over tensor ranks, for an optimizer that must
            see whole tensors. Gradients go to the rank that steps them, parameters too, and the results come back.
        tensor: Number of tensor ranks.
    """
    cuts = STAGES[stage]
    passes = 1 if no_sync else microbatches
    if cuts.shards_parameters:  # gathered for forward and backward, unless they stay
        gathers = 1 if no_sync and keep and microbatches > 1 else 2 * microbatches
        count = gathers + passes
    elif cuts.shards_state:
        count = passes + 1
    else:
        count = 2 * passes
    hybrid = 2 * (parameters / ranks) * (replicas - 1) / replicas * passes
    moved = assembled / (ranks if cuts.shards_state else 1) * (passes + 2) * (tensor - 1) / tensor
    return parameters * count * (ranks - 1) / ranks + hybrid + moved
