"""What the models of a strategy take on this rank, by the formulas of the planner. No process is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from par_groups import Topology
from par_pipeline import Schedule, simulate

from .._units import format_bytes
from ..memory.budget import Budget, Spent, choose
from .inputs import Job, Machine
from .memory import BUCKET, Memory, optimizer_away, parameters_away, state_memory
from .model import PlannedModel
from .predict import predict, predict_parameters, replicas_of_parameters
from .shape import sequence_ranks
from .traffic import Move, over


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a rank has of a model, before data ranks share it.

    Args:
        parameters: Number of elements in its parameters.
        largest: Number of elements in the largest part that is reduced, or gathered, as one.
    """

    parameters: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """What a step takes; printed, a table.

    Activations depend on the batch: of models that were initialized they are not in it, of a whole model they are.

    Args:
        memory: Bytes on this rank, for each model in the order of `initialize`.
        moves: What this rank receives in a step: for initialized models over the data axis, for a whole one over all.
        bubble: The part of a step in which a pipeline rank waits, if forward, input gradient and weight gradient take
            the same time; None without a pipeline.
        topology: The strategy's axes.
    """

    memory: tuple[Memory, ...]
    moves: tuple[Move, ...]
    bubble: float | None
    topology: Topology

    def __str__(self) -> str:
        kinds = ["parameters", "gradients", "optimizer", "buffers", "total"]
        kinds[-1:-1] = [
            kind for kind in ("activations", "logits", "attention") if any(vars(each)[kind] for each in self.memory)
        ]
        rows: list[tuple[object, ...]] = [("model", *kinds)]
        for number, memory in enumerate(self.memory):
            rows.append((number, *(format_bytes(getattr(memory, kind)) for kind in kinds)))
        lines = ["".join(f"{cell:>12}" for cell in row) for row in rows]
        for move in self.moves:
            axes, received = over(move, self.topology), format_bytes(move.bytes)
            lines.append(f"{axes}: {move.what}, {move.operations:g} operations, {received} a step")
        if self.bubble is not None:
            lines.append(f"bubble of the pipeline: {self.bubble:.1%}")
        return "\n".join(lines)


def sizes_of(model: nn.Module, stage: int, bucket: int = BUCKET) -> Sizes:
    """The sizes of a model whose parameters have been made.

    Args:
        model: What this rank has of the model.
        stage: ZeRO stage; at stage 3 par-zero gathers items of lists, such as transformer blocks, as one.
        bucket: Bytes of parameters that are reduced as one.
    """
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    largest = max((parameter.numel() for parameter in parameters), default=0)
    if stage == 3:
        for module in model.modules():
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                for item in module.children():
                    largest = max(largest, sum(parameter.numel() for parameter in item.parameters()))
    elements = bucket // parameters[0].element_size() if parameters else bucket
    return Sizes(parameters=total, largest=min(total, max(largest, elements)))


def plan_of(
    models: Sequence[Sizes], topology: Topology, job: Job, schedule: Schedule | None, *, gloo: bool
) -> StrategyPlan:
    """The plan of models that are trained alike.

    Args:
        models: What this rank has of each model.
        topology: The strategy's axes.
        job: The job, of which ZeRO stage, precision and microbatches matter here.
        schedule: The pipeline's schedule, if there is a pipeline.
        gloo: Whether a reduce-scatter receives as much as it sends.
    """
    ranks = topology.size("data") * sequence_ranks(topology)
    predicted = [
        predict_parameters(sizes.parameters, sizes.largest, ranks=ranks, job=job, gloo=gloo) for sizes in models
    ]
    return StrategyPlan(
        memory=tuple(memory for memory, _ in predicted),
        moves=tuple(move for _, moves in predicted for move in moves),
        bubble=None if schedule is None else simulate(schedule).bubble,
        topology=topology,
    )


def spent_on(
    sizes: Sizes, budget: Budget, *, frozen: int, slots: int, ranks: int, job: Job, gloo: bool, measures: bool
) -> Spent:
    """What a budget is spent on, of a model of which its parameters alone are known.

    Args:
        sizes: Its parameters that are trained.
        budget: Bytes of each tier.
        frozen: Number of elements in its other parameters.
        slots: Tensors of the optimizer's state for each parameter.
        ranks: Number of ranks that share.
        job: The job, of which ZeRO stage, precision and microbatches matter here.
        gloo: Whether it computes on a CPU.
        measures: Whether the first step will be measured.

    Raises:
        TooSmallError: A tier is too small.
    """
    replicas = replicas_of_parameters(sizes.parameters, sizes.largest, ranks=ranks, job=job, gloo=gloo)
    memory, weight, total = state_memory(replicas, job.numbers, slots), job.numbers.weight, sizes.parameters + frozen
    kinds = {"parameters": memory.parameters + frozen * weight / (ranks if job.zero == 3 else 1)}
    buffers = memory.buffers
    if job.zero == 3:
        buffers -= (sizes.parameters if replicas.accumulates else replicas.gathered) * weight
        name, gathered = ("gathered", total) if replicas.accumulates else ("two units", min(total, 2 * sizes.largest))
        kinds[name] = gathered * weight
    kinds |= {"gradients": memory.gradients, "optimizer": memory.optimizer, "buffers": buffers}
    sources = [optimizer_away(replicas, job.numbers, slots)]
    if (units := parameters_away(replicas, job.numbers)) is not None:
        frees = kinds["parameters"]  # with those that are frozen
        takes = dict.fromkeys(units.takes, frees)
        sources.append(replace(units, frees=frees, takes=takes, grain=sizes.largest * weight / ranks))
    return choose(kinds, sources, budget, measures=measures)


def plan_of_whole(shape: PlannedModel, topology: Topology, job: Job, *, rank: int, gloo: bool) -> StrategyPlan:
    """The plan of one model that is still whole, as it will be cut.

    Args:
        shape: The model.
        topology: The topology of the strategy.
        job: The job.
        rank: This rank's place in its pipeline.
        gloo: Whether a reduce-scatter receives as much as it sends.

    Raises:
        ValueError: The model cannot be cut so, or the batch does not divide.
    """
    made = predict(shape, topology, job, Machine(gloo=gloo))
    mine = next(each for each in made.ranks if rank in each.numbers)
    has_stages = topology.size("pipeline") > 1
    bubble = made.bubble if has_stages else None
    return StrategyPlan(memory=(mine.memory,), moves=mine.moves, bubble=bubble, topology=topology)
