"""The time of a step on one rank: a plain model, for comparing configurations."""

import math
from collections.abc import Mapping, Sequence

from par_groups import Topology

from .inputs import Job, Machine
from .model import PlannedModel
from .pipeline import Pipe
from .sequence import Attention, reach, sequence_of
from .shape import Part, cut_of
from .traffic import Move

TERMS = ("compute", "tensor", "sequence", "pipeline", "bubble", "data")
"""The terms of a step's time."""


def seconds_of(
    model: PlannedModel,
    topology: Topology,
    job: Job,
    machine: Machine,
    pipeline: Pipe,
    *,
    part: Part,
    moves: Sequence[Move],
    attentions: Mapping[Attention, int],
) -> dict[str, float]:
    """Seconds of a step on one rank, by the names in `TERMS`.

    Args:
        model: The model.
        topology: Sizes and modes of the axes.
        job: The job.
        machine: What it runs on.
        pipeline: The pipeline.
        part: What the rank has of the model.
        moves: What it receives.
        attentions: Its attentions, and how many are alike.
    """
    cut, sequence = cut_of(topology), sequence_of(topology)

    def time_of(axis: str, what: str | None = None) -> float:
        """Seconds of what goes over an axis, one operation after the other."""
        axes = ("data", "sequence") if axis == "data" and sequence.ranks > 1 else axis
        hops = 1 if axis == "pipeline" else math.log2(max(2, topology.size(axes)))
        rate = _rate_of(topology, axes, machine)
        chosen = [move for move in moves if move.axis == axis and what in (None, move.what)]
        return sum(move.bytes / rate + move.operations * machine.latency * hops for move in chosen)

    rows = job.batch // topology.size("data")
    peak = machine.flops * machine.efficiency * cut.ranks * sequence.ranks
    found = [
        (reach(sequence, one, model.context, job.documents, again=model.checkpointing), one, number)
        for one, number in attentions.items()
    ]
    matrices, attention = (rows * model.context * flops / peak for flops in model.flops(part))
    sizes = [one.heads * one.width * number for _, one, number in found]
    attention *= sum(one.work * size for (one, _, _), size in zip(found, sizes, strict=True)) / sum(sizes)
    compute = matrices + attention
    over_sequence = 0.0
    if sequence.ranks > 1:  # keys and values travel while others are computed, exchanges of tokens for heads do not
        outer, inner = ("ring", "ulysses") if sequence.mode == "2d" else ("sequence", "sequence")
        width = rows / cut.inner_tokens * job.numbers.product
        keys = sum(one.most_keys * number for one, _, number in found) * width / _rate_of(topology, outer, machine)
        heads = sum(one.heads * number for one, _, number in found) * width / _rate_of(topology, inner, machine)
        hops = {
            "keys and values": 1 if sequence.outer == "ring" else math.log2(max(2, sequence.groups)),
            "tokens for heads": math.log2(max(2, sequence.inner)),
            "sums of losses": math.log2(sequence.ranks),
        }
        starts = sum(hops[move.what] * move.operations for move in moves if move.axis == "sequence")
        over_sequence = max(0.0, keys - attention) + heads + starts * machine.latency
    tensor, pipe_messages = time_of("tensor"), time_of("pipeline")
    one_microbatch = compute / job.microbatches  # two thirds of it backward
    gradients, flags, parameters = (time_of("data", what) for what in ("gradients", "flags", "parameters"))
    if job.zero < 3:  # gradients hide behind the last backward; parameters come when the optimizer has stepped
        exposed = max(0.0, gradients - one_microbatch * 2 / 3) + parameters
    else:  # parameters are gathered while the model computes
        exposed = max(0.0, gradients + parameters - one_microbatch)
    return {
        "compute": compute,
        "tensor": tensor,
        "sequence": over_sequence,
        "pipeline": pipe_messages,
        "bubble": (compute + tensor + over_sequence + pipe_messages) / job.microbatches * pipeline.idle,
        "data": exposed + flags,
    }


def _rate_of(topology: Topology, axes: str | tuple[str, ...], machine: Machine) -> float:
    """Bytes a second: a group has the bandwidth of a node if every group of its axes lies within one."""
    in_node = all(machine.devices_per_node % (block.size * block.stride) == 0 for block in topology.blocks(axes))
    return machine.bandwidth if in_node else machine.network
