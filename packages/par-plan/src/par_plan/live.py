"""Plans of models that a program has built already, without communication."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn
from torch.optim import Optimizer

from par_groups import Topology, format_bytes
from par_pipeline import Schedule, simulate
from par_zero import ChunkSize, ShardOptions, buffer_elements, chunk_sizes

from .budget.plan import Budget, BudgetPlan, place_within
from .costs.memory import MemoryUse, ZeroSharding, added, sources_of, state_memory
from .costs.traffic import AxisTraffic, data_traffic, over
from .experts.spread import expert_placement
from .inputs import Machine, TrainingJob
from .models.protocol import PlannedModel
from .prediction import predict
from .shape import averaged_ranks


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Elements of a model on one rank before data ranks shard it, with the padding of its chunks.

    Args:
        trained: Elements of each chunk that is reduced as one.
        frozen: Elements that are not trained.
        root: Elements that stay gathered from the beginning of forward to the end of backward, at stage 3.
        units: Elements of each other unit, at stage 3.
        inflight: Maximum number of chunks whose reduction is in flight.
        kept: Number of buffers of chunks that stay between backward passes.
        waiting: Number of chunks that may wait for a later chunk of their unit at stage 3, before ranks have agreed on
            an order in the first steps.
        tensors: Param group of each tensor that the optimizer will have, by number.
        beside: Size of the tensors in no chunk, such as buffers of the model, in bytes.
        experts: Sizes of the experts, which a different set of ranks shards. `root` and `units` count them as well.
            None: no experts.
        chunks: All chunks in the order of their reduction, if `experts` is set.
    """

    trained: tuple[int, ...]
    frozen: int = 0
    root: int = 0
    units: tuple[int, ...] = ()
    inflight: int = 2
    kept: int = 2
    waiting: int = 0
    tensors: tuple[int, ...] = ()
    beside: int = 0
    experts: "ModelSizes | None" = None
    chunks: tuple[ChunkSize, ...] = ()

    @property
    def parts(self) -> tuple["ModelSizes", ...]:
        """Parts with different shard groups: all data ranks, then experts."""
        return (self,) if self.experts is None else (self, self.experts)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(self.trained) + self.frozen

    @property
    def largest(self) -> int:
        """Elements of the largest part that lies in one tier: a chunk, or a unit."""
        return max((*self.trained, self.root, *self.units), default=0)

    @property
    def at_once(self) -> int:
        """Elements of the two gathered units other than the root at stage 3: the running and the prefetched unit."""
        return sum(sorted(self.units, reverse=True)[:2])


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
) -> ModelSizes:
    """Return the sizes of a built model, in the chunks that par-zero will use.

    Args:
        model: Slice of the model on this rank.
        optimizer: Optimizer of the model; None: the model is not trained.
        stage: ZeRO stage.
        ranks: Number of data-parallel ranks.
        options: Options of `par_zero.shard`. None: its defaults.
        experts: Parameters of experts, and the number of the data-parallel ranks that shard them; None: no experts.
    """
    options = options or ShardOptions()
    shares = [experts] if experts[0] else []
    every = chunk_sizes(model, optimizer, stage=stage, ranks=ranks, options=options, expert_groups=shares)
    sizes = _sizes([chunk for chunk in every if not chunk.share], stage, options)
    if shares:
        apart, whole = _sizes([chunk for chunk in every if chunk.share], stage, options), _sizes(every, stage, options)
        sizes = replace(
            sizes,
            root=whole.root,
            units=whole.units,
            inflight=options.overlap.inflight or len(whole.trained),
            experts=replace(apart, root=0, units=()),
            chunks=tuple(sorted(every, key=lambda chunk: stage == 3 and chunk.unit == 0)),
        )
    frozen = sizes.frozen
    if stage < 3:  # where they lie in no chunk
        groups = [] if optimizer is None else optimizer.param_groups
        stepped = {id(each) for group in groups for each in group["params"]}
        others = (each for each in model.parameters() if id(each) not in stepped)
        frozen += sum(each.numel() for each in others if groups or not each.requires_grad)
    return replace(sizes, frozen=frozen, beside=sum(each.nbytes for each in model.buffers()))


