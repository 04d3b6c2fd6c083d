"""Step time on one rank, from a simple model for comparing configurations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from par_groups import Topology

from .costs.pipeline import PipelineCost
from .costs.sequence import RankAttention, SequenceSplit, reach
from .costs.traffic import AxisTraffic
from .experts.mixture import imbalance_of
from .inputs import Machine, TrainingJob
from .models.protocol import PlannedModel
from .shape import ModelSlice, TensorSplit

TERMS = ("compute", "recompute", "tensor", "sequence", "experts", "pipeline", "bubble", "data", "offload")
"""Names of the terms of a step's time."""


@dataclass(frozen=True, kw_only=True)
class OffloadedState:
    """Offloaded state of a rank.

    Args:
        elements: Number of parameters whose optimizer state is offloaded.
        disk: Bytes of this state on the disk.
        parameters: Number of offloaded parameters, which are fetched for each gather.
        parameters_disk: Bytes of these parameters on the disk.
        units: Number of units that are stepped, and computed in the next forward, one after the other.
    """

    elements: float = 0.0
    disk: float = 0.0
    parameters: float = 0.0
    parameters_disk: float = 0.0
    units: int = 1


@dataclass(frozen=True)
class AxisLink:
    """Connection between the ranks of a group.

    Args:
        rate: Bytes per second into one rank.
        hops: Latencies that an operation takes: the logarithm to base 2 of the group's size; 1 between two stages.
    """

    rate: float
    hops: float


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Properties of a topology that determine step time, identical on all ranks.

    Args:
        world: Number of ranks.
        data: Number of ranks with different rows, on the axes "data" and "expert".
        split: Split of the tensor mode.
        sequence: Split of a row's tokens.
        links: Connections by axis: "data" (all ranks that average gradients), "pipeline", "tensor"; for a split
            sequence "outer" (keys and values) and "inner" (tokens for heads); for experts "expert_data" (replicas) and
            "expert_parallel".
    """

    world: int
    data: int
    split: TensorSplit
    sequence: SequenceSplit
    links: Mapping[str, AxisLink]


def interconnect(topology: Topology, split: TensorSplit, sequence: SequenceSplit, machine: Machine) -> Interconnect:
    """Return the connections of a topology.

    Args:
        topology: Sizes and modes of the axes.
        split: Tensor-parallel split.
        sequence: Split of sequences.
        machine: Machine.
    """
    groups: dict[str, str | tuple[str, ...]] = {"data": "data", "pipeline": "pipeline", "tensor": "tensor"}
    if sequence.ranks > 1:
        outer, inner = ("ring", "ulysses") if sequence.mode == "2d" else ("sequence", "sequence")
        groups |= {"outer": outer, "inner": inner}
    more = [name for name, ranks in (("sequence", sequence.ranks), ("expert", split.experts.own)) if ranks > 1]
    if more:
        groups["data"] = ("data", *more)
    if split.experts.is_dealt:
        groups |= {"expert_data": ("data", "expert_data"), "expert_parallel": "expert_parallel"}
    links = {
        name: AxisLink(
            _rate_of(topology, axes, machine), 1 if name == "pipeline" else math.log2(max(2, topology.size(axes)))
        )
        for name, axes in groups.items()
    }
    data = topology.size("data") * split.experts.own
    return Interconnect(world=topology.world_size, data=data, split=split, sequence=sequence, links=links)


def seconds_within(
    model: PlannedModel,
    wiring: Interconnect,
    job: TrainingJob,
    machine: Machine,
    *,
    part: ModelSlice,
    transfers: Sequence[AxisTraffic],
    attentions: Mapping[RankAttention, int],
) -> dict[str, float]:
    """Return the seconds of all microbatches of a step on one rank, for any schedule.

    Args:
        model: Model, with the job's recomputation.
        wiring: Connections of the topology.
        job: Training job.
        machine: Machine.
        part: Slice of the model on the rank.
        transfers: Traffic that the rank receives within microbatches.
        attentions: Number of the rank's layers with each attention.

    Returns:
        Seconds by name: the names of `TERMS` from "compute" to "pipeline".
    """
    split, sequence, links = wiring.split, wiring.sequence, wiring.links
    rows = job.batch // wiring.data
    # `flops` counts complete layers and rows. The ranks of a tensor group and of a sequence share both evenly, so
    # together they count as one fast device.
    peak = machine.flops * machine.efficiency * split.ranks * sequence.ranks
    found = [
        (reach(sequence, one, model.context, job.documents, again=model.checkpointing), one, number)
        for one, number in attentions.items()
    ]
    # Matmuls and attention are separate terms, because only attention is unbalanced between sequence ranks.
    matrices, attention = (rows * model.context * flops / peak for flops in model.flops(part))
    sizes = [one.heads * one.width * number for _, one, number in found]
    # The busiest rank of a split sequence has more visible pairs than the mean; larger attentions weigh more.
    attention *= sum(one.work * size for (one, _, _), size in zip(found, sizes, strict=True)) / sum(sizes)
    of_experts = over_experts = 0.0
    if model.mixture is not None and split.experts.parallel > 1:
        tokens_a_second = rows * model.context / peak
        imbalance = imbalance_of(job.imbalance, split.experts.parallel)
        # A token takes 2 operations for each parameter of an expert in forward, and 4 in backward.
        a_layer = 6 * model.mixture.expert * part.mixtures * tokens_a_second
        # `model.flops` has counted the mean load, and the busiest rank has this much more.
        of_experts = (imbalance - 1) * model.mixture.top_k * a_layer
        shared = model.mixture.shared * a_layer  # is computed while rows travel, forward and backward
        # Half of the dispatch is in forward and half in backward; shared experts take a third of their time in forward
        # and two thirds in backward.
        there = _time_of(transfers, "expert_parallel", wiring, machine, "dispatch") / 2
        over_experts = max(0.0, there - shared / 3) + max(0.0, there - shared * 2 / 3)
        over_experts += sum(
            _time_of(transfers, "expert_parallel", wiring, machine, what) for what in ("combine", "counts")
        )
    compute = matrices + attention + of_experts
    again_matrices, again_attention = (rows * model.context * flops / peak for flops in model.recompute_flops(part))
    # A forward is a third of an attention's operations.
    again = again_matrices + (attention / 3 if again_attention else 0.0)
    over_sequence = 0.0
    if sequence.ranks > 1:  # keys and values travel while others are computed, exchanges of tokens for heads do not
        width = rows / split.inner_tokens * job.numbers.product
        keys = sum(one.most_keys * number for one, _, number in found) * width / links["outer"].rate
        heads = sum(one.heads * number for one, _, number in found) * width / links["inner"].rate
        hops = {
            "keys and values": 1 if sequence.outer == "ring" else math.log2(max(2, sequence.groups)),
            "tokens for heads": math.log2(max(2, sequence.inner)),
            "states": 1,
            "sums of losses": math.log2(sequence.ranks),
        }
        starts = sum(hops[transfer.what] * transfer.operations for transfer in transfers if transfer.axis == "sequence")
        over_sequence = max(0.0, keys - attention) + heads + starts * machine.latency
    tensor = _time_of(transfers, "tensor", wiring, machine)
    if model.checkpointing:  # ranks send each other in the forward that runs again what they sent in the first
        again += (tensor + over_experts) / 2
    return {
        "compute": compute,
        "recompute": again,
        "tensor": tensor,
        "sequence": over_sequence,
        "experts": over_experts,
        "pipeline": _time_of(transfers, "pipeline", wiring, machine),
    }


def seconds_of(
    within: Mapping[str, float],
    wiring: Interconnect,
    job: TrainingJob,
    machine: Machine,
    pipeline: PipelineCost,
    *,
    shared: Sequence[AxisTraffic],
    away: OffloadedState | None = None,
) -> dict[str, float]:
    """Return the seconds of a step on one rank, by the names in `TERMS`.

    Args:
        within: Seconds within microbatches, as `seconds_within` returns them.
        wiring: Connections of the topology.
        job: Training job.
        machine: Machine.
        pipeline: Cost of the pipeline.
        shared: Traffic between the ranks that shard its parameters.
        away: Offloaded state; None means that nothing is offloaded.
    """
    compute = within["compute"]
    one_microbatch = compute / job.microbatches  # two thirds of it backward
    shared_over = ("data", "expert_data") if wiring.split.experts.is_dealt else ("data",)
    gradients, flags, parameters = (
        sum(_time_of(shared, axis, wiring, machine, what) for axis in shared_over)
        for what in ("gradients", "flags", "parameters")
    )
    if job.zero < 3:  # gradients hide behind the last backward; parameters come when the optimizer has stepped
        exposed = max(0.0, gradients - one_microbatch * 2 / 3) + parameters
    else:  # parameters are gathered while the model computes
        exposed = max(0.0, gradients + parameters - one_microbatch)
    return {
        **within,
        "bubble": sum(within.values()) / job.microbatches * pipeline.idle,
        "data": exposed + flags,
        "offload": 0.0 if away is None else _seconds_away(away, job, machine, wiring.world, compute),
    }


def _time_of(
    transfers: Sequence[AxisTraffic], axis: str, wiring: Interconnect, machine: Machine, what: str | None = None
) -> float:
    """Return the seconds of traffic over an axis, with one operation after another."""
    link = wiring.links[axis]
    chosen = [transfer for transfer in transfers if transfer.axis == axis and what in (None, transfer.what)]
    return sum(transfer.bytes / link.rate + transfer.operations * machine.latency * link.hops for transfer in chosen)


def _seconds_away(away: OffloadedState, job: TrainingJob, machine: Machine, world: int, compute: float) -> float:
    """Return the seconds that a step waits for offloaded state.

    A disk is read and written one after the other. Adam's step reads gradient, parameter and two moments, and writes
    three of them. On a CPU, host memory is device memory, so nothing moves, and all of the step precedes the next
    forward. On a GPU, the step of a unit overlaps with the next forward of earlier units.
    """
    if not (away.elements or away.parameters):
        return 0.0
    sharers, numbers, forward = machine.ranks_per_host(world), job.numbers, compute / 3
    # Master copies are read with the state. Parameters in the other dtype are then only written.
    stepped = away.parameters_disk * (0 if numbers.copied else 1)
    written = away.disk + away.parameters_disk
    disk = sharers * ((away.disk + stepped) / machine.tiers.disk_read + written / machine.tiers.disk_write)
    fetch = sharers * away.parameters_disk / machine.tiers.disk_read
    if machine.gloo:
        return disk + max(0.0, fetch - forward) + max(0.0, fetch - compute * 2 / 3)
    # Adam reads four tensors and writes three, and all ranks of a host share its memory bandwidth.
    host = away.elements * sharers * 7 * numbers.master / machine.tiers.host_step
    out = away.elements * numbers.gradient / machine.tiers.link
    # Parameters on the host are stepped there, and cross the link when they are fetched.
    into = max(0.0, away.elements - away.parameters) * numbers.weight / machine.tiers.link
    fetch_link = away.parameters * numbers.weight / machine.tiers.link
    # Backward reduces the gradients of the first unit last. Their copy to the host precedes the step of any unit, and
    # on a slow link it waits for the copies of all other units, which begin after the backward of the last unit. At
    # stage 3 two reductions are in flight, and their copies wait for the gradients of one more unit.
    backward, late = compute * 2 / 3, min(3 if job.zero == 3 else 1, away.units)
    after = max(out * late / away.units, out - backward * (away.units - late) / away.units)
    # Units of one size pass through these stages one after the other, and then run. The slowest stage is never idle,
    # from the arrival of the first unit until the last one leaves it.
    stages = (disk + fetch) / away.units, host / away.units, (into + fetch_link) / away.units
    arrived, slowest, runs = after + sum(stages), max(stages), forward / away.units
    # At stage 3 the program gathers a unit before the unit in front of it runs, so that one waits for both.
    ahead = min(job.zero == 3, away.units - 1)
    behind = away.units - 1 - ahead
    step = arrived + ahead * slowest + max(behind * slowest + (1 + ahead) * runs, away.units * runs)
    return max(0.0, step - forward) + max(0.0, max(fetch, fetch_link) - compute * 2 / 3)


def _rate_of(topology: Topology, axes: str | tuple[str, ...], machine: Machine) -> float:
    """Return the bytes per second of a group: a node's bandwidth if every group of its axes is within one node."""
    in_node = all(machine.devices_per_node % (block.size * block.stride) == 0 for block in topology.blocks(axes))
    return machine.bandwidth if in_node else machine.network
