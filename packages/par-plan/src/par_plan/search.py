"""Search over every configuration that the sizes of a model allow, for the fastest ones that fit.

A `Predictor` covers one topology and one number of microbatches. Its ranks do the same work within a microbatch under
every schedule and ZeRO stage, except for attention over a split sequence. Topologies are inspected in the order of this
work, until a lower bound shows that the rest are slower.
"""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from par_groups import Topology

from .budget.tiers import TooSmallError
from .costs.pipeline import SCHEDULES, pipeline_cost
from .costs.sequence import sequence_split
from .experts.spread import expert_config, expert_configs, why_not_placed
from .fit import cheapest
from .inputs import NUMBER_WIDTHS, Machine, TrainingJob
from .models.protocol import PlannedModel
from .prediction import Prediction, Predictor, attentions_of, planned, why_not_sequenced
from .shape import Shape, averaged_ranks, tensor_split

LEAST_TOKENS = 2048
"""Fewest tokens of a row on a sequence rank; attention over fewer tokens is too small to split."""

_LEAST_KEPT = 3
"""No schedule keeps fewer activations than 1F1B divided by this."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search.

    Args:
        best: The best configuration of each topology, of those that fit, the fastest first.
        nearest: The configuration that takes the least memory of the device, if none fits.
        short: Reason why nothing fits: the tier that is too small, and the missing bytes.
        frames: Number of topologies, each counted with each of its numbers of microbatches.
    """

    best: tuple[Prediction, ...]
    nearest: Prediction | None
    frames: int
    short: TooSmallError | None = None


def search_configurations(
    shape: Shape | PlannedModel,
    world: int,
    job: TrainingJob,
    machine: Machine,
    top: int = 10,
    *,
    sequence: int | None = None,
    watch: Callable[[], object] = lambda: None,
) -> SearchResult:
    """Return the fastest configurations that fit a machine, each with the fastest recomputation and offloading.

    Args:
        shape: The model's sizes.
        world: Number of ranks.
        job: The job, of which batch, precision and documents are kept.
        machine: Devices, network and memory tiers.
        top: Number of topologies to find, which differ in sizes, or in the tensor mode.
        sequence: Number of ranks that each sequence is cut over; None: whatever is best.
        watch: Callback after each inspected topology, for a progress bar; it runs twice for candidates.

    Raises:
        ValueError: The activations of the model cannot be predicted.
    """
    model = planned(shape)
    search, bounds = _Search(model, machine, top), []
    for bound in _bounds(model, world, job, machine, sequence):
        bounds.append(bound)
        watch()
    # In the order of the bounds, the first one beyond the slowest result also rules out all that follow.
    for bound in sorted(bounds, key=lambda one: one.seconds):
        if bound.seconds > search.slowest:
            break
        search.look_at(bound, machine.memory)
        watch()
    # Only if nothing fits is the configuration of least memory worth a second search.
    for bound in sorted(bounds, key=lambda one: one.memory) if not search.best else ():
        if bound.memory > search.room:
            break
        search.look_at(bound, search.room)
        watch()
    frames = sum(len(bound.jobs) for bound in bounds)
    if search.best:
        return SearchResult(best=tuple(search.found), nearest=None, frames=frames)
    return SearchResult(best=(), nearest=search.nearest, frames=frames, short=search.short)


