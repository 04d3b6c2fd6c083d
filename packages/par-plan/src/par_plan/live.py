"""Plans of models that a program has built already, without communication. par-zero predicts their bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from par_groups import Topology, format_bytes
from par_pipeline import Schedule, simulate
from par_zero import ChunkBytes, PredictedStep, ShardOptions, ZeroProgram, predict_step

from .budget.plan import Budget, BudgetPlan, place_within
from .budget.tiers import Offloadable
from .costs.memory import MemoryUse, optimizer_offloaded
from .costs.traffic import AxisTraffic, flags_traffic, over
from .experts.spread import expert_placement
from .inputs import Machine, TrainingJob
from .models.protocol import PlannedModel
from .prediction import predict

_BACKWARD = ("gather", "F", "B", "C", "zero", "scatter", "reduce", "sum")
"""Entries of a program while activations exist."""

_AFTER_BACKWARD = ("release", "cast")
"""Entries with most bytes when activations are free."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Memory of a model on one rank, as its data ranks will shard it.

    Args:
        step: Step that par-zero predicts.
        ranks: Number of ranks of each data-parallel group: all data ranks, then those of experts, if any.
        beside: Size of the model's buffers, in bytes.
    """

    step: PredictedStep
    ranks: tuple[int, ...]
    beside: int = 0

    @property
    def gradients(self) -> int:
        """Size of the reduced gradients, in bytes."""
        program = self.step.program
        return sum(each.shard if program.shards_gradients else each.gradient for each in _trained(program))

    def memory_of(self, program: ZeroProgram) -> MemoryUse:
        """Return the memory at the peak of a step, without activations.

        Args:
            program: Program of the step.
        """
        backward, after = (sum(program.peak(*ops).values()) for ops in (_BACKWARD, _AFTER_BACKWARD))
        return MemoryUse(
            parameters=self.step.parameters,
            gradients=self.gradients,
            optimizer=self.step.optimizer,
            buffers=backward - self.gradients,
            step=after - self.gradients,
        )


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Memory and traffic of a step. Its text is a table.

    Activations depend on the batch. Plans of an unsharded model include them, plans of initialized models do not.

    Args:
        memory: Bytes on this rank, for each model in the order of `initialize`.
        transfers: Traffic that this rank receives in a step: over the data axis for models that were initialized, over
            all axes for an unsharded model.
        bubble: The part of a step in which a pipeline rank waits, if forward, input gradient and weight gradient take
            the same time; None without a pipeline.
        topology: The strategy's axes.
    """

    memory: tuple[MemoryUse, ...]
    transfers: tuple[AxisTraffic, ...]
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
        for transfer in self.transfers:
            axes, received = over(transfer, self.topology), format_bytes(transfer.bytes)
            lines.append(f"{axes}: {transfer.what}, {transfer.operations:g} operations, {received} a step")
        if self.bubble is not None:
            lines.append(f"bubble of the pipeline: {self.bubble:.1%}")
        return "\n".join(lines)


def model_sizes(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    stage: int,
    ranks: int,
    options: ShardOptions | None = None,
    experts: tuple[Sequence[nn.Parameter], int] = ((), 1),
    gloo: bool = False,
    microbatches: int = 1,
) -> ModelSizes:
    """Return the sizes of a built model, in the chunks that par-zero will use.

    Args:
        model: Slice of the model on this rank.
        optimizer: Optimizer of the model; None: the model is not trained.
        stage: ZeRO stage.
        ranks: Number of data-parallel ranks.
        options: Options of `par_zero.shard`. None: its defaults.
        experts: Parameters of experts, and the number of the data-parallel ranks that shard them; None: no experts.
        gloo: Whether a reduce-scatter receives as much as it sends. Default: False.
        microbatches: Number of microbatches, of which only the last one reduces gradients. Default: 1.
    """
    groups = [experts] if experts[0] else []
    step = predict_step(
        model,
        optimizer,
        stage=stage,
        ranks=ranks,
        options=options,
        expert_groups=groups,
        gloo=gloo,
        microbatches=min(2, microbatches),  # any more passes under `no_sync` take no more memory
        no_sync=True,
    )
    counts = (ranks, *(count for _, count in groups))
    return ModelSizes(step=step, ranks=counts, beside=sum(each.nbytes for each in model.buffers()))


def plan_models(
    models: Sequence[ModelSizes], topology: Topology, job: TrainingJob, schedule: Schedule | None
) -> StepPlan:
    """Return the plan of models that share their options.

    Args:
        models: Sizes of each model on this rank.
        topology: The strategy's axes.
        job: The job, of which only the ZeRO stage matters here.
        schedule: The pipeline's schedule, if there is a pipeline.
    """
    return StepPlan(
        memory=tuple(sizes.memory_of(sizes.step.program) for sizes in models),
        transfers=tuple(each for sizes in models for each in _transfers(sizes, topology, job.zero)),
        bubble=None if schedule is None else simulate(schedule).bubble,
        topology=topology,
    )


