"""The cheapest way in which a configuration fits: what is computed again, and what lies elsewhere.

For each kind of recomputation the parts of the optimizer's state and, at stage 3, of the parameters that leave the
device follow from what is missing there, in closed form, whichever of them leaves first; of all these the fastest is
taken.
"""

import math
from dataclasses import replace

from par_groups import format_bytes

from .budget.tiers import TooSmallError, called, offload_missing
from .inputs import Machine, TrainingJob
from .prediction import MARGIN, Prediction, Predictor, RankPrediction


def cheapest(frame: Predictor, job: TrainingJob, within: float = math.inf) -> tuple[Prediction, TooSmallError | None]:
    """The fastest way in which a configuration fits a machine.

    Args:
        frame: The model, its topology, and the machine.
        job: The job; what it says of recomputation and of tiers is left out.
        within: Seconds; a way that takes longer is of no use, and what cannot be as fast is not looked at closely.

    Returns:
        The prediction, and None. If there is no way: the one that takes least of the device with all of it there, and
        why that does not fit.

    Raises:
        ValueError: Sizes that do not go together.
    """
    machine, kinds = frame.machine, frame.model.recomputes

    known: dict[str, Prediction] = {}

    def with_all_there(recompute: str) -> Prediction:
        if recompute not in known:
            made = replace(job, recompute=recompute, host=0.0, disk=0.0, parameters_host=0.0, parameters_disk=0.0)
            known[recompute] = frame.predict(made)
        return known[recompute]

    if not any(machine.offload_capacity(frame.topology.world_size).values()):
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
        for first in {source.name: None for source in made.ranks[0].sources}:
            try:
                away = frame.predict(offload_to_fit(made, machine, first))
            except TooSmallError as error:
                problem = error
                continue
            if best is None or away.seconds < best.seconds:
                best = away
    if best is not None:
        return best, None
    return least, problem


def offload_to_fit(made: Prediction, machine: Machine, first: str = "optimizer") -> TrainingJob:
    """The job with as much elsewhere as the device has no room for, on every rank of a pipeline alike.

    Args:
        made: What it takes with all of it on the device.
        machine: The machine.
        first: The name of the source that leaves first; others follow when all of it is away.

    Raises:
        TooSmallError: The device has no room for what has to stay, or nothing else has room for what has to leave.
    """
    room, rooms = (1 - MARGIN) * machine.memory, machine.offload_capacity(made.topology.world_size)
    if not any(rooms.values()):
        raise _too_small(made, machine)
    parts: dict[str, float] = {}
    for rank in made.ranks:
        for name, part in _parts_away(rank, room, machine, first).items():
            parts[name] = max(part, parts.get(name, 0.0))
    fullest = max(made.ranks, key=lambda rank: rank.parameters)  # what fits it fits all
    sources = sorted(fullest.sources, key=lambda source: source.name != first)
    there = offload_missing(sum(parts[source.name] * source.frees for source in sources), sources, rooms).parts
    optimizer, parameters = there.get("optimizer", {}), there.get("parameters", {})
    return replace(
        made.job,
        host=optimizer.get("host", 0.0),
        disk=optimizer.get("disk", 0.0),
        parameters_host=parameters.get("host", 0.0),
        parameters_disk=parameters.get("disk", 0.0),
    )


def _too_small(made: Prediction, machine: Machine) -> TooSmallError:
    """Says by how much the device is too small for a configuration of which nothing lies elsewhere."""
    missing = made.memory.total - (1 - MARGIN) * machine.memory
    return TooSmallError("device", missing, f"the device is short of {format_bytes(missing)}")


def _parts_away(rank: RankPrediction, room: float, machine: Machine, first: str) -> dict[str, float]:
    """Which part of each source has to leave a rank's device: for what backward takes, and for what the step takes.

    Raises:
        TooSmallError: All of them together are too little.
    """
    memory = rank.memory
    in_backward = memory.state + memory.backward - room
    in_step = memory.state + memory.step - room
    parts: dict[str, float] = {}
    for source in sorted(rank.sources, key=lambda source: source.name != first):
        shrinks = source.frees
        if source.name == "optimizer" and not machine.gloo:
            shrinks += memory.step  # the step's own copies of gradients follow the state
        part = min(1.0, max(0.0, in_backward / source.frees, in_step / shrinks))
        in_backward -= part * source.frees
        in_step -= part * shrinks
        parts[source.name] = part
    missing = max(in_backward, in_step)
    if missing > 1e-9 * room:
        raise TooSmallError(
            "device",
            missing,
            f"the device is short of {format_bytes(missing)}, with all of {called(sorted(parts))} elsewhere",
        )
    return parts
