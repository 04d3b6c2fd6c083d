"""Memory, traffic, bubble and time of one configuration, from formulas only.

Memory is that of the pipeline rank that needs most. Traffic is that of the busiest rank. Time is the sum of compute,
recompute, tensor, sequence, experts, pipeline, bubble, data and offload. Terms of communication count only the part
that does not overlap with computation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from par_groups import Topology

from .budget.tiers import Offloadable
from .costs.memory import (
    MemoryUse,
    ZeroSharding,
    added,
    share_buffers,
    sources_of,
    state_memory,
    with_offload,
    zero_sharding,
)
from .costs.pipeline import PipelineCost, PipelineRank, pipeline_cost
from .costs.sequence import RankAttention, SequenceSplit, local_tokens, reach, sequence_split, sequence_traffic
from .costs.traffic import AxisTraffic, data_traffic, exchange_traffic, pipeline_traffic
from .experts.costs import ExpertWork, expert_work
from .experts.spread import why_not_placed
from .inputs import Machine, NumberWidths, TrainingJob
from .models.gpt import GPTPlan
from .models.protocol import PlannedModel
from .seconds import OffloadedState, interconnect, seconds_of, seconds_within
from .shape import ModelSlice, Shape, TensorSplit, averaged_ranks, tensor_split

MARGIN = 0.1
"""Fraction of device memory that is reserved for workspace, fragmentation and libraries."""


@dataclass(frozen=True, kw_only=True)
class RankPrediction:
    """Prediction of a step for one pipeline rank. Without a pipeline, it holds for every rank.

    Args:
        place: Position of the rank in the pipeline: "first", "middle" or "last".
        parameters: Number of elements in the rank's parameters.
        memory: Bytes of memory that the rank needs.
        transfers: Traffic that the rank receives, by axis.
        seconds: Seconds of each part of a step, by the names in `TERMS`.
        numbers: Numbers of the pipeline ranks for which this prediction holds.
        sources: State that can be offloaded: the optimizer's state, and at stage 3 parameters.
        experts: Cost of the rank's layers of experts. None: the model has no experts.
    """

    place: str
    parameters: int
    memory: MemoryUse
    transfers: tuple[AxisTraffic, ...]
    seconds: Mapping[str, float]
    numbers: tuple[int, ...] = (0,)
    sources: tuple[Offloadable, ...] = ()
    experts: ExpertWork | None = None


def _rounded_up(room: float) -> float:
    """Return a limit with a tolerance for rounding, so that an exact fit does not exceed it."""
    return room * (1 + 1e-9) + 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction of a step under one configuration.

    Args:
        topology: Topology of the ranks.
        job: Training job.
        bubble: Fraction of a step's time in which a pipeline rank waits, from 0 to 1.
        ranks: Predictions for the first and the last rank of the pipeline, and for each kind of rank between them.
    """

    topology: Topology
    job: TrainingJob
    bubble: float
    ranks: tuple[RankPrediction, ...]

    @property
    def memory(self) -> MemoryUse:
        """The memory of the rank that needs most."""
        return max((rank.memory for rank in self.ranks), key=lambda memory: memory.total)

    @property
    def busiest(self) -> RankPrediction:
        """The slowest rank."""
        return max(self.ranks, key=lambda rank: sum(rank.seconds.values()))

    @property
    def traffic(self) -> Mapping[str, float]:
        """Bytes that the busiest rank receives in a step, by axis; "data" are all ranks that average gradients."""
        transfers = self.busiest.transfers
        axes = dict.fromkeys(("data", "pipeline", "sequence", "tensor", *(transfer.axis for transfer in transfers)))
        return {axis: sum(transfer.bytes for transfer in transfers if transfer.axis == axis) for axis in axes}

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.busiest.seconds.values())

    @property
    def bound(self) -> str:
        """The largest term of the time, a name in `TERMS`."""
        seconds = self.busiest.seconds
        return max(seconds, key=lambda term: seconds[term])

    def fits(self, machine: Machine) -> bool:
        """Return whether the configuration fits on device, host and disk, with the reserved margins."""
        rooms = machine.offload_capacity(self.topology.world_size)
        return (
            all(rank.memory.total <= _rounded_up((1 - MARGIN) * machine.memory) for rank in self.ranks)
            and max(rank.memory.host for rank in self.ranks) <= _rounded_up(rooms["host"])
            and max(rank.memory.disk for rank in self.ranks) <= _rounded_up(rooms["disk"])
        )

    def binds(self, machine: Machine) -> str:
        """Return the tier that makes the step slower: "device", "host", or "" for neither."""
        job = self.job
        # Only a full host sends state on to the slower disk.
        if (job.disk or job.parameters_disk) and machine.tiers.host_memory:
            return "host"
        return "device" if job.recompute or job.optimizer_offloaded or job.parameters_offloaded else ""


