"""V-Min: the least memory with a steady state that never waits, a third of 1F1B's."""

from collections.abc import Iterator

from .actions import Action
from .generate import Generated, check_sizes
from .placement import v_shaped
from .registry import register_schedule
from .schedule import Schedule

INTERVAL = 6  # two stages, each with forward, input gradient and weight gradient, in units of time


@register_schedule("v_min")
def v_min(ranks: int, microbatches: int) -> Schedule:
    """Return V-Min: a third of 1F1B's memory, 2 ceil((`ranks` + 2) / 3) activations of stages half as large.

    Rank r holds the stages r and 2 `ranks` - 1 - r.

    Args:
        ranks: Number of ranks in the pipeline.
        microbatches: Number of microbatches per step.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    actions = [Generated(_v_min, rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(actions, placement=v_shaped(ranks), microbatches=microbatches)


def _v_min(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Repeats the building block of one microbatch every six units, and runs what is due at each unit of time."""
    block = {start % INTERVAL: (start, op, stage) for start, op, stage in _block(rank, ranks)}
    last = max(start for start, _, _ in block.values()) + INTERVAL * (microbatches - 1)
    # Rank r cannot start before the first microbatch has passed the r stages before its own.
    for time in range(rank, last + 1):
        start, op, stage = block[time % INTERVAL]
        microbatch = (time - start) // INTERVAL
        if 0 <= microbatch < microbatches:
            yield Action(op, stage, microbatch)


def _block(rank: int, ranks: int) -> list[tuple[int, str, int]]:
    """Return when the first microbatch's actions start on one rank: six units that differ modulo the interval.

    Forward and input gradient pass from stage to stage without waiting. Weight gradients take the units that are left.
    If the ranks are a multiple of three, the way back waits for two units, or it would meet the way there.
    """
    down, up = v_shaped(ranks)[rank]
    back = 2 * ranks + (2 if ranks % 3 == 0 else 0)
    passes = [(down, "F", down), (up, "F", up), (back + down, "I", up), (back + up, "I", down)]
    after_up, after_down = back + down + 1, back + up + 1
    # Four of the six units are taken by the passes; the two weight gradients share what is left.
    free = set(range(INTERVAL)) - {start % INTERVAL for start, _, _ in passes}
    # The second stage's input gradient comes first, so its weight gradient takes the unit that follows soonest.
    first = min(free, key=lambda unit: (unit - after_up) % INTERVAL)
    (second,) = free - {first}
    return [
        *passes,
        (after_up + (first - after_up) % INTERVAL, "W", up),
        (after_down + (second - after_down) % INTERVAL, "W", down),
    ]
