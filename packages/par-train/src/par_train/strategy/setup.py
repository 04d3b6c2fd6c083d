"""The parts of a strategy that exist before a model does: options, groups, plugins and the schedule of a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from par_data import StepRandomness, check_last_batch
from par_groups import (
    EXPERTS,
    Axes,
    Channels,
    ProcessGroups,
    Topology,
    agree,
    averaged_axes,
    check_alike,
    data_axes,
    kept_tensors,
    launch,
    replica_axes,
)
from par_layers import Context, LayerSet, deals_packed_experts, layer_set
from par_pipeline import Schedule, schedule
from par_plan import (
    ModelSizes,
    PretrainedShape,
    StepPlan,
    TrainingJob,
    model_sizes,
    plan_models,
    plan_unsharded_model,
)
from par_precision import precision_of
from par_zero import DataParallelGroup, MixedPrecision, ShardOptions

from .bundles import ModelBundle
from .experts import share_of_experts
from .options import StrategyOptions
from .plugin import Plugin
from .settings import make_schedule, microbatches_of

if TYPE_CHECKING:
    from par_plan import BudgetPlan


class Setup:
    """The part of a strategy that plugins may use; `Strategy` documents its attributes.

    Args:
        options: The keywords of `Strategy`.
        choose_plugins: A function of the checked options that returns the plugins in their order.

    Raises:
        ValueError, TypeError: An option has a wrong value, or options differ between ranks; on every rank.
    """

    randomness: StepRandomness
    _bundles: list[ModelBundle]

    def __init__(
        self, options: Mapping[str, Any], choose_plugins: Callable[[StrategyOptions, str], list[Plugin]]
    ) -> None:
        with ExitStack() as started:  # if anything below raises, whatever was started ends
            device = options.get("device", "auto")
            self.environment = started.enter_context(launch(device=None if device == "auto" else device))
            self.device = self.environment.device
            # Defaults, so that a rank whose options are wrong has some to send in the comparison below.
            self.options, self.plugins = StrategyOptions(), []
            # From here on a rank may fail alone, so its error is kept until the ranks have compared their options.
            problem: Exception | None = None
            given = options.get("parallel")
            try:
                self.options = StrategyOptions(**options)
                self.plugins = choose_plugins(self.options, self.device.type)
                if isinstance(given, ProcessGroups):
                    topology = given.topology
                else:
                    topology = Topology.from_config(given or {}, self.environment.world_size)
                _check_axes(topology, given if isinstance(given, ProcessGroups) else None)
                # Canonical numerics must know every sum that the axes of a topology divide.
                if (lanes := self.options.canonical_lanes) is not None:
                    lanes.check(topology)
            except Exception as error:  # of any kind: every rank raises what one rank has raised
                problem = error
            check_alike(agree(problem, self.options.described(), None), "options")
            # Groups that plugins and data loaders use are made here, once: ranks make groups together, in one order.
            shared = [data_axes(topology), *([replica_axes(topology)] if self.options.broadcast_batches else [])]
            if isinstance(given, ProcessGroups):
                self.groups = given
                # Groups of the caller are used, not owned: `close` must leave them alive.
                for axes in shared:
                    self.groups.add(axes)
            else:
                self.groups = started.enter_context(ProcessGroups(topology, device=self.device, declare=shared))
            self.schedule = self.make_schedule() if self.groups.size("pipeline") > 1 else None
            self.started = started.pop_all()  # they run until close()
        self._closed = False
        self._private_groups: dict[Axes, int] = {}
        self.plans: Mapping[nn.Module, Any] = {}  # of the models that are being initialized
        self.spent: BudgetPlan | None = None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the strategy is closed; make a new Strategy(...), and initialize new objects with it")

    @cached_property
    def layers(self) -> LayerSet:
        """The layers of the tensor mode; layers of one device if there is no tensor axis."""
        return layer_set("auto", self.groups, lanes=self.options.canonical_lanes)

    @property
    def context(self) -> Context:
        """The context parallelism of `layers`: it splits batches along the sequence and computes attention over them.

        Without an axis `sequence` it splits nothing, so that one loop serves both cases.
        """
        return self.layers.context

    @property
    def data_axes(self) -> Axes:
        """The axes whose ranks read different samples: "data", and "expert" if experts have ranks of their own."""
        return data_axes(self.groups.topology)

    @property
    def averaged_over(self) -> Axes:
        """The axes over which gradients are averaged: the data axes, and "sequence" if the sequence is split."""
        return averaged_axes(self.groups.topology)

    @property
    def cuts_sequence(self) -> bool:
        """Whether each sequence is split, over several ranks or into lanes."""
        return self.context.is_split

    @property
    def deals_experts(self) -> bool:
        """Whether experts are distributed over ranks: the topology then has a view "experts"."""
        return EXPERTS in self.groups.topology.views

    def parallelizes(self, model: nn.Module, plan: str | Mapping[str, Any]) -> bool:
        """Return whether an existing model is sharded, or computes in lanes, so that `parallelize` converts it.

        Args:
            model: The unsharded model.
            plan: Rules by pattern, or "auto".
        """
        if self.groups.size("tensor") > 1 or self.deals_experts or self.layers.rules.lanes.in_layers:
            return True
        return self.layers.rules.expert_lanes is not None and deals_packed_experts(model, plan)

    def private_group(self, axes: Axes) -> dist.ProcessGroup | None:
        """Make another communicator over `axes` that nothing else uses and that ends with the strategy. Collective.

        Returns:
            The communicator; None if the groups belong to the caller and may outlive this strategy.
        """
        # A communicator inside the caller's groups would outlive the strategy that needs it.
        if isinstance(self.options.parallel, ProcessGroups):
            return None
        if self.groups.size(axes) == 1:
            return self.groups[axes]
        # Two models may gather at the same time, so each call makes a communicator of its own.
        count = self._private_groups[axes] = self._private_groups.get(axes, 0) + 1
        self.groups.add(Channels(axes, count))
        return self.groups.channels(axes, count)[-1]

    def inflight_of(self, others: Sequence[DataParallelGroup]) -> int | None:
        """Return how many chunks may be reduced at a time: the option of `zero`, or 2 under a budget; None: no limit.

        With experts there is no limit at stages 0 to 2: a rank that waited for a reduction in backward would hold up
        the token exchange of other ranks. A budget then counts all chunks.

        Args:
            others: The data-parallel groups of experts.
        """
        given: int | None = self.options.zero_policy("overlap").get("inflight")
        bounds = self.options.memory is not None and (self.options.stage == 3 or not others)
        return 2 if given is None and bounds else given

    def cast_(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Cast the weights of a trained model that par-zero does not cast itself: frozen and rounded weights.

        Args:
            model: The model, whose parameters exist, perhaps on the meta device.
            optimizer: Optimizer of the model; None for a model that only runs forward, which does not change.
        """
        precision = precision_of(self.options.precision_name)
        dtype = None if optimizer is None else precision.weights
        if optimizer is None or dtype is None:
            return
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        stay = {id(tensor) for tensor in kept_tensors(model, dtype).values()}
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) in stay:
                continue
            if (precision.rounded or tensor not in stepped) and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)

    def zero_precision(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Return the arguments of `par_zero.MixedPrecision`.

        Args:
            optimizer: Optimizer of the model; None for a model that only runs forward.
        """
        precision = precision_of(self.options.precision_name)
        # With rounded weights the optimizer steps the weights themselves, so par-zero must keep no masters.
        dtype = None if optimizer is None or precision.rounded else precision.weights
        return {"param_dtype": dtype, **self.options.zero_policy("precision")}

    def sizes_of(self, model: nn.Module, optimizer: Optimizer | None) -> ModelSizes:
        """Return the sizes of this rank's part of a model, as its data ranks will shard it.

        Args:
            model: The model, whose parameters exist, perhaps on the meta device, in the dtypes that `cast_` gives.
            optimizer: Optimizer of the model; None for a model that only runs forward.
        """
        given = self.options.zero_keywords
        options = ShardOptions.of(**{name: given[name] for name in ShardOptions.__dataclass_fields__ if name in given})
        shares = share_of_experts(model, self.groups)
        options = replace(
            options,
            precision=MixedPrecision(**self.zero_precision(optimizer)),
            overlap=replace(options.overlap, inflight=self.inflight_of(shares)),
        )
        experts = [(share.parameters or (), dist.get_world_size(share.group)) for share in shares]
        return model_sizes(
            model,
            optimizer,
            stage=self.options.stage,
            ranks=self.groups.size(self.averaged_over),
            options=options,
            experts=experts[0] if experts else ((), 1),
            gloo=self.device.type == "cpu",
            microbatches=self.job().microbatches,
        )

    def job(self) -> TrainingJob:
        """Return the description of a training step from which par-plan predicts its cost."""
        options = self.options
        # The batch is one row here: state and traffic over data ranks, which this describes, do not depend on it.
        microbatches = 1 if self.schedule is None else self.schedule.microbatches
        return TrainingJob(batch=1, zero=options.stage, precision=options.precision_name, microbatches=microbatches)

    def plan(
        self,
        model: nn.Module | None = None,
        *,
        batch: int | None = None,
        context: int | None = None,
        images: int = 0,
        image_size: tuple[int, int] | None = None,
    ) -> StepPlan:
        """Predict the memory, the traffic and the pipeline bubble of a training step on this rank.

        For initialized models, the prediction covers the state and the traffic over data ranks. For a transformers
        model that is not initialized yet, it also covers activations and all other traffic, which depend on the batch.

        Args:
            model: A transformers model that is not initialized, perhaps on the meta device. Default: the initialized
                models.
            batch: The rows of a step of `model` over all ranks. Default: one for each microbatch of each data rank.
            context: The tokens of a row of `model`. Default: the model's number of positions.
            images: The images of a row of `model`. Default: 0, rows of text.
            image_size: Height and width of an image in pixels. Default: the size in the model's configuration.

        Raises:
            ValueError: The model cannot be sharded over these ranks, it takes no such images, or the batch does not
                divide.
        """
        job, gloo = self.job(), self.device.type == "cpu"
        if model is None:
            sizes = [bundle.sizes for bundle in self._bundles if bundle.sizes is not None]
            return plan_models(sizes, self.groups.topology, job, self.schedule)
        microbatches = self.make_schedule().microbatches
        batch = microbatches * self.groups.size(self.data_axes) if batch is None else batch
        name = self.options.pipeline_keywords.get("schedule", "1f1b")
        job = replace(job, batch=batch, schedule=name, microbatches=microbatches)
        shape = PretrainedShape(model, context=context, images=images, image_size=image_size)
        return plan_unsharded_model(shape, self.groups.topology, job, rank=self.groups.rank("pipeline"), gloo=gloo)

    @property
    def sequence_ranks(self) -> int:
        """The number of tensor ranks over which the activations between two layers of an existing model are split."""
        return self.groups.size("tensor") if self.layers.rules.residual.sequence else 1

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.environment.is_master

    def make_schedule(self) -> Schedule:
        """Make the schedule of the pipeline; without a pipeline, one rank runs the microbatches consecutively."""
        ranks, options = self.groups.size("pipeline"), self.options.pipeline_keywords
        lanes = self.options.canonical_lanes  # the options have checked that they are not given beside `microbatches`
        given = options.get("microbatches", 0) if lanes is None else lanes.data // self.groups.size(self.data_axes)
        microbatches = microbatches_of(given, ranks)
        if ranks == 1:
            return schedule("1f1b", 1, microbatches)
        return make_schedule(options.get("schedule", "1f1b"), ranks, microbatches, zero=self.options.stage)

    def check_last_batch(self, loader: DataLoader[Any], replicas: int = 1) -> None:
        """Check that the last batch of an epoch has a row for each microbatch of each replica.

        Without a pipeline and data ranks, `Execution` runs a small batch in fewer microbatches instead.

        Args:
            loader: The data loader.
            replicas: The number of data ranks that share its batches.

        Raises:
            ValueError: The last batch is too small.
        """
        if self.schedule is not None or self.groups.size(self.data_axes) > 1:
            check_last_batch(loader, replicas * self.make_schedule().microbatches)


def _check_axes(topology: Topology, groups: ProcessGroups | None) -> None:
    """Check that the groups exist that a strategy needs.

    Raises:
        ValueError: Live groups lack one over which gradients are averaged, or an axis "expert" does not specify who
            has which experts.
    """
    if data_axes(topology) != "data" and EXPERTS not in topology.views:
        raise ValueError(
            f"the topology has expert={topology.size('expert')} and no view {EXPERTS!r}, which specifies who has "
            "which experts; make it with Topology.from_config"
        )
    if groups is not None:
        # Reading a group that does not exist raises an error that names it.
        groups[averaged_axes(topology)]
        if EXPERTS in topology.views:
            groups["data", "expert_data"]
