"""Cost of a pipeline schedule: idle time, activations in flight, messages.

Pure arithmetic on what par-pipeline's simulator says. A long pipeline is extrapolated from two short ones. For a fixed
number of microbatches per rank, idle time and saved activations grow linearly with the number of ranks.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from par_pipeline import Schedule, schedule, simulate

from ..shape import ModelSlice

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
"""The schedules that a search compares."""

EXACT = 12
"""Number of ranks up to which a schedule is simulated as it is."""

ENOUGH = 4
"""Number of microbatches a rank beyond which nothing but the steady state grows."""


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """One rank of a pipeline.

    Args:
        name: "first", "middle" or "last".
        stages: The stages that it has.
        kept: Largest number of activations that it keeps at once, each of one stage and microbatch.
        kept_last: Largest number of those that are of the last stage.
        received: Number of messages from other ranks for each microbatch.
        neighbours: Number of ranks that it is connected with.
    """

    name: str
    stages: tuple[int, ...]
    kept: float
    kept_last: float
    received: int
    neighbours: int


@dataclass(frozen=True, kw_only=True, eq=False)  # which is looked up by identity: `pipe` makes one of each
class PipelineCost:
    """A schedule on some number of ranks.

    Args:
        ranks: Number of ranks in the pipeline.
        stages: Number of stages on all of them together.
        idle: Time that a rank waits in a step, in units of its own work on one microbatch: forward and both parts of
            backward, which are taken to last equally long.
        splits: Whether the two parts of backward, input gradients and weight gradients, are scheduled apart.
        places: The ranks.
    """

    ranks: int
    stages: int
    idle: float
    splits: bool
    places: tuple[PipelineRank, ...]

    def bubble(self, microbatches: int) -> float:
        """Return the fraction of a step in which a rank is idle."""
        return self.idle / (microbatches + self.idle)

    def part(self, place: PipelineRank, layers: int) -> ModelSlice:
        """Return the slice of a model on a rank, with blocks split into stages of nearly equal size."""
        blocks = sum(stage_size(layers, self.stages, stage) for stage in place.stages)
        return ModelSlice(blocks=blocks, first=0 in place.stages, last=self.stages - 1 in place.stages)


def stage_size(layers: int, stages: int, stage: int) -> int:
    """Return the number of blocks in a stage; the last stages are larger, as in `par_pipeline.partition`."""
    size, larger = divmod(layers, stages)
    return size + (stage >= stages - larger)


def stage_run(layers: int, stages: int, stage: int) -> tuple[int, int]:
    """Return the number of a stage's first block, and of the next stage's first block."""
    size, larger = divmod(layers, stages)
    start = stage * size + max(0, stage - (stages - larger))
    return start, start + stage_size(layers, stages, stage)


@lru_cache(maxsize=4096)
def pipeline_cost(name: str, ranks: int, microbatches: int) -> PipelineCost:
    """Return the cost of a schedule.

    Args:
        name: The schedule's name in par-pipeline.
        ranks: Number of ranks in the pipeline; one rank takes the microbatches one after the other.
        microbatches: Number of microbatches in a step.

    Raises:
        ValueError: There is no such schedule, or it does not take these sizes.
    """
    if ranks == 1:
        alone = PipelineRank(name="first", stages=(0,), kept=1, kept_last=1, received=0, neighbours=0)
        return PipelineCost(ranks=1, stages=1, idle=0.0, splits=False, places=(alone,))
    if ranks > EXACT:
        # Both short pipelines have the same number of microbatches per rank as the long one, so that the line through
        # them holds.
        short, long = (
            _simulated(name, size, max(1, round(microbatches * size / ranks))) for size in (EXACT // 2, EXACT)
        )
        layout = _layout(long)
        # Schedules with another order of stages are simulated in full length, because their ranks have no counterpart
        # in a short pipeline.
        if layout is not None and layout == _layout(short):
            return _extended(short, long, layout, ranks, microbatches)
    return _simulated(name, ranks, microbatches)


@lru_cache(maxsize=4096)
def _simulated(name: str, ranks: int, microbatches: int) -> PipelineCost:
    """Return the simulated cost of a schedule on few ranks, with as many microbatches as matter."""
    # More microbatches repeat the steady state, and would only make the simulation slower.
    made = schedule(name, ranks, min(microbatches, ENOUGH * ranks) if ranks <= EXACT else microbatches)
    timeline = simulate(made)
    longest = max(timeline.span(rank) for rank in range(ranks))
    busiest = max(timeline.busy(rank) for rank in range(ranks))
    stages_a_rank = made.stages // ranks
    # Where all forwards come before the first backward, what is kept grows with the microbatches that were left out.
    keeps_all = _kept(made, 0, made.stage_of(0)) == made.microbatches * stages_a_rank
    more = microbatches / made.microbatches if keeps_all else 1.0
    places = []
    for rank in range(ranks):
        mine, last = made.stage_of(rank), made.stages - 1
        # A message is received for each neighbouring stage that is on another rank.
        near = [made.rank_of(stage + step) for stage in mine for step in (-1, 1) if 0 <= stage + step <= last]
        others = [other for other in near if other != rank]
        place = PipelineRank(
            name="first" if rank == 0 else "last" if rank == ranks - 1 else "middle",
            stages=mine,
            kept=_kept(made, rank, mine) * more,
            kept_last=_kept(made, rank, [last]) * more,
            received=len(others),
            neighbours=len(set(others)),
        )
        places.append(place)
    return PipelineCost(
        ranks=ranks,
        stages=made.stages,
        # A microbatch takes three units of time on a stage: forward and both parts of backward.
        idle=(longest - busiest) / (3 * stages_a_rank),
        splits=any(action.op == "W" for action in made.ranks[0]),
        places=tuple(places),
    )


def _kept(made: Schedule, rank: int, stages: Collection[int]) -> int:
    """Return the largest number of activations of these stages that a rank saves at once."""
    # A backward in two parts frees its activations only after the second part, W, which reads them too.
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    kept = largest = 0
    for action in made.ranks[rank]:
        if action.stage in stages:
            kept += change[action.op]
            largest = max(largest, kept)
    return largest


def _layout(made: PipelineCost) -> str | None:
    """Return the order of stages on ranks: "loop", "v", or None if it does not extend to longer pipelines."""
    ranks = made.ranks
    stages = [place.stages for place in made.places]
    for layout in ("loop", "v"):
        if stages == [_stages_of(layout, rank, ranks, made.stages) for rank in range(ranks)]:
            return layout
    return None


def _stages_of(layout: str, rank: int, ranks: int, stages: int) -> tuple[int, ...]:
    return (rank, 2 * ranks - 1 - rank) if layout == "v" else tuple(range(rank, stages, ranks))


def _extended(short: PipelineCost, long: PipelineCost, layout: str, ranks: int, microbatches: int) -> PipelineCost:
    """Return the cost of a long pipeline, extrapolated from two short ones."""
    stages_a_rank = long.stages // long.ranks
    stages = stages_a_rank * ranks

    def on_line(in_short: float, in_long: float) -> float:
        # With a fixed number of microbatches per rank, idle time and saved activations grow linearly with the ranks.
        slope = (in_long - in_short) / (long.ranks - short.ranks)
        return max(0.0, in_long + slope * (ranks - long.ranks))

    places = []
    for rank in range(ranks):
        # The first and the last rank are like those of a short pipeline, all others like its second.
        number = -1 if rank == ranks - 1 else min(rank, 1)
        one, two = short.places[number], long.places[number]
        place = PipelineRank(
            name=two.name,
            stages=_stages_of(layout, rank, ranks, stages),
            # The line may exceed what exists: a rank has no more activations than stages times microbatches.
            kept=min(on_line(one.kept, two.kept), microbatches * stages_a_rank),
            kept_last=min(on_line(one.kept_last, two.kept_last), microbatches),
            received=two.received,
            neighbours=two.neighbours,
        )
        places.append(place)
    return PipelineCost(
        ranks=ranks,
        stages=stages,
        idle=on_line(short.idle, long.idle),
        splits=long.splits,
        places=tuple(places),
    )
