"""What a strategy's models take on this rank, by the formulas of the planner, without a look at a process."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from par_pipeline import Schedule, simulate

from .._units import format_bytes
from .inputs import Job
from .memory import BUCKET, Memory
from .predict import predict_parameters
from .traffic import Move


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a rank has of a model, before it is shared out over data ranks.

    Args:
        parameters: Elements.
        largest: Elements of the largest part that is reduced, or gathered, as one.
    """

    parameters: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """What a step takes; printed, a table. Activations depend on the batch and are not in it: see `par-train plan`.

    Args:
        memory: Bytes on this rank, for each model in the order of `initialize`.
        moves: What this rank receives over the data axis in a step.
        bubble: The part of time that a pipeline rank waits, if forward, input gradient and weight gradient take the
            same time; None without a pipeline.
    """

    memory: tuple[Memory, ...]
    moves: tuple[Move, ...]
    bubble: float | None

    def __str__(self) -> str:
        kinds = ("parameters", "gradients", "optimizer", "buffers")
        lines = ["".join(f"{word:>12}" for word in ("model", *kinds, "total"))]
        for number, each in enumerate(self.memory):
            cells = [*(format_bytes(getattr(each, kind)) for kind in kinds), format_bytes(each.total)]
            lines.append("".join(f"{cell:>12}" for cell in (number, *cells)))
        lines += [
            f"{move.axis}: {move.what}, {move.operations:g} operations, {format_bytes(move.bytes)} a step"
            for move in self.moves
        ]
        return "\n".join(lines + ([] if self.bubble is None else [f"bubble of the pipeline: {self.bubble:.1%}"]))


def sizes_of(model: nn.Module, stage: int) -> Sizes:
    """The sizes of a model whose parameters are there."""
    parameters = list(model.parameters())
    counts = [each.numel() for each in parameters]
    largest = max(counts, default=0)
    if stage == 3:
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.ModuleDict | nn.Sequential)]
        items = [sum(p.numel() for p in item.parameters()) for each in lists for item in each.children()]
        largest = max([largest, *items])
    width = parameters[0].element_size() if parameters else 1
    return Sizes(
        parameters=sum(counts),
        largest=min(sum(counts), max(largest, BUCKET // width)),
    )


def plan_of(models: Sequence[Sizes], job: Job, schedule: Schedule | None, *, ranks: int, gloo: bool) -> StrategyPlan:
    """The plan of models that are trained alike.

    Args:
        models: What this rank has of each.
        job: Stage, precision and microbatches are looked at.
        schedule: Of the pipeline, if there is one.
        ranks: Data ranks.
        gloo: Whether a reduce-scatter receives as much as it sends.
    """
    found = [predict_parameters(each.parameters, each.largest, ranks=ranks, job=job, gloo=gloo) for each in models]
    return StrategyPlan(
        memory=tuple(memory for memory, _ in found),
        moves=tuple(move for _, moves in found for move in moves),
        bubble=None if schedule is None else simulate(schedule).bubble,
    )
