"""`Strategy`: the order in which the packages are applied to a model, and nothing that they do not do themselves."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from par_checkpoint import Checkpoints, Save, SaveOptions
from par_data import (
    Draws,
    GlobalDataLoader,
    Position,
    WorkerSignals,
    check_last_batch,
    order_of,
    placed,
    random_states,
    seed_number,
)
from par_groups import ProcessGroups, Topology, agree, check_alike, launch, together
from par_layers import RouterLosses
from par_pipeline import Pipeline, build_stage, schedule
from par_plan import PretrainedShape, StepPlan, TrainingJob, plan_models, plan_unsharded_model
from par_precision import MixedOptimizer

from .alike import BatchComparison
from .axes import data_axes, replica_axes
from .execute import Criterion, Execution
from .existing import PathLike as Path
from .existing import Plan, pretrained_in
from .files import Root, load_object, load_run, newest_step, save_object, save_run
from .handlers import DEFAULT, kinds_of
from .initialize import paired, wire
from .mixture.factor import LossFactor
from .mixture.load import loads_of, metrics_of
from .mixture.share import has_experts, no_experts
from .optimizers import check_sees_enough, joined
from .options import StrategyOptions
from .pairs import Pair
from .plugin import Plugin, check_support, find_plugin, in_order
from .plugins import Adopted, Device, Pipelined, Precision, Recompute, Tied, Zero, spend_measured
from .pretrained.make import make_part
from .random_states import gather_states, restore_states
from .sample import Ends, Prompts, joined_rows, read_request, write_on
from .sequence import attend_over_, check_pretrained, cut_by, cut_dict, no_use, reaches_other_tokens
from .setup import Setup, check_axes
from .stages import Layers, build_stages, check_stages

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class Strategy(Setup):
    """Wires models, optimizers, data loaders and lr schedulers for parallel training. Nothing is global.

    It uses torch.distributed where that runs, else starts it from what the launcher left in the environment, else is
    a world of one. As a context manager it ends what it has started.

    Args:
        parallel: Sizes and modes of the axes, as `par_groups.Topology.from_config` takes them; None: data parallel.
        precision: Precision of weights and arithmetic, such as "bf16"; see `par_precision.mixed`.
        zero: The ZeRO stage, or a mapping with `stage` and further keywords of `par_zero.shard`, such as
            dict(stage=1, elementwise=True) for an optimizer of your own that treats each element by itself.
        clip_norm: Largest norm of all gradients together, to which they are scaled down; None never clips.
        pipeline: `schedule` and `microbatches` of `execute_pipeline`, and further keywords of `par_pipeline.Pipeline`.
        mixed: Further keywords of `par_precision.mixed`, such as `scale`.
        gradient_handlers: What completes gradients before a step, in order: `dict(type=NAME, ...)` for each handler.
        plugins: Plugins, names that a wheel declares, or "module:Class".
        device: A device, or "auto": the accelerator of this rank if there is one, else the CPU.
        seed: Seed of weights that are made here, of the order of data, and of torch's generator in each step.
        groups: Live groups to use, instead of making some for `parallel`.
        name: Tells the random numbers of each step apart from those of other strategies with this seed in the program.
        recompute: What layers compute again in backward instead of keeping it: a policy of `par_recompute`, or a text,
            such as "cheap", "layers", "layers:2", "keep:0.4" or "keep:6GB"; None: nothing. It is for models that come
            with an optimizer, and changes no loss.
        memory: Bytes of a rank in each tier, such as {"device": "80GB", "host": "200GB", "disk": "1TB", "path":
            "/scratch"}. In the first step all of the optimizer's state that has room there lies on the host, then on
            the disk, at stage 3 parameters too if that is too little, and layers keep their inputs alone. It is
            measured, and from the second step on the device has what saves most seconds a byte: what layers keep for
            backward, or state from the disk. With `recompute` what is missing lies elsewhere from the beginning.
            "activations" are bytes that must be left for these. For one optimizer. Two chunks are reduced at a time,
            or as many as `zero` says by "inflight", which are counted. None: everything is kept.
        readers: Who reads the batches of a data loader. "one": one rank of each replica, which sends them to the
            replica's tensor, sequence and pipeline ranks, so that these take batches together. "every": every rank.

    Attributes:
        options: The options, as `StrategyOptions`.
        environment: This rank's place in the world.
        groups: The groups of ranks along each axis.
        device: The device on which this rank computes.
        schedule: The schedule of pipelines; None without a pipeline axis.
        plugins: All plugins, in the order in which they are applied.
        comparison: What compares batches over the ranks of a replica, where they come from another's data loader.
        spent: What `memory` was spent on, once a model was initialized; printed, with the reason of each choice.
        worker_signals: Whether workers of its data loaders outlive the signals that this process catches; see `Run`.
        resumed_from: The folder that `resume` has read, in the nearest tier that had it; None before.

    Raises:
        ValueError, TypeError: Options that make no sense together, or that differ between ranks; on every rank.

    Example:
        strategy = Strategy(parallel=dict(tensor=dict(size=2, mode="1d")), precision="bf16", zero=1, clip_norm=1.0)
        model = GPT(strategy.layers)
        optimizer = AdamW(model.parameters())
        model, optimizer, dataloader = strategy.initialize(model, optimizer, dataloader)
        for inputs, targets in dataloader:
            strategy.backward(criterion(model(inputs), targets), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        *,
        parallel: Mapping[str, Any] | None = None,
        precision: str = "fp32",
        zero: int | Mapping[str, Any] = 0,
        clip_norm: float | None = None,
        pipeline: Mapping[str, Any] | None = None,
        mixed: Mapping[str, Any] | None = None,
        gradient_handlers: Sequence[Mapping[str, Any]] = DEFAULT,
        plugins: Sequence[Plugin | str] = (),
        device: str = "auto",
        seed: int = 0,
        groups: ProcessGroups | None = None,
        name: str = "",
        recompute: Any = None,
        memory: Mapping[str, Any] | None = None,
        readers: Literal["one", "every"] = "one",
    ) -> None:
        with ExitStack() as started:  # what an error ends again
            self.environment = started.enter_context(launch(device=None if device == "auto" else device))
            self.device = self.environment.device
            problem, self.options, self.plugins = None, StrategyOptions(), []
            try:
                self.options = StrategyOptions(
                    parallel=parallel or {},
                    precision=precision,
                    zero=zero,
                    clip_norm=clip_norm,
                    pipeline=pipeline or {},
                    mixed=mixed or {},
                    gradient_handlers=gradient_handlers,
                    plugins=plugins,
                    device=device,
                    seed=seed,
                    groups=groups,
                    name=name,
                    recompute=recompute,
                    memory=memory,
                    readers=readers,
                )
                self.plugins = self._find_plugins()
                parallel = self.options.parallel
                topology = groups.topology if groups else Topology.from_config(parallel, self.environment.world_size)
                check_axes(topology, groups)
            except Exception as error:  # whatever it is, the other ranks must hear of it
                problem = error
            check_alike(agree(problem, self.options.described(), None), "options")
            self._owns_groups, self._private_groups = groups is None, {}
            shared = [data_axes(topology), *([replica_axes(topology)] if readers == "one" else [])]
            self.groups = groups or started.enter_context(ProcessGroups(topology, device=self.device, declare=shared))
            for axes in shared if groups else []:
                self.groups.add(axes)
            self.schedule = self.make_schedule() if self.groups.size("pipeline") > 1 else None
            started.pop_all()  # they run until close()
        place = self.groups.rank_seed((*topology.leaves(data_axes(topology)), "pipeline"), seed)
        self._place = seed_number(place, name) if name else place
        self._pairs: list[Pair] = []
        self._roots: dict[Root, list[tuple[Pair, Checkpoints]]] = {}
        self.resumed_from: str | None = None
        self.worker_signals = WorkerSignals()
        self._loaders: list[tuple[ReferenceType[GlobalDataLoader], Position]] = []  # the position outlives its loader
        self._executions: dict[nn.Module, Execution] = {}
        self._batches: WeakKeyDictionary[Any, Iterator[Any]] = WeakKeyDictionary()
        self._draws, self._drawn_in = Draws(), -1  # of batches that come from another's loader, and their step
        self.comparison = BatchComparison(self.groups)
        self._checked: set[Optimizer] = set()
        self._hooks: list[RemovableHandle] = []  # on optimizers, which may live longer than this
        self._steps = 0  # optimizer steps, of all optimizers together
        self._seeded: int | None = None  # the seed that this strategy has given torch's generator
        self._program = random_states()[0]  # of torch's generator, as the program left it when the strategy seeded it
        self._loaders_made = 0  # of other trainers
        self._closed = False
        self.spent = None
        self.plans: Mapping[nn.Module, Plan] = {}  # of the models that are initialized now

    def _find_plugins(self) -> list[Plugin]:
        options = self.options
        kinds_of(options.gradient_handlers)
        again = [Recompute()] if options.recompute or options.memory is not None else []
        zero = [Zero()] if options.shards else []
        built_in: list[Plugin] = [Adopted(), Pipelined(), Device(), *again, Tied(), *zero, Precision()]
        plugins = in_order(built_in, [find_plugin(each) for each in options.plugins])
        check_support(plugins, self.device.type, options.precision)
        return plugins

    @property
    def steps(self) -> int:
        """Optimizer steps, of all optimizers together. Setting it goes on with the random numbers of another run."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        self._reseed()

    def build(self, layers: Layers) -> nn.Module:
        """Makes a model out of layers that may only be described, of which this rank builds its own stages alone.

        Args:
            layers: nn.Modules, `par_pipeline.Lazy`, or dict(type="Linear", ...), one after the other.
        """
        rank, seed = self.groups.rank("pipeline"), self.options.seed
        with together("the layers", None):
            if self.schedule is not None:
                return build_stages(layers, self.schedule, rank, seed=seed)
            return build_stage(layers, schedule("1f1b", 1, 1), 0, seed=seed)[0]

    def from_pretrained(
        self,
        path: Path,
        *,
        plan: Plan = "auto",
        dtype: str | torch.dtype = "auto",
        adapter: Any = None,
        attention: str | None = None,
        weights: bool = True,
    ) -> nn.Module:
        """Makes this rank's part of a causal language model out of a folder that transformers writes. Collective.

        It is made without memory, cut over the tensor ranks and into this rank's stages, and then each rank reads its
        own bytes. Make the optimizer of its parameters, and give both to `initialize`. With adapters, these alone want
        gradients: make the optimizer of the parameters that do.

        Args:
            path: The folder, with config.json and safetensors.
            plan: Rules by which `par_layers.parallelize` cuts it, where there are tensor ranks.
            dtype: The dtype of the weights, whatever that in the files is; "auto": the config's.
            adapter: A `LoraConfig` of peft: adapters are put around the linears that it names, A drawn by the
                strategy's seed and its name, B zero. Or the folder of an adapter, which is trained on.
            attention: The name of transformers' attention, such as "sdpa"; None: its default.
            weights: Whether weights are read. Else the folder needs a config.json alone, and they are drawn as
                transformers would, by the strategy's seed and their names: the same under every topology.

        Raises:
            ImportError: transformers or peft is not installed.
            ValueError, TypeError: The folder holds no such model, the model cannot be cut, or the adapters are of a
                kind that cannot be trained here; on every rank.
        """
        return make_part(self, path, plan=plan, dtype=dtype, adapter=adapter, attention=attention, weights=weights)

    def plan(self, model: nn.Module | None = None, *, batch: int | None = None, context: int | None = None) -> StepPlan:
        """Predicts what a step takes on this rank: memory, traffic, the bubble of the pipeline.

        Of what was initialized, that is state and traffic over data ranks; of a model of transformers that is still
        whole also its activations and traffic over tensor ranks, sequence ranks and stages, which depend on the batch.

        Args:
            model: A model of transformers as it was before it is initialized, perhaps on the meta device; None: what
                was initialized.
            batch: Rows of a step of `model` over all ranks together; None: one for each microbatch of each data rank.
            context: Tokens in a row of `model`; None: as many as it has positions.

        Raises:
            ValueError: The model cannot be cut over these ranks, or the batch does not divide.
        """
        options, schedule, replicas = self.options, self.schedule, self.groups.size(self.data_axes)
        gloo = self.device.type == "cpu"
        job = TrainingJob(
            batch=1,
            zero=options.stage,
            precision=options.precision,
            microbatches=1 if schedule is None else schedule.microbatches,
        )
        if model is not None:
            pieces = self.make_schedule().microbatches
            job = replace(
                job,
                batch=pieces * replicas if batch is None else batch,
                schedule=options.pipeline.get("schedule", "1f1b"),
                microbatches=pieces,
            )
            shape, rank = PretrainedShape(model, context=context), self.groups.rank("pipeline")
            return plan_unsharded_model(shape, self.groups.topology, job, rank=rank, gloo=gloo)
        sizes = [pair.sizes for pair in self._pairs if pair.sizes is not None]
        return plan_models(sizes, self.groups.topology, job, schedule, gloo=gloo)

    # What is done once

    def initialize(self, *objects: Any, plans: Mapping[nn.Module, Plan] | None = None) -> Any:
        """Makes models, optimizers, data loaders and lr schedulers parallel, in place as far as can be. Collective.

        Args:
            *objects: Models, optimizers, DataLoaders and lr schedulers, in any order and number, at least one. The
                optimizers have not stepped, and have the parameters of models that are here too; several models may
                share one. A list of optimizers is several of one model, such as Muon for its matrices and AdamW for the
                rest. The batch_size of a DataLoader is that of all data ranks together.
            plans: For a model that knows nothing of ranks, the plan by which `par_layers.parallelize` cuts it over the
                tensor ranks. A model of transformers needs none: default "auto".

        Returns:
            What to use from now on, in the same order; a single object is given back alone, and one optimizer for a
            list of them.

        Raises:
            ValueError, TypeError: What does not fit together, on every rank.
        """
        self._check_open()
        problem: Exception | None = None
        pairs: list[Pair] = []
        loaders: dict[int, GlobalDataLoader] = {}
        models: list[nn.Module] = []
        sequence_ranks = self.groups.size("sequence") if self.cuts_sequence else 1
        try:
            objects = tuple(map(joined, objects))
            pairs = paired(objects)
            self.plans = dict(plans or {})
            for model in self.plans:
                if not any(model is given for given in objects):
                    raise ValueError(f"plans has a {type(model).__name__} that is not initialized here; give it too")
            alone = not any(isinstance(plugin, Zero) for plugin in self.plugins)
            for pair in pairs:
                if pair.optimizer is not None:
                    check_sees_enough(pair.optimizer, pair.models, self.groups, self.options.zero_keywords, alone=alone)
            models = [model for pair in pairs for model in pair.models]
            for pair in pairs if sequence_ranks > 1 else ():
                for model in pair.models:
                    trained = pair.optimizer is not None
                    check_pretrained(model, self.context, tensor_ranks=self.groups.size("tensor"), trained=trained)
            check_stages(models, self.schedule, self.groups.rank("pipeline"))
            apart, seed = self.data_axes, self.options.seed
            replica, replicas = self.groups.rank(apart), self.groups.size(apart)
            axes = replica_axes(self.groups.topology)
            is_shared = self.options.readers == "one" and self.groups.size(axes) > 1
            group = self.groups[axes] if is_shared else None
            data_group = self.groups[apart] if replicas > 1 else None
            for given in (given for given in objects if isinstance(given, DataLoader)):
                self._check_last(given, replicas, is_run=bool(pairs or self._pairs))
                loaders[id(given)] = GlobalDataLoader(
                    given,
                    replica=replica,
                    replicas=replicas,
                    seed=seed,
                    group=group,
                    data_group=data_group,
                    signals=self.worker_signals,
                )
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        check_alike(agree(problem, [type(given).__name__ for given in objects], None), "objects")
        if self.deals_experts:
            self._check_has_experts(models)
        if sequence_ranks > 1:
            self._check_uses_sequence(models, sequence_ranks)
            with together("attention over a sequence", None):
                for model in models:
                    attend_over_(model, self.context)
        wired: dict[int, Any] = {}  # what has become of each object, by the id of what was given
        for pair in pairs:
            became, hook = wire(pair, self.plugins, self, self._after_step)
            wired.update(became)
            self._hooks.extend([] if hook is None else [hook])
        for number, loader in loaders.items():
            wired[number] = loader
            loader.cut = cut_by(self.context) if sequence_ranks > 1 else None
            for plugin in self.plugins:
                with together(f"plugin {plugin.name!r}", None):
                    wired[number] = plugin.setup_dataloader(wired[number], self)
        self._pairs += pairs
        self._loaders += [(ref(loader), loader.position) for loader in loaders.values()]
        self._reseed()
        results = tuple(wired[id(given)] for given in objects)
        return results[0] if len(results) == 1 else results

    def _check_uses_sequence(self, models: Sequence[nn.Module], ranks: int) -> None:
        """Raises ValueError on all ranks if no stage of a model reaches the tokens of other sequence ranks."""
        found = agree(None, [reaches_other_tokens(model) for model in models], None)
        for number, model in enumerate(models):
            if not any(by_model[number] for by_model in found.values()):
                raise no_use(model, ranks)

    def _check_has_experts(self, models: Sequence[nn.Module]) -> None:
        """Raises ValueError on all ranks if no model, here or initialized before, has experts to deal out.

        What is still to be cut says so itself when it is.
        """
        every = [*models, *(model for pair in self._pairs for model in pair.models)]
        found = agree(None, any(has_experts(one) or one in self.plans or pretrained_in(one) for one in every), None)
        if models and not any(found.values()):
            raise no_experts(models, self.groups.size("expert_parallel"))

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        if self.spent is not None and self.spent.is_open:
            spend_measured(next(pair.models for pair in self._pairs if pair.optimizer is not None), self)

    def _reseed(self) -> None:
        """Randomness is a function of seed, step and place, so that a run that goes on draws what it would have."""
        seed = (self._place + 0x9E3779B97F4A7C15 * self._steps) % 2**63
        if torch.initial_seed() != self._seeded:  # the program has seeded it since
            self._program = torch.get_rng_state()
        self._seeded = seed
        torch.default_generator.manual_seed(seed)  # torch.manual_seed goes through all kinds of devices
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def loader_states(self, sampler: Any = None, *, leave_out: Collection[str] = ()) -> Any:
        """The state of generators that a data loader of another trainer draws its order from, the same on all ranks.

        It is that of rank 0's program, which may have seeded its generators; torch's is as it was before this strategy
        seeded it by the rank's place. Each call gives other numbers. Collective.

        Args:
            sampler: A sampler that has to give one order on all ranks; None: none has.
            leave_out: Names of its attributes that its trainer makes equal.

        Raises:
            ValueError: The sampler holds generators or indices that differ between ranks; on every rank.
        """
        program, *others = random_states()
        if torch.initial_seed() == self._seeded:
            program = self._program
        said = (program, *others) if self.environment.is_master else None
        found = agree(None, (said, "" if sampler is None else order_of(sampler, leave_out=leave_out)), None)
        differing = [rank for rank, (_, order) in found.items() if order != found[0][1]]
        if differing:
            name = type(getattr(sampler, "sampler", sampler)).__name__
            raise ValueError(
                f"sampler={name}: ranks {differing} would draw another order than rank 0, as its "
                "generators or indices differ; set them to one seed on all ranks, or pass shuffle=True instead"
            )
        draws = Draws(states=found[0][0])
        draws.skip(self._loaders_made)
        self._loaders_made += 1
        return draws.states

    # What is done in each step

    def backward(
        self, loss: Tensor, optimizer: Optimizer, weight: Tensor | float | None = None, *, factor: float = 1.0
    ) -> None:
        """Runs the backward pass of a loss, scaled if need be.

        By default all data ranks weigh the same, as under DDP.

        Args:
            loss: A scalar that depends on models which the optimizer trains.
            optimizer: The optimizer that `initialize` gave.
            weight: How many things, such as tokens, the loss is a mean over: gradients become the mean over all of
                them, on all ranks and in all backward passes of the step.
            factor: What the loss is multiplied by before, such as 1 / 4 where four passes make a step. Losses of
                routers are multiplied, too, as they cannot be where the loss that is given was multiplied already.

        Raises:
            ValueError: The optimizer is not from here, or the loss does not depend on what it trains.
        """
        pair = self._pair_of(optimizer)
        if optimizer not in self._checked:
            _check_loss(loss, pair)
            self._checked.add(optimizer)
        loss = _factor_of(pair).of(loss)
        loss = loss if factor == 1.0 else loss * factor
        if isinstance(optimizer, MixedOptimizer):
            optimizer.backward(loss, weight=weight)
        elif weight is None:
            loss.backward()
        else:
            raise ValueError("a plugin controls precision here, so backward() takes no weight; weigh the loss yourself")

    def execute_pipeline(  # noqa: PLR0917 - as engines have it
        self,
        data_iter: Any,
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        forward_only: bool = False,
    ) -> Any:
        """Takes the next batch through the model in microbatches, forward and backward; also where no pipeline is.

        Args:
            data_iter: An iterator, or a data loader, whose next epoch begins where one ends. It gives pairs of inputs
                and target; inputs that are a tuple are several arguments. Anything else, such as a dict, is both.
            model: The model that `initialize` gave.
            criterion: A function `criterion(outputs, target)`: it gives a mean over rows, or a sum and the number of
                things summed, whose gradients become the mean over all of them on all ranks. None: the causal loss of
                a model of transformers, a mean over all tokens that count; the batch is a dict, as a collator gives it.
            optimizer: The optimizer that `initialize` gave; needed unless `forward_only`.
            return_loss: Whether to return the loss.
            return_outputs: Whether to return the outputs, where the last stage is.
            forward_only: Whether to leave out the backward.

        Returns:
            The mean loss of this data rank's batch, an fp64 scalar, on all ranks of the pipeline; or the outputs; or
            both as a pair, if both are asked for.

        Raises:
            ValueError: A model or an optimizer that is not from here.
            StopIteration: The iterators of all ranks of the pipeline have ended.
            par_pipeline.PipelineError: A stage or the data has raised on a rank of the pipeline, or the data of some of
                its ranks alone has ended; on all ranks of this pipeline. Those of other pipelines wait for it in their
                next reduction, as long as a collective may take: the `timeout` of `par_groups.launch`.
        """
        if not forward_only and not any(model is own for own in self._pair_of(optimizer).models):
            raise ValueError(
                f"this {type(optimizer).__name__} does not train this {type(model).__name__}; give those that "
                "initialize() returned together"
            )
        execution = self._execution(model)
        comes_to_device = any(isinstance(plugin, Device) for plugin in self.plugins)

        cut_here = self.cuts_sequence and execution.takes_dicts

        def read() -> Any:
            return self._next_batch(data_iter)

        is_shared = isinstance(data_iter, GlobalDataLoader) and self.options.readers == "one"
        if not is_shared and self.comparison.is_due((model, forward_only)):
            read = self.comparison.compared(read, f"data_iter={type(data_iter).__name__}")

        def next_batch() -> Any:
            batch = read()
            if cut_here and isinstance(batch, Mapping):
                batch = cut_dict(batch, self.context, compare=True)
            return placed(batch, self.device) if comes_to_device else batch

        loss, outputs = execution.run(next_batch, criterion, forward_only=forward_only, return_outputs=return_outputs)
        if return_loss and return_outputs:
            return loss, outputs
        return loss if return_loss else outputs

    def _next_batch(self, source: Any) -> Any:
        """The next batch of an iterator; or of a data loader, whose next epoch begins where one ends.

        A GlobalDataLoader is its own cursor. The iterator of another loader is kept as long as the loader is. Stages
        have other seeds, so what another source draws is a function of the step and the data rank; unless the program
        has seeded torch itself.
        """
        if isinstance(source, GlobalDataLoader):
            return next(iter(source))
        if self.schedule is None or torch.initial_seed() != self._seeded:
            return self._next_of(source)
        if self._drawn_in != self._steps:
            replica = self.groups.rank(self.data_axes)
            self._draws, self._drawn_in = Draws((self.options.seed, self._steps, replica)), self._steps
        with self._draws.entered():
            return self._next_of(source)

    def _check_last(self, loader: DataLoader[Any], replicas: int = 1, *, is_run: bool = True) -> None:
        """Raises if the last batch of an epoch is too small; one rank alone cuts it into fewer microbatches."""
        if is_run and (self.schedule is not None or self.groups.size(self.data_axes) > 1):
            check_last_batch(loader, replicas * self.make_schedule().microbatches)

    def _next_of(self, source: Any) -> Any:
        if isinstance(source, Iterator):
            return next(source)
        if source not in self._batches:
            if isinstance(source, DataLoader):
                self._check_last(source)
            self._batches[source] = iter(source)
        try:
            return next(self._batches[source])
        except StopIteration:
            self._batches[source] = iter(source)
            return next(self._batches[source])

    def pipeline(self, model: nn.Module) -> Pipeline:
        """The pipeline that runs a model's microbatches: for evaluation, timelines and `reset()`."""
        return self._execution(model).pipeline

    def sample(
        self,
        model: nn.Module,
        ids: Prompts,
        tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        ends: Ends = "auto",
    ) -> Prompts:
        """Goes on from prompts with a causal model as it is now, the same on every rank. Collective.

        Each token takes a forward of the whole text before it: there is no cache, and so nothing that a pipeline or
        sharded weights would have to keep. It is for looking at a model in training. Dropout is off meanwhile, the
        modes of all modules are put back, and torch's generators are not used. Over an axis `sequence` a model of one's
        own is given rows that are filled up until they divide: it needs as many positions.

        Args:
            model: The model that `initialize` gave.
            ids: The prompts, the same on every rank: [rows, time], or a list of [time] that may differ in length.
            tokens: Largest number of new tokens of each prompt.
            temperature: What logits are divided by before a token is drawn by their softmax; 0 takes the most likely.
            seed: Seed of the draws. Those of a prompt depend on its number alone, under every topology.
            ends: A token, or several, after which a text is over; "auto": those of a transformers model's
                generation_config or config; None: none.

        Returns:
            Prompts with what follows them, int64, on the device of the prompts: a list of [time] for a list; else
            [rows, time], where a text that is over is filled with the token that ended it.

        Raises:
            ValueError, TypeError: The model is not from here, the prompts or the options make no sense, or they differ
                between ranks; on every rank.
        """
        with together("sample", None):
            self._pair_with(model)
            request = read_request(
                model, self.groups, ids, tokens=tokens, temperature=temperature, seed=seed, ends=ends
            )
        check_alike(agree(None, request.digest(), None), "prompts or options to sample by", show=False)
        pipeline = None if self.schedule is None else self.pipeline(model)
        texts = write_on(request, model, pipeline, self.groups, self.context, self.device)
        given = [text.to(prompt.device) for text, prompt in zip(texts, ids, strict=True)]
        return joined_rows(given) if isinstance(ids, Tensor) else given

    def _pair_with(self, model: nn.Module) -> Pair:
        self._check_open()
        pair = next((pair for pair in self._pairs if any(one is model for one in pair.models)), None)
        if pair is None:
            raise ValueError(f"this {type(model).__name__} is not from initialize(); give what that returned")
        return pair

    def _execution(self, model: nn.Module) -> Execution:
        pair = self._pair_with(model)
        if model not in self._executions:
            options = {
                key: value for key, value in self.options.pipeline.items() if key not in ("schedule", "microbatches")
            }
            plan = self.schedule or self.make_schedule()
            self._executions[model] = Execution(model, plan, self.groups, pair.optimizer, options, _factor_of(pair))
        return self._executions[model]

    @contextmanager
    def no_sync(self, model: nn.Module, *, keep: bool = True) -> Iterator[None]:
        """Backward passes inside add up gradients on each rank; the first one outside reduces them all together.

        Args:
            model: What `initialize` returned.
            keep: At stage 3, whether gathered parameters stay so from one pass to the next, which takes a whole model's
                memory. Else every pass gathers them anew; see `par_zero.no_sync`.

        Raises:
            ValueError: A plugin does not support it.
        """
        for plugin in self.plugins:
            if not plugin.supports_no_sync:
                raise ValueError(f"plugin {plugin.name!r} does not support no_sync(); run each backward with its step")
        deferring = getattr(model, "no_sync", None)  # par-zero's own, also of what torch.compile returns
        with nullcontext() if deferring is None else deferring() if keep else deferring(keep=False):
            yield

    # Mixtures of experts

    def router_metrics(self, model: nn.Module) -> dict[str, Tensor]:
        """What the routers of a model say since this was called last, alike on all ranks. Collective.

        Args:
            model: The model that `initialize` gave.

        Returns:
            fp64 scalars; what nobody has counted is missing. "aux" and "z": what all routers added to the loss, the
            mean over microbatches and ranks, summed over stages. "imbalance": tokens of the busiest expert by the mean
            of its layer's, the highest of all layers. "dropped": rows beyond an expert's capacity, of all ranks.
        """
        pair = self._pair_with(model)
        return metrics_of(RouterLosses(model), pair.module, self.groups)

    def expert_load(self, model: nn.Module) -> dict[str, Tensor]:
        """Tokens of each expert in the step that ended last, over all ranks, by the name of its router. Collective.

        Args:
            model: The model that `initialize` gave.

        Returns:
            int64 [E] for each router of all stages, on the CPU; empty before the first step.
        """
        self._pair_with(model)
        return loads_of(RouterLosses(model), self.groups)

    def _pair_of(self, optimizer: Optimizer | None) -> Pair:
        self._check_open()
        pair = next((pair for pair in self._pairs if pair.optimizer is optimizer), None)
        if pair is None or optimizer is None:
            raise ValueError(f"this {type(optimizer).__name__} is not from initialize(); give what that returned")
        return pair

    # Files

    def save(
        self,
        obj: Any,
        path: Path,
        plan: str = "huggingface",
        max_file_size_gb: float = 10,
        *,
        tiers: Sequence[Path] | None = None,
        copies: int | None = None,
    ) -> Save | None:
        """Writes a model, an optimizer or an lr scheduler, as whole tensors that know nothing of ranks. Collective.

        Args:
            obj: A model, an optimizer or an lr scheduler that `initialize` gave.
            path: The folder of plan "huggingface", in which an optimizer has a folder `optimizer` of its own; or the
                file of plan "torch", which `torch.load` opens. The folder of "peft" and "merged".
            plan: "huggingface" or "torch"; of a model with adapters, "peft" for these alone, as `PeftModel` opens them,
                or "merged" for a model that they are part of, as transformers opens it. `model` stays as it is.
            max_file_size_gb: Largest size of a safetensors file, in gigabytes.
            tiers: Folders or URLs, the nearest first, for plan "huggingface": `path` is then a name in each of them,
                and the call waits for the first alone; see `par_checkpoint.save`.
            copies: Where the first tier is local to each host: on how many hosts each host's part is kept there.

        Returns:
            With plan "huggingface" the save, whose `wait()` waits until all tiers have it; else None.

        Raises:
            ValueError, TypeError: The plan does not go with what was given; on every rank.
        """
        self._check_open()
        gigabytes = max_file_size_gb
        return save_object(self._pairs, obj, path, plan, gigabytes, self.device, tiers=tiers, copies=copies)

    def load(self, obj: Any, path: Path, plan: str = "huggingface", *, tiers: Sequence[Path] | None = None) -> None:
        """Fills a model, an optimizer or an lr scheduler from what `save` or `checkpoint` wrote. Collective.

        Args:
            obj: A model, an optimizer or an lr scheduler that `initialize` gave.
            path: The folder or the file that `save` was given.
            plan: "huggingface" for a folder, "torch" for a file that `torch.save` or `save` wrote, "peft" for a
                folder of adapters.
            tiers: The tiers that `save` or `checkpoint` was given; `path` is then the name in them, and it is read from
                the nearest one that has it whole.
        """
        self._check_open()
        load_object(self._pairs, obj, path, plan, tiers=tiers)

    def checkpoint(
        self,
        root: Path,
        *,
        step: int,
        async_: bool = False,
        keep_last: int | Sequence[int | None] | None = None,
        tiers: Sequence[Path] | None = None,
        copies: int | None = None,
        options: SaveOptions | None = None,
    ) -> list[Save]:
        """Writes everything that training needs to go on, as `root/step-00000100`. Collective.

        Args:
            root: The folder of the checkpoints. Where there are several models, each has a folder `0`, `1`, ... in it.
                With tiers: its name in each of them, such as "gpt".
            step: Steps done.
            async_: Whether to go on at once: the next step of an optimizer waits until the bytes are copied. To change
                weights otherwise, wait for the handle's `wait_for_copy()`.
            keep_last: Number of the newest checkpoints that stay; None keeps all. With tiers also a list of one for
                each.
            tiers: Folders or URLs, the nearest first, such as "/dev/shm/run" and "s3://bucket/run": a step waits for
                the first alone, see `par_checkpoint.save`. `newest_step` and `resume` must be given them, too.
            copies: Where the first tier is local to each host: on how many hosts each host's part is kept there.
            options: Further options of `par_checkpoint.save`, such as its `workers`.

        Returns:
            A handle for each model.
        """
        self._check_open()
        positions = [position.state_dict() for _, position in self._loaders]
        state = {"steps": self._steps, "loaders": positions, "random": gather_states(self.groups.rank(self.data_axes))}
        keywords = {"async_": async_} if options is None else {"async_": async_, "options": options}
        return save_run(self._checkpoints_of(Root.of(root, tiers, copies, keep_last)), state, step, keywords)

    def _checkpoints_of(self, root: Root) -> list[tuple[Pair, Checkpoints]]:
        """The checkpoints of each model, kept: they know the newest step, and ask no slower tier for it."""
        known = self._roots.get(root)
        if known is None or len(known) != len(self._pairs):  # which only grow
            known = self._roots[root] = root.checkpoints(self._pairs)
        return known

    def check_tiers(self, root: Path, *, tiers: Sequence[Path], copies: int | None = None) -> None:
        """Tries out tiers before training begins: each can be written, and is seen by whom it should. Collective.

        Args:
            root: The name of the folder of the checkpoints in each of them.
            tiers: The tiers that `checkpoint` will be given.
            copies: On how many hosts each host's part of the first tier will be kept.

        Raises:
            TypeError, ValueError: What was given, the rule, and what to give; on every rank.
            StoreError: An object store refuses to be written; on every rank.
        """
        self._check_open()
        for _, checkpoints in self._checkpoints_of(Root.of(root, tiers, copies)):
            checkpoints.check()

    def clear_tiers(self, root: Path, *, tiers: Sequence[Path]) -> None:
        """Removes all checkpoints of a root from all tiers, of hosts' parts too. Collective.

        Args:
            root: The name that `checkpoint` was given.
            tiers: The tiers that it was given.
        """
        self._check_open()
        for _, checkpoints in self._checkpoints_of(Root.of(root, tiers)):
            checkpoints.clear()

    def newest_step(self, root: Path, *, tiers: Sequence[Path] | None = None) -> int | None:
        """The newest step whose checkpoint is whole, for every model; None if there is none. Collective.

        Args:
            root: The folder that `checkpoint` was given.
            tiers: The tiers that it was given.
        """
        self._check_open()
        return newest_step(self._checkpoints_of(Root.of(root, tiers)))

    def resume(self, root: Path, *, step: int | None = None, tiers: Sequence[Path] | None = None) -> int | None:
        """Goes on from a checkpoint, under the topology that wrote it or another one. Collective.

        Of several models the newest step that all of them have is taken: a run that was killed may have written its
        last one for some of them alone.

        Args:
            root: The folder that `checkpoint` was given.
            step: The step of the checkpoint; None takes the newest whole one.
            tiers: The tiers that `checkpoint` was given.

        Returns:
            The step; None if there is no checkpoint.
        """
        self._check_open()
        checkpoints = self._checkpoints_of(Root.of(root, tiers))
        step = newest_step(checkpoints) if step is None else step
        if step is not None:
            report = load_run(checkpoints, len(self._loaders), step)
            state, self.resumed_from = report.extra, report.path
            self.steps = state["steps"]
            for (reference, position), saved in zip(self._loaders, state["loaders"], strict=True):
                loader = reference()
                (position if loader is None else loader).load_state_dict(saved)
            if "random" in state:  # which older checkpoints lack
                restore_states(state["random"], self.groups.rank(self.data_axes))
        return step

    def close(self) -> None:
        """Ends what this strategy has started, and lets go of what it was given; a second call does nothing.

        That are the connections of its pipelines, the workers of its data loaders, its groups, and torch.distributed
        if it was started here. It waits for no other rank. Models keep their parameters, at stage 3 this rank's part of
        them, but cannot be trained any more.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last_first:  # the others too, should one fail
            last_first.callback(self.environment.close)
            if self._owns_groups:
                last_first.callback(self.groups.destroy)
            for reference, _ in self._loaders:
                if (loader := reference()) is not None:
                    last_first.callback(loader.close)
            last_first.callback(self._batches.clear)
            for execution in self._executions.values():
                last_first.callback(execution.close)
            for hook in self._hooks:
                last_first.callback(hook.remove)
        for kept in (self._pairs, self._roots, self._loaders, self._executions, self._checked, self._hooks):
            kept.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the strategy is closed; make a new Strategy(...), and initialize new objects with it")

    def __enter__(self) -> "Strategy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _factor_of(pair: Pair) -> LossFactor:
    assert pair.factor is not None  # noqa: S101 - `initialize` has made it
    return pair.factor


def _check_loss(loss: Tensor, trained: Pair) -> None:
    """Raises unless a loss depends on a parameter of the models; looked at once for each optimizer.

    Activation checkpointing with use_reentrant=True hides the parameters inside from the graph, and a frozen model with
    adapters may have no others: then it only warns.
    """
    own = {id(parameter) for model in trained.models for parameter in model.parameters()}
    opaque: str | None = None
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in own:
            return
        name = type(node).__name__
        opaque = name if name.startswith("CheckpointFunction") else opaque
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    names = ", ".join(type(model).__name__ for model in trained.models)
    problem = f"the loss does not depend on any parameter of {names}, which this optimizer trains"
    if opaque is None:
        raise ValueError(f"{problem}; give its own")
    warnings.warn(
        f"{problem}, as far as can be seen through {opaque}; if it is that of another model, give its own; to be sure, "
        "use activation checkpointing with use_reentrant=False",
        stacklevel=3,
    )
