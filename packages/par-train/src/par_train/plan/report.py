"""A ranking in words: a table, why the first is first, and what is wrong with the configured one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .options import Job, Machine
from .predict import MARGIN, TERMS, Prediction
from .search import Ranking
from .shape import Shape, cut_of

_HEAD = ("data", "pipeline", "tensor", "zero", "schedule", "micro", "memory", "traffic", "bubble", "step", "bound by")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a plan says.

    Args:
        shape: The model.
        world: Devices.
        job: Batch and precision.
        machine: What it is planned for.
        configured: What the config says; None if it names no axes.
        ranking: What the search found.
    """

    shape: Shape
    world: int
    job: Job
    machine: Machine
    configured: Prediction | None
    ranking: Ranking

    def text(self) -> str:
        """For people."""
        parts = [self._given()]
        if self.configured is not None:
            parts.append("\n".join(["Configured", *table([self.configured]), *moves(self.configured)]))
        shown = self.ranking.best or ((self.ranking.nearest,) if self.ranking.nearest else ())
        if shown:
            title = "Best of each topology" if self.ranking.best else "Nothing fits; this takes the least memory"
            parts.append("\n".join([title, *table(shown), "Of these the first", *moves(shown[0])]))
        return "\n\n".join([*parts, "\n".join(self.reasons())])

    def reasons(self) -> list[str]:
        """Sentences: why the first is first, and what the configured one lacks."""
        if not self.ranking.best:
            return [*_configured_alone(self.configured, self.machine), *self._remedies()]
        best = self.ranking.best[0]
        said = [
            f"{describe(best)} is fastest: {_seconds(best.seconds)} a step in {sized(best.memory.total)}.",
            _shares(best),
        ]
        if len(self.ranking.best) > 1:
            said.append(f"The next, {describe(self.ranking.best[1])}, {_behind(self.ranking.best[1], best)}")
        return [*said, *self._against(best)]

    def as_dict(self) -> dict[str, Any]:
        """For programs: plain values, bytes and seconds."""
        return {
            "model": {**vars(self.shape), "parameters": self.shape.parameters},
            "world": self.world,
            "batch": self.job.batch,
            "machine": {name: value for name, value in vars(self.machine).items() if name != "gloo"},
            "margin": MARGIN,
            "configured": None if self.configured is None else as_dict(self.configured),
            "best": [as_dict(each) for each in self.ranking.best],
            "nearest": None if self.ranking.nearest is None else as_dict(self.ranking.nearest),
            "reasons": self.reasons(),
        }

    def _given(self) -> str:
        shape, machine = self.shape, self.machine
        return "\n".join(
            [
                f"model    {shape.parameters:.4g} parameters: {shape.layers} layers, width {shape.width}, "
                f"{shape.heads} heads, context {shape.context}, vocabulary {shape.vocabulary}",
                f"job      batch {self.job.batch:,} windows, precision {self.job.precision}, AdamW",
                f"world    {self.world:,} devices of {sized(machine.memory)}, of which {MARGIN:.0%} is left free, "
                f"{machine.devices_per_node} a node; {self.ranking.frames:,} ways to divide it",
                f"machine  {machine.flops:.4g} FLOP/s x {machine.efficiency:g}; {sized(machine.bandwidth)}/s within a "
                f"node, {sized(machine.network)}/s between nodes; {machine.latency * 1e6:g} us an operation",
            ]
        )

    def _against(self, best: Prediction) -> list[str]:
        """The configured one beside the best."""
        mine = self.configured
        if mine is None:
            return []
        if not mine.fits(self.machine):
            return _configured_alone(mine, self.machine)
        if mine.seconds <= best.seconds:
            return ["The configured one is the best there is."]
        return [f"The configured one {_behind(mine, best)}"]

    def _remedies(self) -> list[str]:
        nearest = self.ranking.nearest
        if nearest is None:
            return [
                f"No configuration of {self.world:,} devices divides this model and a batch of {self.job.batch:,}: "
                "change train.batch_size, model.heads, or the number of devices, to multiples of each other."
            ]
        memory = nearest.memory
        said = f"{describe(nearest)} comes nearest, with {_anatomy(nearest)}."
        if memory.state > memory.total / 2:
            return [said, "Most are parameters and the optimizer's state: take more devices, or fewer model.layers."]
        return [said, "Most are activations: shorten model.context, or take more devices to cut them over."]