def _transfers(sizes: ModelSizes, topology: Topology, zero: int) -> list[AxisTraffic]:
    """Return the gradients and parameters that a rank receives from its data ranks, as the program moves them."""
    program, found = sizes.step.program, list[AxisTraffic]()
    for share, (axis, ranks) in enumerate(zip(("data", "expert_data"), sizes.ranks, strict=False)):
        chunks = {name: chunk for name, chunk in program.chunks.items() if chunk.share == share}
        if ranks == 1 or not chunks:
            continue
        reduced = [chunks[of].gradient for op, of in program.entries if op in ("scatter", "reduce") and of in chunks]
        # A gather is of a unit at stage 3, and of a chunk below.
        gathered = [
            chunk.full
            for op, of in program.entries
            if op == "gather"
            for name, chunk in chunks.items()
            if of == (chunk.unit or name)
        ]
        part = (ranks - 1) / ranks
        times = part if zero else 2 * part  # an all-reduce receives what a reduce-scatter and an all-gather do
        found.append(AxisTraffic(axis=axis, what="gradients", operations=len(reduced), bytes=sum(reduced) * times))
        if not share or expert_placement(topology).reaches:
            found.append(flags_traffic(ranks, axis))
        if gathered:
            found.append(
                AxisTraffic(axis=axis, what="parameters", operations=len(gathered), bytes=sum(gathered) * part)
            )
    return found


def plan_budget(sizes: ModelSizes, budget: Budget, *, job: TrainingJob, gloo: bool, measures: bool) -> BudgetPlan:
    """Return what to offload within a budget, from a model's parameters only.

    Args:
        sizes: Sizes of the model on this rank.
        budget: Bytes of each tier.
        job: Training job; only its ZeRO stage, precision and microbatches have an effect.
        gloo: Whether the ranks compute on CPUs.
        measures: Whether the first step will be measured.

    Raises:
        TooSmallError: A tier is too small.
    """
    step, sharded, numbers = sizes.step, job.zero == 3, job.numbers
    memory = max((sizes.memory_of(program) for program in step.first), key=lambda memory: memory.total)
    kinds = {"parameters": memory.parameters}
    peaks = [program.peak(*_BACKWARD) for program in step.first]
    fullest = max(peaks, key=lambda held: sum(held.values()))
    if sharded:
        kinds["units"] = fullest["units"]
    # A tensor of the optimizer becomes one in each tier, each with counts that stay on the device.
    counts = (step.optimizer - step.movable) * (bool(budget.host) + bool(budget.disk))
    buffers = memory.buffers - kinds.get("units", 0)
    kinds |= {"gradients": memory.gradients, "optimizer": memory.optimizer + counts, "buffers": buffers}
    own = sum(each.full / (sizes.ranks[each.share] if job.zero else 1) for each in _trained(step.program))
    sources = [
        optimizer_offloaded(
            step.movable,
            copies=own * numbers.master / numbers.weight,
            gradients=own * numbers.gradient / numbers.weight,
            numbers=numbers,
            zero=job.zero,
            gloo=gloo,
        )
    ]
    # While gradients accumulate, full parameters stay, and nothing is gained.
    if sharded and job.microbatches == 1:
        shares = step.parameters - sizes.beside
        grain = max((each.full / sizes.ranks[each.share] for each in step.program.chunks.values()), default=0)
        # An accelerator fetches parameters from its host only.
        takes = {"host": shares, "disk": shares if gloo else math.inf}
        sources.append(Offloadable(name="parameters", frees=shares, takes=takes, grain=grain))
    beyond = max(0.0, memory.step - memory.buffers)
    spent = place_within(kinds, sources, budget, measures=measures, step=beyond)
    # In the first step, a unit is gathered only when the unit before it is freed.
    spent = replace(spent, later=float(sum(fullest.values()) - sum(peaks[0].values())))
    away, fetched = (spent.shares.part(name) for name in ("optimizer", "parameters"))
    if gloo or not away:
        return spent
    # Only what the device keeps is copied back to it. Each unit on the host is fetched for forward and for backward.
    out, into = own * away * numbers.gradient / numbers.weight, own * (max(0.0, away - fetched) + 2 * fetched)
    link = f"link: a step copies {format_bytes(out)} to the host and {format_bytes(into)} to the device."
    return replace(spent, reasons=(*spent.reasons[:-1], link, spent.reasons[-1]))


def _trained(program: ZeroProgram) -> list[ChunkBytes]:
    return [chunk for chunk in program.chunks.values() if chunk.gradient]


def plan_unsharded_model(
    shape: PlannedModel, topology: Topology, job: TrainingJob, *, rank: int, gloo: bool
) -> StepPlan:
    """Return the plan of an unsharded model, as the topology will shard it.

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
    return StepPlan(memory=(mine.memory,), transfers=mine.transfers, bubble=bubble, topology=topology)
