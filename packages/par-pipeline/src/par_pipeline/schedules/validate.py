"""The check that a schedule is one training step, and that its ranks never wait for one another for ever."""

from ..analysis.costs import Costs
from ..analysis.simulate import Simulation
from .actions import check_action
from .schedule import Schedule

# What a stage has done with a microbatch, and what it does next.
_WAITS, _FORWARD, _INPUT, _DONE = range(4)
_NEXT = {("F", _WAITS): _FORWARD, ("B", _FORWARD): _DONE, ("I", _FORWARD): _INPUT, ("W", _INPUT): _DONE}
_MISSING = {_WAITS: "F", _FORWARD: "B (or I and W)", _INPUT: "W"}


def validate(schedule: Schedule) -> None:
    """See `Schedule.validate`.

    Sends do not stop a rank, and a channel's receives stand ready in the sender's order. So ranks wait for ever only
    where actions need each other in a circle, which the simulator finds.
    """
    _check_placement(schedule)
    missing = [_check_rank(schedule, rank) for rank in range(len(schedule.ranks))]
    for line in filter(None, missing):
        raise ValueError(line)
    Simulation(schedule, Costs()).run()


def _check_placement(schedule: Schedule) -> None:
    """Every stage on one rank, and none left out."""
    holders: dict[int, int] = {}
    for rank in range(len(schedule.ranks)):
        for stage in schedule.stage_of(rank):
            if stage < 0:
                raise ValueError(f"rank {rank} has stage {stage}; stages are counted from 0")
            if stage in holders:
                raise ValueError(f"stage {stage} is on rank {holders[stage]} and on rank {rank}; give it to one")
            holders[stage] = rank
    for stage in range(schedule.stages):
        schedule.rank_of(stage)


def _check_rank(schedule: Schedule, rank: int) -> str:
    """Checks each action of one rank by those before it. Returns what is missing at the end, in words.

    A wrong action explains a missing one, so that all ranks are looked through before anything is missed.
    """
    stages, microbatches = schedule.stage_of(rank), range(schedule.microbatches)
    begins = {stage: index * len(microbatches) for index, stage in enumerate(stages)}
    progress = bytearray(len(stages) * len(microbatches))
    for position, action in enumerate(schedule.ranks[rank]):
        check_action(action, rank, position)
        where = f"rank {rank}, position {position}"
        op, stage, microbatch = action
        if stage not in begins:
            raise ValueError(f"{where}: {action} is not for this rank, which has the stages {list(stages)}")
        if microbatch not in microbatches:
            raise ValueError(f"{where}: {action} is beyond the {len(microbatches)} microbatches, counted from 0")
        here = begins[stage] + microbatch
        if (op, progress[here]) not in _NEXT:
            raise ValueError(f"{where}: {action} {_complaint(op, progress[here])}")
        progress[here] = _NEXT[op, progress[here]]
    for state, op in _MISSING.items():
        if (here := progress.find(state)) >= 0:
            index, microbatch = divmod(here, len(microbatches))
            return f"rank {rank} never runs {op} of stage {stages[index]}, microbatch {microbatch}; add it"
    return "" if stages else f"rank {rank} has no stage; give it one, or make a schedule for fewer ranks"


def _complaint(op: str, state: int) -> str:
    if op not in ("F", "B", "I", "W"):
        return "has an unknown operation; use F, B, I or W"
    if op == "F":
        return "is a second forward"
    if state == _WAITS:
        return "comes before its forward"
    if op == "W" and state == _FORWARD:
        return "comes before its input gradient"
    return "is a second backward"
