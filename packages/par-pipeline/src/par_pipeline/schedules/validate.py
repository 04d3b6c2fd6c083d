"""The check that a schedule is one training step, and that its ranks never wait for one another for ever."""

from collections.abc import Iterable, Sequence

from .actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, check_action
from .placement import StagePlacement
from .walk import StageCosts, walk

# What a stage has done with a microbatch, and what it does next.
_WAITS, _FORWARD, _INPUT, _DONE = range(4)
_NEXT = {
    (FORWARD, _WAITS): _FORWARD,
    (BACKWARD, _FORWARD): _DONE,
    (INPUT_GRAD, _FORWARD): _INPUT,
    (WEIGHT_GRAD, _INPUT): _DONE,
}
_MISSING = {_WAITS: "F", _FORWARD: "B (or I and W)", _INPUT: "W"}


def validate(ranks: Sequence[Iterable[Action]], placement: StagePlacement, microbatches: int) -> None:
    """Check a schedule; `Schedule.validate` lists the rules.

    Sends do not block a rank, and receives are posted in the order in which the peer sends. So ranks deadlock only if
    actions need each other in a circle, which a walk through the actions finds.

    Args:
        ranks: Actions of each rank, in order.
        placement: Map of stages to ranks.
        microbatches: Number of microbatches in the step.

    Raises:
        ValueError: The schedule breaks a rule; the message names the rank, the position and the action.
    """
    _check_placement(placement)
    missing = [
        _check_rank(rank, actions, placement.by_rank[rank], range(microbatches)) for rank, actions in enumerate(ranks)
    ]
    # Every rank was checked before this raises, because a wrong action on one rank is a better message than a missing
    # one on another.
    for line in filter(None, missing):
        raise ValueError(line)
    stages = placement.stages
    ones, zeros = [1.0] * stages, [0.0] * stages
    # The times do not matter here: the walk raises if the ranks deadlock, whatever the actions take.
    walk(ranks, placement, microbatches, StageCosts(ones, ones, ones, zeros))


def _check_placement(placement: StagePlacement) -> None:
    """Raise ValueError unless every stage is on exactly one rank, and no number is skipped."""
    holders: dict[int, int] = {}
    for rank, stages in enumerate(placement.by_rank):
        for stage in stages:
            if stage < 0:
                raise ValueError(f"rank {rank} has stage {stage}; stages are counted from 0")
            if stage in holders:
                raise ValueError(f"stage {stage} is on rank {holders[stage]} and on rank {rank}; give it to one")
            holders[stage] = rank
    for stage in range(placement.stages):
        placement.rank_of(stage)


def _check_rank(rank: int, actions: Iterable[Action], stages: tuple[int, ...], microbatches: range) -> str:
    """Check each action of one rank by those before it. Returns what is missing at the end, in words.

    A wrong action explains a missing one, so all ranks are looked through before anything is reported as missing.
    """
    begins = {stage: index * len(microbatches) for index, stage in enumerate(stages)}
    # One byte for each stage and microbatch, because schedules of millions of actions are checked.
    progress = bytearray(len(stages) * len(microbatches))
    for position, action in enumerate(actions):
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
    if op not in (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD):
        return "has an unknown operation; use F, B, I or W"
    if op == FORWARD:
        return "is a second forward"
    if state == _WAITS:
        return "comes before its forward"
    if op == WEIGHT_GRAD and state == _FORWARD:
        return "comes before its input gradient"
    return "is a second backward"