def table(predictions: Sequence[Prediction]) -> list[str]:
    """One line each, below a line of titles."""
    lines = [_HEAD, *(_cells(each) for each in predictions)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def moves(prediction: Prediction) -> list[str]:
    """What each axis moves in a step, of the busiest rank."""
    return [
        f"  over {move.axis}: {sized(move.bytes)} of {move.what}, {move.operations:,.0f} operation"
        f"{'' if move.operations == 1 else 's'}"
        for move in prediction.busiest.moves
    ]


def describe(prediction: Prediction) -> str:
    """A configuration in words."""
    topology, job = prediction.topology, prediction.job
    axes = [f"{name} {topology.size(name)}" for name in ("data", "pipeline") if topology.size(name) > 1]
    cut = cut_of(topology)
    axes += [f"tensor {cut.label}"] if cut.ranks > 1 else []
    words = [" x ".join(axes) or "one device", f"zero {job.zero}"]
    words += [job.schedule] if topology.size("pipeline") > 1 else []
    words += [f"{job.microbatches} microbatches"] if job.microbatches > 1 else []
    return ", ".join(words)


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """Plain values; `parallel` as a config writes it."""
    topology, job, busiest = prediction.topology, prediction.job, prediction.busiest
    mode, options = topology.modes.get("tensor", (None, {}))
    tensor = {"tensor": {"size": topology.size("tensor"), "mode": mode, **options}} if mode else {}
    return {
        "parallel": {"data": topology.size("data"), "pipeline": topology.size("pipeline"), **tensor},
        "zero": job.zero,
        "precision": job.precision,
        "pipeline": {"schedule": job.schedule, "microbatches": job.microbatches},
        "memory": {**vars(prediction.memory), "total": prediction.memory.total},
        "traffic": [vars(move) for move in busiest.moves],
        "bubble": prediction.bubble,
        "seconds": {**busiest.seconds, "total": prediction.seconds},
        "bound": prediction.bound,
    }


def _cells(prediction: Prediction) -> tuple[str, ...]:
    topology, job = prediction.topology, prediction.job
    return (
        str(topology.size("data")),
        str(topology.size("pipeline")),
        cut_of(topology).label,
        str(job.zero),
        job.schedule if topology.size("pipeline") > 1 else "-",
        str(job.microbatches),
        sized(prediction.memory.total),
        sized(sum(prediction.traffic.values())),
        f"{prediction.bubble:.1%}",
        _seconds(prediction.seconds),
        prediction.bound,
    )


def _shares(prediction: Prediction) -> str:
    """Where the time goes."""
    seconds, total = prediction.busiest.seconds, prediction.seconds
    shares = ", ".join(f"{term} {seconds[term] / total:.1%}" for term in TERMS if seconds[term] >= 5e-4 * total)
    others = [term for term in TERMS if term != "compute"]
    lost = max(others, key=lambda term: seconds[term])
    end = f"; beside computing, most goes to {_LONG[lost]}" if seconds[lost] > 0 else ""
    return f"Its time is {shares}. The limit is {_LONG[prediction.bound]}{end if prediction.bound != lost else ''}."


_LONG = {
    "compute": "arithmetic",
    "tensor": "what tensor ranks send each other",
    "pipeline": "what pipeline stages send each other",
    "bubble": "waiting in the pipeline",
    "data": "gradients and parameters that replicas exchange",
}


def _behind(prediction: Prediction, best: Prediction) -> str:
    """By how much one is slower, and by what most."""
    mine, its = prediction.busiest.seconds, best.busiest.seconds
    most = max(TERMS, key=lambda term: mine[term] - its[term])
    more = prediction.seconds / best.seconds - 1
    if mine[most] <= its[most]:
        return "takes as long."
    return f"takes {more:.1%} longer: {_seconds(mine[most] - its[most])} more for {_LONG[most]}."


def _configured_alone(mine: Prediction | None, machine: Machine) -> list[str]:
    if mine is None or mine.fits(machine):
        return []
    room = sized((1 - MARGIN) * machine.memory)
    return [f"The configured one does not fit into {room}: it needs {_anatomy(mine)}."]


def _anatomy(prediction: Prediction) -> str:
    memory = prediction.memory
    return (
        f"{sized(memory.total)} ({sized(memory.parameters)} parameters, {sized(memory.gradients)} gradients, "
        f"{sized(memory.optimizer)} optimizer, {sized(memory.buffers)} buffers, "
        f"{sized(memory.activations)} activations)"
    )


def sized(count: float) -> str:
    """Such as 12.5 GB."""
    power = min(5, max(0, int(math.log10(max(1, count)) // 3)))
    value = count / 1000**power
    return f"{value:,.{0 if value >= 100 or not power else 1}f} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def _seconds(count: float) -> str:
    if count >= 1:
        return f"{count:,.{0 if count >= 1000 else 2}f} s"
    return f"{count * 1e3:.1f} ms" if count >= 1e-3 else f"{count * 1e6:.1f} us"