def _sizes(chunks: Sequence[ChunkSize], stage: int, options: ShardOptions) -> ModelSizes:
    """Return the sizes of some chunks."""
    trained = tuple(chunk.elements for chunk in chunks if chunk.trained)
    frozen = sum(chunk.elements for chunk in chunks if not chunk.trained)
    # Unit 0 is the root, which may have no chunk of its own.
    units: dict[int, int] = {0: 0}
    for chunk in chunks if stage == 3 else ():
        units[chunk.unit] = units.get(chunk.unit, 0) + chunk.elements
    return ModelSizes(
        trained=trained,
        frozen=frozen,
        root=units.pop(0),
        units=tuple(units.values()),
        inflight=options.overlap.inflight or 2,
        kept=options.overlap.inflight or 2,
        waiting=max(Counter(chunk.unit for chunk in chunks if chunk.trained).values(), default=1) - 1
        if stage == 3
        else 0,
        tensors=tuple(group for chunk in chunks for group in chunk.groups),
    )


def sharding_of_sizes(
    sizes: ModelSizes, elements: int, *, ranks: int, job: TrainingJob, gloo: bool = False
) -> ZeroSharding:
    """Return how data ranks shard a module, from its parameters only.

    Args:
        sizes: Sizes of the module.
        elements: Number of the module's elements whose gradients are reduced.
        ranks: Number of data-parallel ranks.
        job: Training job; its ZeRO stage, precision and microbatches determine the result.
        gloo: Whether a reduce-scatter needs a receive buffer as large as its input. Default: False.
    """
    reduced = buffer_elements(sizes.trained, sizes.inflight)
    return ZeroSharding(
        zero=job.zero,
        ranks=ranks,
        accumulates=job.microbatches > 1,
        gloo=gloo,
        elements=elements,
        chunk=max(sizes.trained, default=0),
        chunks=len(sizes.trained),
        gathered=sizes.root + sizes.at_once,
        stays=0,
        reduced=reduced,
        waiting=buffer_elements(sizes.trained, sizes.inflight + sizes.waiting) - reduced,
    )


def plan_models(
    models: Sequence[ModelSizes], topology: Topology, job: TrainingJob, schedule: Schedule | None, *, gloo: bool
) -> StepPlan:
    """Return the plan of models that share their options.

    Args:
        models: Sizes of each model on this rank.
        topology: The strategy's axes.
        job: The job, of which ZeRO stage, precision and microbatches matter here.
        schedule: The pipeline's schedule, if there is a pipeline.
        gloo: Whether a reduce-scatter receives as much as it sends.
    """
    spread, made = expert_placement(topology), partial(sharding_of_sizes, job=job, gloo=gloo)
    memory: list[MemoryUse] = []
    transfers: list[AxisTraffic] = []
    for sizes in models:
        each = [made(sizes, sizes.parameters, ranks=averaged_ranks(topology))]
        if sizes.experts is not None:
            copies = topology.size("data") * spread.copies
            each.append(made(sizes.experts, sizes.experts.parameters, ranks=copies))
            each = _reduced_in_turn(sizes, each)
        all_else, *experts = each
        memory.append(added([state_memory(one, job.numbers) for one in (all_else, *experts)]))
        transfers += data_traffic(all_else, job.numbers)
        transfers += [
            transfer
            for one in experts
            for transfer in data_traffic(one, job.numbers, "expert_data", flags=spread.reaches)
        ]
    return StepPlan(
        memory=tuple(memory),
        transfers=tuple(transfers),
        bubble=None if schedule is None else simulate(schedule).bubble,
        topology=topology,
    )