def predict(
    shape: Shape | PlannedModel, topology: Topology, job: TrainingJob, machine: Machine | None = None
) -> Prediction:
    """Return memory, traffic, bubble and time of a training step. Needs no process and no device.

    Args:
        shape: The sizes of a GPT, or a `PretrainedShape`, those of a model of transformers.
        topology: Sizes of the axes data, pipeline, sequence, expert and tensor, with their modes, and the view of
            experts where they are dealt out.
        job: Batch, ZeRO stage, precision, schedule and microbatches.
        machine: Devices and network; None means `Machine()`, nodes of eight H100.

    Raises:
        ValueError: Sizes that do not go together; the message names them.
    """
    return Predictor(shape, topology, job, machine).predict(job)


class Predictor:
    """Predictions of any schedule, ZeRO stage and offloading for one topology and number of microbatches.

    Work and traffic within microbatches depend on the rank's slice of the model and on little else. They are computed
    once per slice, as is the state of a slice at a ZeRO stage.

    Args:
        shape: Sizes of the model.
        topology: Topology of the ranks.
        job: Batch, precision, microbatches, documents and imbalance. Each prediction may change schedule, stage,
            recomputation and offloading.
        machine: Machine; None: `Machine()`.

    Raises:
        ValueError: The sizes contradict each other; the message names them.
    """

    def __init__(
        self, shape: Shape | PlannedModel, topology: Topology, job: TrainingJob, machine: Machine | None = None
    ) -> None:
        self.model, self.topology, self.machine = planned(shape), topology, machine or Machine()
        self.split, self.sequence = tensor_split(topology), sequence_split(topology)
        if self.sequence.ranks > 1 and self.sequence.how == "auto" and self.model.passes_states:
            self.sequence = replace(self.sequence, how="contiguous")  # states pass along consecutive tokens
        self._data = topology.size("data") * self.split.experts.own  # ranks that see other rows
        self._check(job)
        # Rows of microbatches differ by one at most; the larger ones come first.
        rows, larger = divmod(job.batch // self._data, job.microbatches)
        self._pieces = {rows + 1: larger, rows: job.microbatches - larger} if larger else {rows: job.microbatches}
        local = local_tokens(self.sequence, self.model.context, job.documents)
        self._microbatches = {size * local: times for size, times in self._pieces.items()}
        self._wiring = interconnect(topology, self.split, self.sequence, self.machine)
        self._averaged, self._copies = averaged_ranks(topology), topology.size("data") * self.split.experts.copies
        self._models = {"": self.model}
        self._states: dict[tuple[ModelSlice, int], _StageState] = {}
        self._work: dict[tuple[ModelSlice, int, int, bool, str], _StageWork] = {}

    def predict(self, job: TrainingJob) -> Prediction:
        """Return the prediction of a step.

        Args:
            job: The frame's job, with the schedule, the stage and all else that it leaves open.

        Raises:
            ValueError: A schedule or a stage that does not go with these sizes.
        """
        if job.recompute not in self._models:
            self._models[job.recompute] = self.model.with_recompute(job.recompute)
        model, pipeline = self._models[job.recompute], self._pipeline(job)
        numbers, split, sequence = job.numbers, self.split, self.sequence
        ranks = []
        for place, part, numbers_of_ranks in _kinds_of_places(self.model, pipeline):
            state = self._state(part, job)
            work = self._work_of(model, place, part, state, job)
            # The largest microbatch decides the peak, although only some microbatches have this size.
            activations, logits = model.activations(split, sequence, pipeline, place, job, max(self._pieces))
            own, movable = state.own, state.sources
            rank = RankPrediction(
                place=place.name,
                parameters=state.parameters,
                memory=replace(state.memory_of(job), activations=activations, logits=logits, attention=work.attention),
                transfers=(*state.transfers, *work.transfers),
                seconds=seconds_of(
                    work.seconds,
                    self._wiring,
                    job,
                    self.machine,
                    pipeline,
                    shared=state.transfers,
                    away=OffloadedState(
                        elements=job.optimizer_offloaded * own,
                        disk=job.disk * movable[0].takes["disk"],
                        parameters=job.parameters_offloaded * own,
                        parameters_disk=job.parameters_disk * own * numbers.weight,
                        units=max(1, part.blocks),
                    ),
                ),
                numbers=numbers_of_ranks,
                sources=movable,
                experts=work.experts,
            )
            ranks.append(rank)
        bubble = pipeline.bubble(job.microbatches)
        return Prediction(topology=self.topology, job=job, bubble=bubble, ranks=tuple(ranks))

    def _state(self, part: ModelSlice, job: TrainingJob) -> "_StageState":
        """Return the persistent state of a slice, at the job's stage."""
        # The search asks for the same slice and stage in many schedules, and the state does not depend on the schedule.
        if (part, job.zero) not in self._states:
            split, gloo = self.split, self.machine.gloo
            parameters, experts = self.model.count(split, part), self.model.count_experts(split, part)
            # A pipeline reduces gradients once, after all of its microbatches, like gradient accumulation.
            accumulates = job.microbatches > 1 or self.topology.size("pipeline") > 1
            shared = partial(zero_sharding, numbers=job.numbers, zero=job.zero, accumulates=accumulates, gloo=gloo)
            every = [shared(parameters, ranks=self._averaged)]
            if experts is not None:
                every.append(shared(experts, ranks=self._copies))
            replicas, *of_experts = share_buffers(every)
            transfers = data_traffic(replicas, job.numbers)
            for each in of_experts:
                transfers += data_traffic(each, job.numbers, "expert_data", flags=split.experts.reaches)
            self._states[part, job.zero] = _StageState(
                replicas=(replicas, *of_experts),
                numbers=job.numbers,
                parameters=parameters.total + (0 if experts is None else experts.total),
                table=parameters.table * job.numbers.master / (self._averaged if job.zero else 1),
                memory=added([state_memory(each, job.numbers) for each in (replicas, *of_experts)]),
                transfers=tuple(transfers),
                sources=sources_of((replicas, *of_experts), job.numbers),
            )
        return self._states[part, job.zero]

    def _work_of(
        self, model: PlannedModel, place: PipelineRank, part: ModelSlice, state: "_StageState", job: TrainingJob
    ) -> "_StageWork":
        """Return the work and traffic of a rank within microbatches."""
        # The gradient of the table and partial gradients depend on whether state is sharded, and on no other property
        # of the stage.
        key = part, place.received, place.neighbours, job.zero > 0, job.recompute
        if key not in self._work:
            split, sequence, numbers, microbatches = self.split, self.sequence, job.numbers, self._microbatches
            attentions = model.attentions(split, sequence, part)
            transfers = (
                *pipeline_traffic(model, split, place, part, microbatches, state.table),
                *sequence_traffic(
                    sequence,
                    attentions,
                    model.states(sequence, part, job),
                    model.context,
                    job.documents,
                    # A mode may split the rows over tensor ranks, and then each of them computes the attention of its
                    # own rows.
                    {size / split.inner_tokens: times for size, times in self._pieces.items()},
                    width=numbers.product,
                    again=model.checkpointing,
                    loss=part.last and model.sums_losses,
                ),
                *model.tensor_traffic(split, numbers, part, microbatches, state.replicas[0]),
                *exchange_traffic(model.mixture, split, numbers, part.mixtures, microbatches, job.imbalance),
            )
            # Backward runs one layer at a time, so the largest attention counts, and not their sum.
            held = max(reach(sequence, each, model.context, job.documents).held for each in attentions)
            self._work[key] = _StageWork(
                transfers=transfers,
                seconds=seconds_within(
                    model, self._wiring, job, self.machine, part=part, transfers=transfers, attentions=attentions
                ),
                attention=held * max(self._pieces) / split.inner_tokens * numbers.product,
                experts=expert_work(model.mixture, split.experts, numbers, part.mixtures, microbatches, job.imbalance),
            )
        return self._work[key]

    def _check(self, job: TrainingJob) -> None:
        """Raise ValueError if topology, model and batch do not fit together."""
        model, topology, split, sequence = self.model, self.topology, self.split, self.sequence
        data, spread = self._data, split.experts
        ranks = data * topology.size("pipeline") * sequence.ranks * split.ranks
        if ranks != topology.world_size or (spread.own > 1 and not spread.is_dealt):
            raise ValueError(
                f"{topology.axes} has ranks on other axes than data, pipeline, sequence, tensor and those of "
                "Topology.from_config for experts; leave them out"
            )
        if job.batch % data or job.batch // data < job.microbatches or job.microbatches < 1:
            ranks_of = "data ranks" if spread.own == 1 else "data x expert ranks"
            raise ValueError(
                f"a batch of {job.batch} does not divide over {data} {ranks_of} into {job.microbatches} microbatches "
                "each; change one of them"
            )
        problem = why_not_placed(model.mixture, spread, job.imbalance)
        # Microbatches have two sizes if the rows do not divide evenly; the model must accept both.
        for rows in {job.batch // data // job.microbatches, -(-job.batch // data // job.microbatches)}:
            problem = problem or model.why_not_sharded(split, rows)
        problem = problem or why_not_sequenced(model, split, sequence)
        if problem is not None:
            raise ValueError(problem)
        if job.precision == "fp8" and split.mode not in (None, "1d"):
            raise ValueError(
                f"precision 'fp8' multiplies on one device or in tensor mode 1d, not in {split.mode}; use 'bf16', or "
                "mode 1d"
            )

    def _pipeline(self, job: TrainingJob) -> PipelineCost:
        """Return the pipeline cost of a job's schedule.

        Raises:
            ValueError: It does not go with the model, or with the job's stage.
        """
        ranks = self.topology.size("pipeline")
        pipeline = pipeline_cost(job.schedule, ranks, job.microbatches)
        if ranks > 1 and (problem := self.model.why_no_stages()) is not None:
            raise ValueError(problem)
        if pipeline.stages > self.model.layers:
            raise ValueError(
                f"{self.model.layers} layers cannot be cut into the {pipeline.stages} stages of {job.schedule}; take "
                "fewer pipeline ranks, or more layers"
            )
        if pipeline.splits and job.zero == 3:
            raise ValueError(f"zero 3 frees weights that schedule {job.schedule!r} needs again; use zero 2, or 1f1b")
        return pipeline


@dataclass(frozen=True, kw_only=True)
class _StageState:
    """Persistent state of a slice at a ZeRO stage, and the traffic of the ranks that shard it.

    Args:
        replicas: Sharding of the parameters, and of distributed experts.
        numbers: Widths of numbers.
        parameters: Number of parameter elements.
        table: Size of the gradient of the embedding's table, in bytes.
        memory: Memory without offloading, in bytes.
        transfers: Gradients and parameters that the sharding ranks receive.
        sources: State that can be offloaded.
    """

    replicas: tuple[ZeroSharding, ...]
    numbers: NumberWidths
    parameters: int
    table: float
    memory: MemoryUse
    transfers: tuple[AxisTraffic, ...]
    sources: tuple[Offloadable, ...]

    @cached_property
    def own(self) -> float:
        """Number of elements whose optimizer's state a rank has."""
        return sum(each.elements / (each.ranks if each.zero else 1) for each in self.replicas)

    def memory_of(self, job: TrainingJob) -> MemoryUse:
        """Return the bytes with the job's offloaded fractions."""
        if not job.optimizer_offloaded and not job.parameters_offloaded:
            return self.memory
        numbers = self.numbers
        return added([with_offload(state_memory(each, numbers), each, numbers, job) for each in self.replicas])


@dataclass(frozen=True, kw_only=True)
class _StageWork:
    """Work and traffic of a rank within the microbatches of a step.

    Args:
        transfers: Traffic that the rank receives.
        seconds: Seconds by term, as `seconds_within` returns them.
        attention: Memory that one attention over a sequence's ranks holds in backward, in bytes.
        experts: Cost of the layers of experts; None without experts.
    """

    transfers: tuple[AxisTraffic, ...]
    seconds: Mapping[str, float]
    attention: float
    experts: ExpertWork | None


def planned(shape: Shape | PlannedModel) -> PlannedModel:
    """Return the planner's interface of a model.

    Args:
        shape: The sizes of a GPT, or what is a model already.
    """
    return GPTPlan(shape) if isinstance(shape, Shape) else shape


@lru_cache(maxsize=4096)
def _kinds_of_places(
    model: PlannedModel, pipeline: PipelineCost
) -> tuple[tuple[PipelineRank, ModelSlice, tuple[int, ...]], ...]:
    """Return the first rank, the last rank, and for each middle slice the rank that saves most.

    Each with what it has of the model, and the ranks that it stands for.
    """
    kinds: dict[tuple[str, ModelSlice], list[int]] = {}
    for number, place in enumerate(pipeline.places):
        kinds.setdefault((place.name, model.part(pipeline, place)), []).append(number)
    # Ranks of one kind differ only in the activations that they keep, and the fullest rank decides whether all fit.
    fullest = [max(numbers, key=lambda number: pipeline.places[number].kept) for numbers in kinds.values()]
    return tuple(
        (pipeline.places[one], part, tuple(numbers))
        for one, ((_, part), numbers) in zip(fullest, kinds.items(), strict=True)
    )


def why_not_sequenced(model: PlannedModel, split: TensorSplit, sequence: SequenceSplit) -> str | None:
    """Return why a model cannot use sequence ranks, and the fix; None if it can.

    Args:
        model: The model.
        split: The cut of the tensor mode.
        sequence: The cut of a row's tokens.
    """
    if sequence.ranks == 1:
        return None
    if (problem := model.why_no_sequence_ranks()) is not None:
        return problem
    if sequence.how not in {"auto", "contiguous"} and model.passes_states:
        return (
            f"split={sequence.how!r}: recurrent layers pass their states from each rank to the next, so each rank must "
            "hold consecutive tokens; use split='contiguous'"
        )
    try:
        attentions = attentions_of(model, split, sequence)
    except ValueError as error:
        return str(error)
    for attention in attentions:
        if attention.heads % sequence.inner:
            return (
                f"{attention.heads} heads a rank do not divide by the {sequence.inner} ranks that exchange tokens for "
                f"heads in sequence mode {sequence.label}; use mode 'ring' or 'gather', or '2d' with fewer ranks of "
                "ulysses"
            )
    return None


def attentions_of(model: PlannedModel, split: TensorSplit, sequence: SequenceSplit) -> Mapping[RankAttention, int]:
    """Return the attentions of all layers of a model; see `PlannedModel.attentions`."""
    alone = pipeline_cost("1f1b", 1, 1)
    return model.attentions(split, sequence, model.part(alone, alone.places[0]))


def model_flops(model: Shape | PlannedModel) -> float:
    """Return the floating-point operations per token in forward and backward, for computing MFU.

    The count includes half of causal attention, only the experts that a token is routed to, and no recomputation.

    Args:
        model: The sizes of a GPT, or a model as the planner takes it, such as `PretrainedShape`.

    Example:
        monitoring = MonitoringPolicy(flops=model_flops(PretrainedShape(model, context=4096)))
    """
    # A pipeline of one rank holds all layers, so its slice is the complete model.
    alone, asked = pipeline_cost("1f1b", 1, 1), planned(model)
    return sum(asked.flops(asked.part(alone, alone.places[0])))
