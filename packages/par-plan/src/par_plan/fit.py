"""The fastest recomputation and offloading with which a configuration fits.

For each kind of recomputation, the offloaded fractions of optimizer state and (at stage 3) parameters follow in closed
form from the bytes that are missing on the device. The fastest of these configurations is chosen.
"""

import math
from dataclasses import replace

from par_groups import format_bytes

from .budget.tiers import TooSmallError, called, offload_missing
from .inputs import Machine, TrainingJob
from .prediction import MARGIN, Prediction, Predictor, RankPrediction


def cheapest(frame: Predictor, job: TrainingJob, within: float = math.inf) -> tuple[Prediction, TooSmallError | None]:
    """Return the fastest way in which a configuration fits a machine.

    Args:
        frame: The model, its topology, and the machine.
        job: Training job; its recomputation and offloading are ignored.
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
        # Without another tier, full recomputation needs the least memory. If it does not fit, nothing does.
        if not least.fits(machine):
            return least, _too_small(least, machine)
    best: Prediction | None = None
    problem: TooSmallError | None = None
    for recompute in kinds:
        made = with_all_there(recompute)
        # Each further policy recomputes more, and offloading only adds time to it.
        if best is not None and made.seconds >= best.seconds:
            break  # nothing that is away makes it faster
        if made.seconds > within and best is None:
            return made, TooSmallError("", math.inf, "it takes too long")
        if made.fits(machine):
            return made, None
        least = made
        # Which state is cheaper to offload depends on the links, so either one is tried first.
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
    """Return the job with the missing bytes offloaded, with identical fractions on every pipeline rank.

    Args:
        made: Prediction without offloading.
        machine: The machine.
        first: Name of the source to offload first; the next source follows when all of it is offloaded.

    Raises:
        TooSmallError: The device is too small for the remaining state, or host and disk are too small for the rest.
    """
    room, rooms = (1 - MARGIN) * machine.memory, machine.offload_capacity(made.topology.world_size)
    if not any(rooms.values()):
        raise _too_small(made, machine)
    parts: dict[str, float] = {}
    for rank in made.ranks:
        for name, part in _parts_away(rank, room, machine, first).items():
            # A job has one fraction for all ranks, so the rank that lacks the most memory decides.
            parts[name] = max(part, parts.get(name, 0.0))
    # The rank with the most parameters offloads the most bytes, so tiers that suffice for it suffice for all.
    fullest = max(made.ranks, key=lambda rank: rank.parameters)
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
    """Return the error for a configuration that does not fit without offloading."""
    missing = made.memory.total - (1 - MARGIN) * machine.memory
    return TooSmallError("device", missing, f"the device is short of {format_bytes(missing)}")


def _parts_away(rank: RankPrediction, room: float, machine: Machine, first: str) -> dict[str, float]:
    """Return the fraction of each source to offload, for the peaks of backward and of the step.

    Raises:
        TooSmallError: All of them together are too little.
    """
    memory = rank.memory
    in_backward = memory.state + memory.backward - room
    in_step = memory.state + memory.step + memory.kept - room
    parts: dict[str, float] = {}
    for source in sorted(rank.sources, key=lambda source: source.name != first):
        shrinks = source.frees
        if source.name == "optimizer" and not machine.gloo:
            shrinks += memory.step  # the step's own copies of gradients follow the state
        # The fraction must suffice at both peaks, and offloading shrinks them by different amounts.
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
