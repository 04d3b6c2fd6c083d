"""What a step takes: memory, traffic, bubble and time of one configuration, from formulas alone.

memory     of the rank of the pipeline that needs most
traffic    of the rank that is busiest
time       compute + tensor + pipeline (what this rank waits for messages) + bubble + data (what does not hide)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from par_groups import Topology

from .inputs import Job, Machine, Numbers
from .memory import Chunks, Memory, Sharing, chunks_of, saved_block, saved_ends, state_memory
from .pipeline import Pipe, Place, pipe, stage_size
from .shape import Cut, Part, Shape, count, cut_of, misfit
from .traffic import Move, data_traffic, pipeline_traffic, tensor_traffic

TERMS = ("compute", "tensor", "pipeline", "bubble", "data")
"""What the time of a step is made of."""

MARGIN = 0.1
"""Part of a device's memory that is left alone: for workspace, fragments, and the device's own libraries."""


@dataclass(frozen=True, kw_only=True)
class RankPrediction:
    """One rank of a pipeline; without one, every rank.

    Args:
        place: "first", "middle" or "last".
        parameters: Elements that it has.
        memory: Bytes.
        moves: What it receives, by axis.
        seconds: Of a step, by `TERMS`.
    """

    place: str
    parameters: int
    memory: Memory
    moves: tuple[Move, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a configuration takes.

    Args:
        topology: Who works together.
        job: How.
        bubble: The part of time that the pipeline waits.
        ranks: The kinds of ranks.
    """

    topology: Topology
    job: Job
    bubble: float
    ranks: tuple[RankPrediction, ...]

    @property
    def memory(self) -> Memory:
        """Of the rank that needs most."""
        return max((each.memory for each in self.ranks), key=lambda memory: memory.total)

    @property
    def busiest(self) -> RankPrediction:
        """The rank that the others wait for."""
        return max(self.ranks, key=lambda each: sum(each.seconds.values()))

    @property
    def traffic(self) -> Mapping[str, float]:
        """Bytes that the busiest rank receives in a step, by axis."""
        moves = self.busiest.moves
        return {axis: sum(move.bytes for move in moves if move.axis == axis) for axis in ("data", "pipeline", "tensor")}

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.busiest.seconds.values())

    @property
    def bound(self) -> str:
        """The largest term of the time."""
        seconds = self.busiest.seconds
        return max(seconds, key=lambda term: seconds[term])

    def fits(self, machine: Machine) -> bool:
        """Whether it leaves the margin of a device's memory."""
        return self.memory.total <= (1 - MARGIN) * machine.memory


def predict(shape: Shape, topology: Topology, job: Job, machine: Machine | None = None) -> Prediction:
    """What a step takes. Pure; it knows of no process.

    Args:
        shape: The model.
        topology: Axes data, pipeline and tensor, with a mode.
        job: Batch, stage, precision, schedule, microbatches.
        machine: What it runs on.

    Raises:
        ValueError: Sizes that do not go together; the message names them.
    """
    machine, cut = machine or Machine(), cut_of(topology)
    plan = _checked(shape, topology, cut, job)
    ranks = tuple(
        _rank(_Frame(shape, topology, cut, job, machine), plan, place) for place in _kinds(plan, shape.layers)
    )
    return Prediction(topology=topology, job=job, bubble=plan.bubble(job.microbatches), ranks=ranks)


def predict_parameters(
    parameters: int, largest: int, *, ranks: int, job: Job, gloo: bool = False
) -> tuple[Memory, list[Move]]:
    """The same for a module of which no more is known than its parameters: no activations, the data axis alone.

    Args:
        parameters: Elements on this rank.
        largest: Elements of the largest unit that is gathered or reduced at a time.
        ranks: That share them.
        job: Stage, precision and microbatches are looked at.
        gloo: As in `Machine`.
    """
    chunks = Chunks(
        total=parameters,
        chunk=min(parameters, largest),
        chunks=max(1, math.ceil(parameters / max(1, largest))),
        gathered=min(parameters, 2 * largest),
        stays=0,
    )
    sharing = Sharing(zero=job.zero, ranks=ranks, held=job.microbatches > 1, gloo=gloo)
    return state_memory(chunks, job.numbers, sharing), data_traffic(chunks, job.numbers, sharing)


