"""Checks of a pipeline's arguments on each rank, and comparison between the ranks before any rank connects."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from par_groups import agree, check_alike

from ..schedules.actions import WEIGHT_GRAD
from ..schedules.schedule import Schedule
from .options import SplitWhere
from .weight_gradients import unsplittable


def check(modules: Sequence[nn.Module], schedule: Schedule, group: dist.ProcessGroup, rank: int) -> tuple[int, ...]:
    """Check the arguments of a pipeline, and return the numbers of this rank's stages."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is {schedule!r}; give a Schedule, such as one_f_one_b(ranks, microbatches)")
    ranks = dist.get_world_size(group)
    if len(schedule.ranks) != ranks:
        raise ValueError(
            f"the schedule is for {len(schedule.ranks)} ranks, the group has {ranks}; make a schedule for {ranks}"
        )
    numbers = schedule.stage_of(rank)
    if len(modules) != len(numbers):
        raise ValueError(
            f"the schedule gives rank {rank} the stages {list(numbers)}, but it was given {len(modules)} modules; give "
            "one for each, ascending"
        )
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"a stage is a {type(module).__name__}; give an nn.Module, such as build_stage(...)")
    schedule.validate()
    return numbers


def split_stages(
    stages: Mapping[int, nn.Module], schedule: Schedule, rank: int, where: SplitWhere
) -> dict[int, nn.Module]:
    """Return the stages of this rank whose backward is split.

    Raises:
        ValueError: The schedule splits the backward of a stage for which that is impossible.
    """
    asked = sorted({action.stage for action in schedule.ranks[rank] if action.op == WEIGHT_GRAD})
    obstacles = {number: unsplittable(stages[number]) for number in asked}
    for number, obstacle in obstacles.items():
        if obstacle is None:
            continue
        problem = f"the schedule splits the backward of stage {number}, which cannot be split: {obstacle}"
        if where == "required":
            raise ValueError(
                f"{problem}; use a schedule of whole backwards, such as '1f1b', or split_backward='where possible', "
                "with which this stage runs its backward whole"
            )
        warnings.warn(f"{problem}; its weight gradients are computed in the first half", stacklevel=3)
    return {number: stages[number] for number in asked if obstacles[number] is None}


def digest(schedule: Schedule) -> str:
    """Return a hash of a schedule, to compare it between ranks."""
    text = repr([[str(action) for action in actions] for actions in schedule.ranks])
    return hashlib.sha256(text.encode()).hexdigest()


class Terms(NamedTuple):
    """Arguments of a pipeline on one rank, for comparison with the other ranks.

    Args:
        digest: Hash of the schedule.
        has_loss: Whether the rank has a loss function.
        broadcasts_loss: Whether every rank receives the loss.
        holders: Ranks whose gradients are summed, for each `Shared`.
    """

    digest: str
    has_loss: bool
    broadcasts_loss: bool
    holders: tuple[tuple[int, ...], ...]


def agree_on(terms: Terms, problem: Exception | None, group: dist.ProcessGroup) -> list[bool]:
    """Raise an error on every rank if a rank has a problem or the ranks differ. All-gather of small objects.

    Args:
        terms: Arguments of this rank.
        problem: Error on this rank, or None.
        group: Ranks of the pipeline.

    Returns:
        Whether the rank has a loss function, for each rank.
    """
    # A rank with an error joins the exchange, too: the other ranks would otherwise wait for it forever.
    by_rank = agree(problem, terms, group)
    first = next(iter(by_rank))
    different = [rank for rank, theirs in by_rank.items() if theirs.digest != by_rank[first].digest]
    if different:
        raise ValueError(f"ranks {different} have another schedule than rank {first}; make the same one on all ranks")
    broadcasts = {rank: theirs.broadcasts_loss for rank, theirs in by_rank.items()}
    check_alike(broadcasts, "values of broadcast_loss", remedy="give all ranks the same")
    holders = {rank: theirs.holders for rank, theirs in by_rank.items()}
    check_alike(holders, "shared parameters (the ranks that hold each)", remedy="give shared=[...] on all ranks")
    return [theirs.has_loss for theirs in by_rank.values()]
