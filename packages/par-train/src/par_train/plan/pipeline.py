"""What a schedule costs: idle time, activations that wait, messages. Pure; par-pipeline's simulator is asked.

A long pipeline is not simulated. What is idle, and what is kept, grows with the number of ranks along a straight line
as long as there are as many microbatches a rank: two short pipelines give that line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from par_pipeline import Schedule, schedule, simulate

from .shape import Part

SCHEDULES = (
    "1f1b",
    "interleaved",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe_v",
    "gpipe",
    "looped_bfs",
)
"""Those that are compared."""

EXACT = 12
"""Ranks up to which a schedule is simulated as it is."""

ENOUGH = 4
"""Microbatches a rank beyond which nothing but the steady state grows."""

_KEEPS = {"F": 1, "B": -1, "I": 0, "W": -1}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A kind of rank of a pipeline.

    Args:
        name: "first", "middle" or "last".
        stages: That it holds.
        kept: Activations that it keeps at most, each of one stage and microbatch.
        kept_last: Of these, those of the last stage.
        received: Messages from other ranks, for each microbatch.
        neighbours: Ranks that it is connected with.
    """

    name: str
    stages: tuple[int, ...]
    kept: float
    kept_last: float
    received: int
    neighbours: int


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """A schedule on so many ranks.

    Args:
        ranks: Of the pipeline.
        stages: In all.
        idle: The time that a rank waits, in microbatches of its own work: forward, and both parts of backward.
        splits: Whether backward is cut in two.
        places: The kinds of ranks.
    """

    ranks: int
    stages: int
    idle: float
    splits: bool
    places: tuple[Place, ...]

    def bubble(self, microbatches: int) -> float:
        """The part of a rank's time in which it waits, if forward and both parts of backward take equal times."""
        return self.idle / (microbatches + self.idle)

    def part(self, place: Place, layers: int) -> Part:
        """What a rank has of a model whose blocks are cut into stages as evenly as can be."""
        blocks = sum(stage_size(layers, self.stages, stage) for stage in place.stages)
        return Part(blocks=blocks, first=0 in place.stages, last=self.stages - 1 in place.stages)


def stage_size(layers: int, stages: int, stage: int) -> int:
    """Blocks of a stage, as `par_pipeline.partition` deals them out."""
    return layers * (stage + 1) // stages - layers * stage // stages


@cache
def pipe(name: str, ranks: int, microbatches: int) -> Pipe:
    """What a schedule costs.

    Args:
        name: As par-pipeline knows it.
        ranks: Of the pipeline; one takes the microbatches one after the other.
        microbatches: In a step.

    Raises:
        ValueError: No such schedule, or one that does not take these sizes.
    """
    if ranks == 1:
        alone = Place(name="first", stages=(0,), kept=1, kept_last=1, received=0, neighbours=0)
        return Pipe(ranks=1, stages=1, idle=0.0, splits=False, places=(alone,))
    if ranks <= EXACT:
        return _simulated(name, ranks, microbatches)
    small = [_simulated(name, size, max(1, round(microbatches * size / ranks))) for size in (EXACT // 2, EXACT)]
    layouts = [_layout(each) for each in small]
    if None in layouts or layouts[0] != layouts[1]:
        return _simulated(name, ranks, microbatches)
    return _extended(small, ranks, microbatches)


@cache
def _simulated(name: str, ranks: int, microbatches: int) -> Pipe:
    """Up to as many microbatches as make a difference."""
    made = schedule(name, ranks, min(microbatches, ENOUGH * ranks) if ranks <= EXACT else microbatches)
    timeline = simulate(made)
    longest = max(timeline.span(rank) for rank in range(ranks))
    chunks = made.stages // ranks
    idle = (longest - max(timeline.busy(rank) for rank in range(ranks))) / (3 * chunks)
    more = microbatches / made.microbatches if _keeps_all(made) else 1.0
    names = ["first", *["middle"] * (ranks - 2), "last"]
    places = tuple(_place(each, made, rank, more) for rank, each in enumerate(names))
    return Pipe(
        ranks=ranks,
        stages=made.stages,
        idle=idle,
        splits=any(action.op == "W" for action in made.ranks[0]),
        places=places,
    )


def _place(name: str, made: Schedule, rank: int, more: float) -> Place:
    mine, last = made.stage_of(rank), made.stages - 1
    others = [made.rank_of(near) for stage in mine for near in (stage - 1, stage + 1) if 0 <= near <= last]
    others = [other for other in others if other != rank]
    return Place(
        name=name,
        stages=mine,
        kept=_kept(made, rank, mine) * more,
        kept_last=_kept(made, rank, [last]) * more,
        received=len(others),
        neighbours=len(set(others)),
    )


def _kept(made: Schedule, rank: int, stages: Sequence[int]) -> int:
    """The most activations of these stages that a rank keeps at once."""
    kept = peak = 0
    for action in made.ranks[rank]:
        kept += _KEEPS[action.op] * (action.stage in stages)
        peak = max(peak, kept)
    return peak


def _keeps_all(made: Schedule) -> bool:
    """Whether all forwards come before the first backward, so that what is kept grows with the microbatches."""
    return _kept(made, 0, made.stage_of(0)) == made.microbatches * len(made.stage_of(0))


def _layout(small: Pipe) -> str | None:
    """How stages are dealt out; None: in a way that says nothing of longer pipelines."""
    ranks = small.ranks
    stages = [place.stages for place in small.places]
    if stages == [tuple(range(rank, small.stages, ranks)) for rank in range(ranks)]:
        return "loop"
    if stages == [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]:
        return "v"
    return None


def _extended(small: Sequence[Pipe], ranks: int, microbatches: int) -> Pipe:
    """On the line through two short pipelines."""
    short, long = small
    chunks = long.stages // long.ranks

    def at(first: float, second: float) -> float:
        return max(0.0, second + (second - first) * (ranks - long.ranks) / (long.ranks - short.ranks))

    def place(number: int, other: int, stages: tuple[int, ...]) -> Place:
        one, two = short.places[number], long.places[other]
        return Place(
            name=two.name,
            stages=stages,
            kept=min(at(one.kept, two.kept), microbatches * chunks),
            kept_last=min(at(one.kept_last, two.kept_last), microbatches),
            received=two.received,
            neighbours=two.neighbours,
        )

    stages = chunks * ranks
    loop = _layout(long) == "loop"
    dealt = [tuple(range(rank, stages, ranks)) if loop else (rank, stages - 1 - rank) for rank in range(ranks)]
    places = (
        place(0, 0, dealt[0]),
        *(place(1, 1, each) for each in dealt[1:-1]),
        place(short.ranks - 1, long.ranks - 1, dealt[-1]),
    )
    return Pipe(ranks=ranks, stages=stages, idle=at(short.idle, long.idle), splits=long.splits, places=places)
