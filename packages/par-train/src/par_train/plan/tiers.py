"""The cheapest way in which a configuration fits: what is computed again, and what of the optimizer lies elsewhere.

For each kind of recomputation the part that leaves the device follows from what is missing there, in closed form; of
these the fastest is taken.
"""

import math
from dataclasses import replace

from par_groups import Topology

from .._units import format_bytes
from ..memory.tiers import Shares, TooSmallError, share_out
from .inputs import Job, Machine
from .model import PlannedModel
from .predict import MARGIN, Prediction, RankPrediction, planned, predict
from .shape import Shape


def cheapest(
    shape: Shape | PlannedModel, topology: Topology, job: Job, machine: Machine, within: float = math.inf
) -> tuple[Prediction, TooSmallError | None]:
    """The fastest way in which a configuration fits a machine.

    Args:
        shape: The model's sizes.
        topology: The axes.
        job: The job; what it says of recomputation and of tiers is left out.
        machine: The machine.
        within: Seconds; a way that takes longer is of no use, and what cannot be as fast is not looked at closely.

    Returns:
        The prediction, and None. If there is no way: the one that takes least of the device with all of it there, and
        why that does not fit.

    Raises:
        ValueError: Sizes that do not go together.
    """
    kinds = planned(shape).recomputes

    def with_all_there(recompute: str) -> Prediction:
        return predict(shape, topology, replace(job, recompute=recompute, host=0.0, disk=0.0), machine)

    if not any(machine.rooms(topology.world_size).values()):
        least = with_all_there(kinds[-1])
        if not least.fits(machine):  # nor does what computes less again
            return least, _too_small(least, machine)
    best: Prediction | None = None
    problem: TooSmallError | None = None
    for recompute in kinds:
        made = with_all_there(recompute)
        if best is not None and made.seconds >= best.seconds:
            break  # nothing that is away makes it faster
        if made.seconds > within and best is None:
            return made, TooSmallError("", math.inf, "it takes too long")
        if made.fits(machine):
            return made, None
        least = made
        try:
            away = predict(shape, topology, away_of(made, machine), machine)
        except TooSmallError as error:
            problem = error
            continue
        if best is None or away.seconds < best.seconds:
            best = away
    if best is not None:
        return best, None
    return least, problem


def away_of(made: Prediction, machine: Machine) -> Job:
    """The job with as much of its optimizer elsewhere as the device has no room for, on every rank of a pipeline alike.

    Args:
        made: What it takes with all of it on the device.
        machine: The machine.

    Raises:
        TooSmallError: The device has no room for what has to stay, or nothing else has room for what has to leave.
    """
    room, rooms = (1 - MARGIN) * machine.memory, machine.rooms(made.topology.world_size)
    if not any(rooms.values()):
        raise _too_small(made, machine)
    part = max(_part_away(rank, room, machine) for rank in made.ranks)
    if part > 1:
        missing = max(_least(rank, machine) for rank in made.ranks) - room
        raise TooSmallError(
            "device",
            missing,
            f"the device is short of {format_bytes(missing)}, with all of the optimizer's state elsewhere",
        )
    shares = Shares()
    for rank in made.ranks:  # what fits the largest fits all
        if rank.optimizer is not None and rank.parameters == max(each.parameters for each in made.ranks):
            shares = share_out(part * rank.optimizer.frees, [rank.optimizer], rooms)
    parts = shares.parts.get("optimizer", {})
    return replace(made.job, host=parts.get("host", 0.0), disk=parts.get("disk", 0.0))


def _too_small(made: Prediction, machine: Machine) -> TooSmallError:
    """Says by how much the device is too small for a configuration of which nothing lies elsewhere."""
    missing = made.memory.total - (1 - MARGIN) * machine.memory
    return TooSmallError("device", missing, f"the device is short of {format_bytes(missing)}")


def _part_away(rank: RankPrediction, room: float, machine: Machine) -> float:
    """Which part of a rank's optimizer has to leave: for what backward takes, and for what the step takes."""
    memory, optimizer = rank.memory, rank.optimizer
    assert optimizer is not None  # noqa: S101 - `predict` has looked at it
    in_backward = memory.buffers + memory.activations + max(memory.logits, memory.attention)
    shrinks = 0.0 if machine.gloo else memory.step  # the step's own copies of gradients follow the state
    return max(
        0.0,
        (memory.state + in_backward - room) / optimizer.frees,
        (memory.state + memory.step - room) / (optimizer.frees + shrinks),
    )


def _least(rank: RankPrediction, machine: Machine) -> float:
    """Bytes of the device with all of the optimizer elsewhere."""
    memory = rank.memory
    frees = 0.0 if rank.optimizer is None else rank.optimizer.frees
    in_backward = memory.buffers + memory.activations + max(memory.logits, memory.attention)
    return memory.state - frees + max(in_backward, memory.step if machine.gloo else 0.0)