def plan_budget(
    sizes: ModelSizes, budget: Budget, *, slots: int, ranks: Sequence[int], job: TrainingJob, gloo: bool, measures: bool
) -> BudgetPlan:
    """Return what to offload within a budget, from a model's parameters only.

    Args:
        sizes: Sizes of the model on this rank.
        budget: Bytes of each tier.
        slots: Tensors of the optimizer's state for each parameter.
        ranks: Number of ranks that share each of its parts.
        job: The job, of which ZeRO stage, precision and microbatches matter here.
        gloo: Whether it computes on a CPU.
        measures: Whether the first step will be measured.

    Raises:
        TooSmallError: A tier is too small.
    """
    weight, parts, sharded = job.numbers.weight, sizes.parts, job.zero == 3
    each = [
        sharding_of_sizes(part, sum(part.trained), ranks=count, job=job, gloo=gloo)
        for part, count in zip(parts, ranks, strict=True)
    ]
    if sizes.experts is not None:
        each = _reduced_in_turn(sizes, each)
    memory = added([state_memory(one, job.numbers, slots) for one in each])
    frozen = sum(part.frozen / (one.ranks if sharded else 1) for part, one in zip(parts, each, strict=True))
    shares = memory.parameters + frozen * weight
    kinds = {"parameters": shares + sizes.beside}
    buffers = memory.buffers + memory.arriving
    if sharded and each[0].accumulates:
        buffers -= sum(one.elements for one in each) * weight
        kinds["gathered"] = sum(part.parameters for part in parts) * weight
    elif sharded:
        buffers -= sum(one.gathered for one in each) * weight
        kinds["the root's unit"] = sizes.root * weight
        # The running and the prefetched unit are gathered at the same time.
        kinds["two units" if len(sizes.units) > 1 else "one unit"] = sizes.at_once * weight
    kinds |= {"gradients": memory.gradients, "optimizer": memory.optimizer, "buffers": buffers}
    step = max(0.0, memory.step + memory.kept - memory.buffers - memory.arriving)
    state, *units = sources_of(each, job.numbers, slots)
    largest = max((chunk.elements / each[chunk.share].ranks for chunk in sizes.chunks), default=0)
    grain = (largest or sizes.largest / each[0].ranks) * weight
    sources = [state]  # and parameters, with those that are frozen
    # An accelerator fetches parameters from its host only.
    takes = {"host": shares, "disk": shares if gloo else math.inf}
    sources += [replace(one, frees=shares, takes=takes, grain=grain) for one in units]
    return place_within(kinds, sources, budget, measures=measures, step=step)


def _reduced_in_turn(sizes: ModelSizes, replicas: Sequence[ZeroSharding]) -> list[ZeroSharding]:
    """Return the shardings of dense layers and experts, whose chunks share one order and the same buffers.

    At stage 3, chunks of a unit wait until backward has finished the unit, and the root's chunks until backward ends.
    At stage 2 any may wait for its turn, until ranks have learned in which order they come.

    Args:
        sizes: The sizes of all chunks.
        replicas: Sharding of each part, computed separately.
    """
    trained, zero = [chunk for chunk in sizes.chunks if chunk.trained], replicas[0].zero
    waiting = len(trained)
    if zero == 3:
        of_units = Counter(chunk.unit for chunk in trained)
        waiting = of_units.pop(0, 0) + max(of_units.values(), default=1) - 1
    lent = partial(buffer_elements, kept=sizes.kept)
    received = lent([chunk.elements for chunk in trained if replicas[chunk.share].received], sizes.inflight)
    whole = lent([chunk.elements for chunk in trained], sizes.inflight + waiting)
    lends = max(replicas, key=lambda one: one.received)  # has the least to share with
    return [
        replace(one, reduced=received, waiting=whole - received) if one is lends else replace(one, reduced=0, waiting=0)
        for one in replicas
    ]


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
