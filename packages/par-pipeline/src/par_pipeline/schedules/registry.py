"""Schedules by name: the built-in ones, and those that other wheels provide."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from par_groups import Registry

from .schedule import Actions, Schedule

ScheduleFunction = Callable[..., Schedule | Iterable[Actions]]
F = TypeVar("F", bound=ScheduleFunction)

SCHEDULES: Registry[ScheduleFunction] = Registry("schedule", "par_pipeline.schedules")


def register_schedule(name: str) -> Callable[[F], F]:
    """Register a schedule under `name`, as a decorator.

    The function is called as `function(ranks, microbatches, **options)` and returns a `Schedule`, or a list of actions
    for each rank. A separate wheel can provide one without being imported: an entry point `name = "module:function"`
    in the group `par_pipeline.schedules`.

    Raises:
        ValueError: The name is taken; the message names both owners.

    Example:
        >>> @register_schedule("one at a time")
        ... def one_at_a_time(ranks: int, microbatches: int) -> list[list[Action]]:
        ...     order = [(op, k) for k in range(microbatches) for op in "FB"]
        ...     return [[Action(op, rank, k) for op, k in order] for rank in range(ranks)]
    """

    def register(function: F) -> F:
        SCHEDULES.register(name, function)
        return function

    return register


def schedule(name: str, ranks: int, microbatches: int, *, chunks: int | None = None, **options: Any) -> Schedule:
    """Make the schedule of that name, such as "1f1b".

    Args:
        name: The name under which it is registered.
        ranks: Number of ranks in the pipeline.
        microbatches: Number of microbatches per step.
        chunks: Number of stages on each rank, for "interleaved", "looped_bfs" and others that let the caller choose.
            Default: the schedule's own.
        **options: Further keywords of a schedule that somebody else has registered.

    Raises:
        ValueError: Nobody provides the name, or the sizes do not fit the schedule.
        TypeError: The schedule does not take one of the options.
    """
    if chunks is not None:
        options["chunks"] = chunks
    made = SCHEDULES[name](ranks, microbatches, **options)
    return made if isinstance(made, Schedule) else Schedule(made)