class _Search:
    """State of a search.

    Args:
        model: The model.
        machine: Devices, network and memory tiers.
        top: Number of topologies to find.
    """

    def __init__(self, model: PlannedModel, machine: Machine, top: int) -> None:
        self._model, self._machine, self._top = model, machine, top
        self._elsewhere = bool(machine.tiers)
        self.best: dict[str, Prediction] = {}
        self.nearest: Prediction | None = None
        self.short: TooSmallError | None = None

    @property
    def found(self) -> list[Prediction]:
        """The best configurations of the best topologies."""
        return sorted(self.best.values(), key=_order)[: self._top]

    @property
    def slowest(self) -> float:
        """Seconds beyond which no other topology is of use."""
        return self.found[-1].seconds if len(self.best) >= self._top else math.inf

    @property
    def room(self) -> float:
        """Bytes of the device beyond which nothing comes nearer to what fits."""
        if self.short is None:
            return math.inf
        return self._machine.memory + self.short.missing * (self.short.tier == "device")

    def look_at(self, bound: "_Bound", room: float) -> None:
        """Inspect the predictors of a topology whose lower bounds are within the limits."""
        # The bound of the topology is cheap and loose; the bound of each job is tighter, and spares the prediction of
        # all variants.
        for job in bound.jobs if bound.memory <= room else ():
            frame = Predictor(self._model, bound.topology, job, self._machine)
            least_seconds, least_memory = _least(frame, job)
            if least_memory <= room and least_seconds <= self.slowest:
                self._consider(least_seconds, frame, job)

    def _consider(self, least_seconds: float, frame: Predictor, job: TrainingJob) -> None:
        """Predict all variants of a predictor, and store the best fit and the one with the least memory."""
        topology = frame.topology
        best, (name, ranks) = self.best, (topology.to_json(), topology.size("pipeline"))
        # A variant helps only if it beats the best one of this topology, or for a new topology the slowest wanted one.
        within = best[name].seconds if name in best else self.slowest
        stages = variants(topology, job, elsewhere=self._elsewhere)
        for variant, way in product(stages, best_modes(frame, job)):
            within = min(within, best[name].seconds) if name in best else within
            try:
                # The idle time of a schedule depends on no other cost, so it can rule out a variant before it is
                # predicted.
                idle = pipeline_cost(variant.schedule, ranks, variant.microbatches).idle / variant.microbatches
                if least_seconds * (1 + idle) > within:
                    continue
                made, problem = cheapest(way, variant, within)
            except ValueError:  # a schedule that does not take these sizes
                continue
            # If nothing fits, the error describes the configuration that lacks the fewest bytes.
            if (
                problem is not None
                and not best
                and (self.nearest is None or _lacks(made, problem) < _lacks(self.nearest, self.short))
            ):
                self.nearest, self.short = made, problem
            if problem is None and (name not in best or _order(made) < _order(best[name])):
                best[name] = made


@dataclass(frozen=True)
class _Bound:
    """A topology with the jobs of its frames, and seconds and bytes of the device below which none of them comes."""

    topology: Topology
    jobs: tuple[TrainingJob, ...]
    seconds: float
    memory: float


def _bounds(
    model: PlannedModel, world: int, job: TrainingJob, machine: Machine, sequence: int | None
) -> Iterator[_Bound]:
    """Yield every topology with lower bounds. The fewest microbatches send the fewest messages."""
    for topology, jobs in _frames(model, world, job, sequence):
        fewest = min(jobs, key=lambda frame: frame.microbatches)
        # Activations shrink with the number of microbatches, so they would be no lower bound for the other jobs.
        seconds, memory = _least(Predictor(model, topology, fewest, machine), fewest, activations=False)
        yield _Bound(topology, jobs, seconds, memory)


def _least(frame: Predictor, job: TrainingJob, *, activations: bool = True) -> tuple[float, float]:
    """Return lower bounds of seconds and device bytes for all variants of a predictor.

    The highest useful stage needs the least state, full recomputation the fewest activations, and the mode "gather"
    saves the least for backward. The time that all variants have in common is a bound for each of them.

    Args:
        frame: Predictor of the topology.
        job: Training job.
        activations: Whether activations count. Default: True.
    """
    machine, topology = frame.machine, frame.topology
    again, elsewhere = frame.model.recomputes[-1], bool(machine.tiers)
    zero = _last_stage(topology, job, elsewhere=elsewhere)
    first = frame.predict(replace(job, zero=zero, recompute=again))
    fullest = max(first.ranks, key=lambda one: one.memory.total)
    seconds, memory = first.busiest.seconds, fullest.memory
    # The prediction is for 1F1B. Other schedules may keep fewer activations, so the bound assumes the best of them.
    least_kept = memory.activations / (_LEAST_KEPT if topology.size("pipeline") > 1 else 1) if activations else 0.0
    # Offloaded state leaves the device, so a bound may not count it.
    if elsewhere:
        least_kept -= sum(source.frees for source in fullest.sources)
    # Variants choose or hide the other terms (data, bubble, sequence, offload), so a bound must leave these out.
    return sum(seconds[term] for term in ("compute", "tensor", "experts", "pipeline")), memory.state + least_kept