@dataclass(frozen=True)
class _Frame:
    """One call's arguments."""

    shape: Shape
    topology: Topology
    cut: Cut
    job: Job
    machine: Machine

    @property
    def tokens(self) -> dict[int, int]:
        """The sizes of microbatches, larger first, and how many there are of each; rows differ by one at most."""
        rows, pieces = self.job.batch // self.topology.size("data"), self.job.microbatches
        sizes = {rows // pieces + 1: rows % pieces, rows // pieces: pieces - rows % pieces}
        return {size * self.shape.context: number for size, number in sizes.items() if number}


def _checked(shape: Shape, topology: Topology, cut: Cut, job: Job) -> Pipe:
    """The pipeline of a configuration that makes sense."""
    data, ranks = topology.size("data"), topology.size("pipeline")
    if data * ranks * cut.ranks != topology.world_size:
        raise ValueError(f"{topology.axes} has ranks on other axes than data, pipeline and tensor; leave them out")
    if job.batch % data or job.batch // data < job.microbatches or job.microbatches < 1:
        raise ValueError(
            f"a batch of {job.batch} does not divide over {data} data ranks into {job.microbatches} microbatches each"
        )
    for rows in {job.batch // data // job.microbatches, -(-job.batch // data // job.microbatches)}:
        problem = misfit(shape, cut, rows)
        if problem is not None:
            raise ValueError(f"{problem}; change one of the two")
    if job.precision == "fp8" and cut.mode not in (None, "1d"):
        raise ValueError(f"precision 'fp8' multiplies on one device or in tensor mode 1d, not in {cut.mode}")
    found = pipe(job.schedule, ranks, job.microbatches)
    if found.stages > shape.layers:
        raise ValueError(f"{shape.layers} layers cannot be cut into the {found.stages} stages of {job.schedule}")
    if found.splits and job.zero == 3:
        raise ValueError(f"zero 3 frees weights that schedule {job.schedule!r} needs again; use zero 2, or 1f1b")
    return found


@lru_cache(maxsize=4096)
def _kinds(plan: Pipe, layers: int) -> tuple[Place, ...]:
    """The first, the last, and of those between that have as many blocks the one that keeps most."""
    found: dict[tuple[str, Part], Place] = {}
    for place in plan.places:
        kind = place.name, plan.part(place, layers)
        if kind not in found or place.kept > found[kind].kept:
            found[kind] = place
    return tuple(found.values())


def _rank(frame: _Frame, plan: Pipe, place: Place) -> RankPrediction:
    shape, cut, job, numbers = frame.shape, frame.cut, frame.job, frame.job.numbers
    part = plan.part(place, shape.layers)
    counted = count(shape, cut, part)
    sharing = Sharing(
        zero=job.zero,
        ranks=frame.topology.size("data"),
        held=job.microbatches > 1 or plan.ranks > 1,
        gloo=frame.machine.gloo,
    )
    chunks = chunks_of(counted, numbers, job.zero)
    table = counted.table * (numbers.master if not numbers.copied else 4) / (sharing.ranks if job.zero else 1)
    moves = (
        *data_traffic(chunks, numbers, sharing),
        *pipeline_traffic(shape, cut, place, part, frame.tokens, table),
        *tensor_traffic(shape, cut, numbers, part, frame.tokens, sharing),
    )
    activations = _activations(frame, plan, place, part, numbers)
    memory = replace(state_memory(chunks, numbers, sharing), activations=activations)
    return RankPrediction(
        place=place.name,
        parameters=counted.total,
        memory=memory,
        moves=moves,
        seconds=_seconds(frame, plan, part, moves, sharing),
    )


def _activations(frame: _Frame, plan: Pipe, place: Place, part: Part, numbers: Numbers) -> float:
    """Bytes that a rank keeps for backward: of its largest stage, for as many microbatches as wait."""
    shape, cut, tokens = frame.shape, frame.cut, next(iter(frame.tokens))
    blocks = max(stage_size(shape.layers, plan.stages, stage) for stage in place.stages)
    stage = blocks * saved_block(shape, cut, numbers, tokens)
    first, last = (
        saved_ends(shape, cut, numbers, Part(blocks=0, first=part.first and not end, last=part.last and end), tokens)
        for end in (False, True)
    )
    return place.kept * stage + place.kept * first + place.kept_last * last


def _seconds(frame: _Frame, plan: Pipe, part: Part, moves: Sequence[Move], sharing: Sharing) -> dict[str, float]:
    shape, job, machine = frame.shape, frame.job, frame.machine
    tokens = job.batch // sharing.ranks * shape.context
    rate = machine.flops * machine.efficiency * frame.cut.ranks
    compute = tokens * shape.flops(part) / rate
    tensor, pipeline = (_time(frame, axis, moves) for axis in ("tensor", "pipeline"))
    busy = compute + tensor + pipeline
    return {
        "compute": compute,
        "tensor": tensor,
        "pipeline": pipeline,
        "bubble": busy / job.microbatches * plan.idle,
        "data": _exposed(frame, moves, compute / job.microbatches),
    }


def _exposed(frame: _Frame, moves: Sequence[Move], one: float) -> float:
    """What data-parallel traffic adds: gradients hide behind the last backward, gathering behind the first forward.

    Args:
        frame: The call's.
        moves: Of the rank.
        one: Seconds in which one microbatch is computed, two thirds of them backward.
    """
    by_name = {what: _time(frame, "data", moves, what) for what in ("gradients", "flags", "parameters")}
    if frame.job.zero < 3:  # parameters come when the optimizer has stepped
        return max(0.0, by_name["gradients"] - one * 2 / 3) + by_name["flags"] + by_name["parameters"]
    return max(0.0, by_name["gradients"] + by_name["parameters"] - one) + by_name["flags"]


def _time(frame: _Frame, axis: str, moves: Sequence[Move], what: str | None = None) -> float:
    """Seconds of what goes over an axis, one operation after the other."""
    chosen = [move for move in moves if move.axis == axis and what in (None, move.what)]
    machine = frame.machine
    alpha = machine.latency * (1 if axis == "pipeline" else math.log2(max(2, frame.topology.size(axis))))
    rate = machine.bandwidth if _within_node(frame.topology, axis, machine.devices_per_node) else machine.network
    return sum(move.bytes / rate + move.operations * alpha for move in chosen)


def _within_node(topology: Topology, axis: str, devices: int) -> bool:
    """Whether every group over an axis lies within one node."""
    return all(devices % (block.size * block.stride) == 0 for block in topology.blocks(axis))
