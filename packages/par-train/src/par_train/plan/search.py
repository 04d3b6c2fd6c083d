"""Every configuration of a world that a model's sizes allow, and the fastest of those that fit.

A frame is a topology and a number of microbatches: what its ranks compute and send within a microbatch is the same
under every schedule and stage. Frames are looked at in the order of that time, until no other can be faster than what
was found.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from par_groups import Topology

from .inputs import Job, Machine
from .pipeline import SCHEDULES
from .predict import Prediction, predict
from .shape import Shape, cut_of, make_cut, misfit

_LEAST_KEPT = 3
"""No schedule keeps less than such a part of what 1F1B keeps."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What a search found.

    Args:
        best: Those that fit, the fastest first; the best of each topology.
        nearest: The one that takes the least memory, if none fits.
        frames: Topologies and numbers of microbatches that there are.
    """

    best: tuple[Prediction, ...]
    nearest: Prediction | None
    frames: int


def configurations(shape: Shape, world: int, job: Job) -> Iterator[tuple[Topology, Job]]:
    """Every topology of a world, and numbers of microbatches, that a model and its batch divide over.

    Args:
        shape: The model.
        world: Ranks.
        job: Batch and precision are its; the schedule is "1f1b", and the stage 0.
    """
    for tensor in tensor_configs(shape, world, job.precision):
        left = world // tensor.get("size", 1)
        for pipeline in _divisors(left):
            data = left // pipeline
            if pipeline > shape.layers or job.batch % data:
                continue
            topology = Topology.from_config({"pipeline": pipeline, **({"tensor": tensor} if tensor else {})}, world)
            cut, rows = cut_of(topology), job.batch // data
            for microbatches in _divisors(rows):
                enough = microbatches >= min(pipeline, rows)
                if enough and misfit(shape, cut, rows // microbatches) is None:
                    yield topology, replace(job, zero=0, schedule="1f1b", microbatches=microbatches)


def tensor_configs(shape: Shape, world: int, precision: str) -> Iterator[dict[str, Any]]:
    """The tensor modes and sizes that a model allows, as the config writes them; {} is none."""
    yield {}
    for size in _divisors(world):
        if size == 1:
            continue
        options: list[tuple[dict[str, Any], dict[str, int]]] = [({"mode": "1d"}, {"tensor": size})]
        options.append(({"mode": "1d", "sequence_parallel": True}, {"tensor": size}))
        if precision != "fp8":
            options += _grids(size)
        for config, axes in options:
            cut = make_cut(config["mode"], size, axes, sequence="sequence_parallel" in config)
            if misfit(shape, cut) is None:
                yield {"size": size, **config}


def _grids(size: int) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Squares, up to as many of them side by side as one has sides, and cubes."""
    for q in range(2, math.isqrt(size) + 1):
        depth, rest = divmod(size, q * q)
        if rest == 0 and depth == 1:
            yield {"mode": "2d"}, {"row": q, "col": q}
        elif rest == 0 and depth <= q:
            yield {"mode": "2.5d", "depth": depth}, {"depth": depth, "row": q, "col": q}
        if q**3 == size:
            yield {"mode": "3d"}, {"output": q, "input": q, "weight": q}


def variants(topology: Topology, job: Job) -> Iterator[Job]:
    """The schedules and stages of a frame.

    Stages 2 and 3 are left out where gradients of several microbatches are added up, as in every pipeline: they are
    whole until the last one, and parameters too, so that stage 1 takes no more.
    """
    for schedule in SCHEDULES if topology.size("pipeline") > 1 else ("1f1b",):
        for zero in range(1 + _last_stage(topology, job)):
            yield replace(job, schedule=schedule, zero=zero)


def _last_stage(topology: Topology, job: Job) -> int:
    if topology.size("data") == 1:
        return 0
    return 1 if job.microbatches > 1 or topology.size("pipeline") > 1 else 3


def rank(shape: Shape, world: int, job: Job, machine: Machine, top: int = 10) -> Ranking:
    """The fastest configurations that fit a machine.

    Args:
        shape: The model.
        world: Ranks.
        job: Batch and precision are its.
        machine: What it runs on.
        top: How many.
    """
    search = _Search(shape, machine, top)
    frames = [(search.see(topology, each), topology, each) for topology, each in configurations(shape, world, job)]
    for first, topology, each in sorted(frames, key=lambda frame: frame[0].least):
        if first.least > search.slowest:
            break
        if first.needs <= machine.memory:
            search.try_all(topology, variants(topology, each))
    if not search.found:
        for _, topology, each in sorted(frames, key=lambda frame: frame[0].needs)[:top]:
            search.try_all(topology, variants(topology, each))
    return Ranking(
        best=tuple(search.found),
        nearest=None if search.found else search.nearest,
        frames=len(frames),
    )


@dataclass(frozen=True, kw_only=True)
class _First:
    """What is known of a frame from its first prediction.

    Args:
        least: Seconds that no schedule goes below.
        needs: Bytes likewise.
    """

    least: float
    needs: float


class _Search:
    def __init__(self, shape: Shape, machine: Machine, top: int) -> None:
        self._shape, self._machine, self._top = shape, machine, top
        self._by_topology: dict[str, Prediction] = {}
        self.found: list[Prediction] = []
        self.nearest: Prediction | None = None

    @property
    def slowest(self) -> float:
        """Seconds above which nothing is of use."""
        return self.found[-1].seconds if len(self.found) == self._top else math.inf

    def see(self, topology: Topology, job: Job) -> _First:
        """Bounds of a frame."""
        made = predict(self._shape, topology, replace(job, zero=_last_stage(topology, job)), self._machine)
        seconds, memory = made.busiest.seconds, made.memory
        return _First(
            least=made.seconds - seconds["bubble"] - seconds["data"],
            needs=memory.state + memory.activations / (_LEAST_KEPT if topology.size("pipeline") > 1 else 1),
        )

    def try_all(self, topology: Topology, jobs: Iterable[Job]) -> None:
        """Predicts a frame's variants, and keeps what is good."""
        for job in jobs:
            try:
                made = predict(self._shape, topology, job, self._machine)
            except ValueError:  # a schedule that does not take these sizes
                continue
            if self.nearest is None or made.memory.total < self.nearest.memory.total:
                self.nearest = made
            if made.fits(self._machine):
                self._keep(made)

    def _keep(self, made: Prediction) -> None:
        key = made.topology.to_json()
        if key not in self._by_topology or _order(made) < _order(self._by_topology[key]):
            self._by_topology[key] = made
            self.found = sorted(self._by_topology.values(), key=_order)[: self._top]


def _order(made: Prediction) -> tuple[float, float]:
    return made.seconds, made.memory.total


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return (*small, *(number // each for each in reversed(small) if each * each != number))