def _lacks(made: Prediction, problem: TooSmallError | None) -> tuple[bool, float, float]:
    """Return the sort key of predictions that do not fit: other tiers before the device, then the missing bytes."""
    if problem is None:
        return False, 0.0, made.memory.total
    return problem.tier == "device", problem.missing, made.memory.total


def configurations(
    shape: Shape | PlannedModel, world: int, job: TrainingJob, sequence: int | None = None
) -> Iterator[tuple[Topology, TrainingJob]]:
    """Yield every topology and job of a world that the sizes of the model and the batch allow.

    Args:
        shape: The model's sizes.
        world: Number of ranks.
        job: The job, of which batch, precision and documents are kept; the schedule becomes "1f1b", and the stage 0.
        sequence: Number of ranks that each sequence is cut over, in the mode "gather"; None: as many as are of use.
    """
    for topology, jobs in _frames(planned(shape), world, job, sequence):
        yield from ((topology, each) for each in jobs)


def _frames(
    model: PlannedModel, world: int, job: TrainingJob, sequence: int | None
) -> Iterator[tuple[Topology, tuple[TrainingJob, ...]]]:
    """Yield every topology with a job for each number of microbatches; arguments as in `configurations`."""
    for tensor in tensor_configs(model, world, job.precision):
        left = world // tensor.get("size", 1)
        for pipeline, ranks in product(
            _divisors(left), sequence_sizes(model, left) if sequence is None else [sequence]
        ):
            data, rest = divmod(left, pipeline * ranks)
            if rest or pipeline > model.layers or job.batch % data:
                continue
            if pipeline > 1 and model.why_no_stages() is not None:
                continue
            parallel: dict[str, Any] = {"pipeline": pipeline, **({"tensor": tensor} if tensor else {})}
            if ranks > 1:
                # Mode "gather" accepts any number of heads. `best_modes` compares the other modes later.
                parallel["sequence"] = {"size": ranks, "mode": "gather"}
            for expert in expert_configs(model.mixture, tensor.get("size", 1), ranks, data):
                topology = Topology.from_config({**parallel, **expert}, world)
                split, rows = tensor_split(topology), job.batch // data
                if why_not_placed(model.mixture, split.experts, job.imbalance) is not None:
                    continue
                # All placements of the experts split sequences in the same way, so none of the following ones would
                # work either.
                if why_not_sequenced(model, split, sequence_split(topology)) is not None:
                    break
                jobs = tuple(
                    replace(job, zero=0, schedule="1f1b", microbatches=microbatches)
                    for microbatches in _divisors(rows)
                    # Fewer microbatches than stages would leave stages idle under every schedule.
                    if microbatches >= min(pipeline, rows)
                    and model.why_not_sharded(split, rows // microbatches) is None
                )
                if jobs:
                    yield topology, jobs


def sequence_sizes(model: PlannedModel, world: int) -> list[int]:
    """Return the possible numbers of sequence ranks with enough tokens each; [1] if the model cannot be split.

    Args:
        model: The model.
        world: Number of ranks, which they divide.
    """
    most = model.context // LEAST_TOKENS if model.why_no_sequence_ranks() is None else 1
    return [size for size in _divisors(world) if size == 1 or (size <= most and model.context % size == 0)]


def best_modes(frame: Predictor, job: TrainingJob) -> list[Predictor]:
    """Return the sequence modes that no other mode beats in both time and memory.

    This holds for every schedule.

    Args:
        frame: Predictor in the mode "gather".
        job: Training job.
    """
    ways = sequence_modes(frame.model, frame.topology, frame.machine)
    if len(ways) == 1:
        return [frame]
    costs: dict[tuple[float, float, float], Predictor] = {}
    for way in ways:
        try:
            in_mode = frame if way == frame.topology else Predictor(frame.model, way, job, frame.machine)
            made = in_mode.predict(job)
        except ValueError:  # heads that this mode cannot share out
            continue
        taken = made.busiest.seconds["sequence"], made.memory.activations, made.memory.attention
        # Modes with equal costs are one choice, and the first of them is kept.
        costs.setdefault(taken, in_mode)
    return [
        way for mine, way in costs.items() if not any(its != mine and all(map(operator.le, its, mine)) for its in costs)
    ]


def sequence_modes(shape: Shape | PlannedModel, topology: Topology, machine: Machine) -> list[Topology]:
    """Return a topology in each context-parallel mode; itself without sequence ranks.

    In mode "2d", the ranks of one node exchange tokens for heads, as far as the heads divide.

    Args:
        shape: Sizes of the model.
        topology: Sizes of the axes, with the mode "gather".
        machine: Machine; the size of its nodes bounds the inner ranks of mode "2d".
    """
    model, ranks = planned(shape), topology.size("sequence")
    if ranks == 1:
        return [topology]
    split = tensor_split(topology)
    ways: list[dict[str, Any]] = [{"mode": "gather"}, {"mode": "ring"}, {"mode": "ulysses"}]
    # Layers may have different numbers of heads, and one mode serves all layers.
    heads = math.gcd(*(each.heads for each in attentions_of(model, split, sequence_split(topology))))
    inside = [
        size
        for size in _divisors(math.gcd(ranks, heads))
        # The exchange of heads is only faster within a node, which must hold complete inner groups, each of whole
        # tensor groups.
        if 1 < size < ranks and machine.devices_per_node % (size * split.ranks) == 0
    ]
    if inside:
        # The largest inner group keeps the most traffic inside a node, and leaves the fewest groups on the ring.
        ways += [{"mode": "2d", "ulysses": inside[-1], "outer": outer} for outer in ("ring", "gather")]
    mode, options = topology.modes.get("tensor", (None, {}))
    tensor = {"tensor": {"size": split.ranks, "mode": mode, **options}} if mode else {}
    others = {"pipeline": topology.size("pipeline"), **tensor, **expert_config(topology)}
    return [Topology.from_config({**others, "sequence": {"size": ranks, **way}}, topology.world_size) for way in ways]


def tensor_configs(shape: Shape | PlannedModel, world: int, precision: str) -> Iterator[dict[str, Any]]:
    """Yield the tensor modes and sizes that a model allows, as entries of a config; {} means none.

    Args:
        shape: The model's sizes.
        world: Number of ranks.
        precision: Name of a precision.
    """
    model = planned(shape)
    yield {}
    for size in _divisors(world):
        for options in model.tensor_configs(size, precision) if size > 1 else ():
            config = {"size": size, **options}
            if model.why_not_sharded(tensor_split(Topology.from_config({"tensor": config}, size))) is None:
                yield config


def variants(topology: Topology, job: TrainingJob, *, elsewhere: bool = False) -> Iterator[TrainingJob]:
    """Yield the schedules and ZeRO stages of a predictor.

    Stages 2 and 3 are skipped with gradient accumulation, as in every pipeline. There, gradients are unsharded until
    the last microbatch and parameters stay gathered, so stage 1 needs no more memory. Without data ranks, stage 3 is
    still compared with stage 0, because it can offload parameters.

    Args:
        topology: The axes.
        job: The job.
        elsewhere: Whether there is another tier than devices.
    """
    last = _last_stage(topology, job, elsewhere=elsewhere)
    for schedule in SCHEDULES if topology.size("pipeline") > 1 else ("1f1b",):
        # Without ranks that share state, the stages between 0 and the last one shard nothing and equal stage 0.
        for zero in range(1 + last) if _shares(topology) else {0, last}:
            yield replace(job, schedule=schedule, zero=zero)


def _shares(topology: Topology) -> bool:
    """Return whether data ranks exist that can shard state."""
    return averaged_ranks(topology) > 1


def _last_stage(topology: Topology, job: TrainingJob, *, elsewhere: bool) -> int:
    """Return the highest useful ZeRO stage; autocast excludes stage 3, because it saves casts of all weights."""
    if job.microbatches > 1 or topology.size("pipeline") > 1:
        return 1 if _shares(topology) else 0
    highest = 2 if NUMBER_WIDTHS[job.precision].cast else 3
    return highest if _shares(topology) else 3 if elsewhere and highest == 3 else 0


def _order(prediction: Prediction) -> tuple[float, float]:
    """Return the sort key of predictions: step time, then memory."""
    return prediction.seconds, prediction.memory.total


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return (*small, *large)
