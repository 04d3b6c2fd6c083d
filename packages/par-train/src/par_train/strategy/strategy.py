"""`Strategy`: the order in which the packages are applied to a model, and nothing that they do not do themselves."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from par_checkpoint import Save
from par_groups import Environment, ProcessGroups, Topology, agree, check_alike, launch, together
from par_layers import LayerSet, layer_set
from par_pipeline import Pipeline, Schedule, build_stage, schedule
from par_precision import MixedOptimizer

from ..data.loader import GlobalDataLoader
from ..data.place import placed
from ..plan.inputs import Job
from .execute import Batches, Criterion, Execution
from .files import load_object, load_run, newest_step, save_object, save_run
from .handlers import kinds_of
from .initialize import paired, wire
from .options import StrategyOptions
from .pairs import Pair
from .plan import StrategyPlan, plan_of
from .plugin import Plugin, check_support, find_plugin, in_order
from .plugins import Device, Pipelined, Precision, Tied, Zero
from .schedules import make_schedule, microbatches_of
from .stages import Layers, build_stages

Path = str | PathLike[str]


class Strategy:
    """Wires models, optimizers, data loaders and lr schedulers for parallel training. Nothing is global.

    It uses torch.distributed where that runs, else starts it from what the launcher left in the environment, else is
    a world of one. As a context manager it ends what it has started.

    Args:
        **options: See `StrategyOptions`.

    Attributes:
        options: What it was told.
        environment: This rank's place in the world.
        groups: Who works together.
        device: Where this rank computes.
        schedule: Of pipelines; None without.
        plugins: In the order in which they are applied.

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

    def __init__(self, **options: Any) -> None:
        device = options.get("device", "auto")
        self.environment: Environment = launch(device=None if device == "auto" else device)
        self.device = self.environment.device
        problem, self.options, self.plugins = None, StrategyOptions(), []
        try:
            self.options = StrategyOptions(**options)
            self.plugins = self._find_plugins()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        try:
            check_alike(agree(problem, self.options.described(), None), "options")
        except BaseException:
            self.environment.close()
            raise
        self._owns_groups = self.options.groups is None
        self.groups: ProcessGroups = self.options.groups or ProcessGroups(
            Topology.from_config(self.options.parallel, self.environment.world_size), device=self.device
        )
        self.schedule = self._make_schedule() if self.groups.size("pipeline") > 1 else None
        self._place = self.groups.rank_seed(("data", "pipeline"), self.options.seed)
        self._pairs: list[Pair] = []
        self._loaders: list[GlobalDataLoader] = []
        self._executions: dict[nn.Module, Execution] = {}
        self._batches: dict[int, Batches] = {}  # by the id of what they hold
        self._checked: set[Optimizer] = set()
        self._steps = 0  # optimizer steps, of all optimizers together

    def _find_plugins(self) -> list[Plugin]:
        options = self.options
        kinds_of(options.gradient_handlers)
        built_in: list[Plugin] = [Pipelined(), Device(), Tied(), *([Zero()] if options.shards else []), Precision()]
        plugins = in_order(built_in, [find_plugin(each) for each in options.plugins])
        check_support(plugins, self.device.type, options.precision)
        return plugins

    def _make_schedule(self) -> Schedule:
        """The schedule of a pipeline; without one, of a single rank that takes one microbatch after the other."""
        ranks, options = self.groups.size("pipeline"), self.options.pipeline
        microbatches = microbatches_of(options.get("microbatches", 0), ranks)
        if ranks == 1:
            return schedule("1f1b", 1, microbatches)
        return make_schedule(options.get("schedule", "1f1b"), ranks, microbatches, zero=self.options.stage)

    # What a trainer asks

    @cached_property
    def layers(self) -> LayerSet:
        """The layers of the tensor mode; of one device, where there is none."""
        return layer_set("auto", self.groups)

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.environment.is_master

    @property
    def steps(self) -> int:
        """Optimizer steps, of all optimizers together. Setting it goes on with the random numbers of another run."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        self._reseed()

    def build(self, layers: Layers) -> nn.Module:
        """A model out of layers that may only be described, of which this rank builds its pipeline stages alone.

        Args:
            layers: nn.Modules, `par_pipeline.Lazy`, or dict(type="Linear", ...), one after the other.
        """
        rank, seed = self.groups.rank("pipeline"), self.options.seed
        with together("the layers", None):
            if self.schedule is not None:
                return build_stages(layers, self.schedule, rank, seed=seed)
            return build_stage(layers, schedule("1f1b", 1, 1), 0, seed=seed)[0]

    def plan(self) -> StrategyPlan:
        """What a step takes on this rank: memory, traffic over data ranks, the pipeline's bubble; predicted."""
        options, schedule = self.options, self.schedule
        job = Job(
            batch=1,
            zero=options.stage,
            precision=options.precision,
            microbatches=1 if schedule is None else schedule.microbatches,
        )
        gloo = self.device.type == "cpu"
        sizes = [each.sizes for each in self._pairs if each.sizes is not None]
        return plan_of(sizes, job, schedule, ranks=self.groups.size("data"), gloo=gloo)

    # What is done once

    def initialize(self, *objects: Any) -> Any:
        """Makes models, optimizers, data loaders and lr schedulers parallel, in place as far as can be. Collective.

        Args:
            *objects: In any order and number, at least one. Optimizers are new, and hold the parameters of models that
                are here too; several models may share one. A DataLoader's batch_size is that of all data ranks.

        Returns:
            What to use from now on, in the same order; a single object is given back alone.

        Raises:
            ValueError, TypeError: What does not fit together, on every rank.
        """
        problem: Exception | None = None
        pairs: list[Pair] = []
        loaders: dict[int, GlobalDataLoader] = {}
        try:
            pairs = paired(objects)
            loaders = {id(each): self._shared_out(each) for each in objects if isinstance(each, DataLoader)}
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        check_alike(agree(problem, [type(each).__name__ for each in objects], None), "objects")
        given: dict[int, Any] = {}
        for each in pairs:
            given.update(wire(each, self))
        for number, loader in loaders.items():
            given[number] = loader
            for plugin in self.plugins:
                with together(f"plugin {plugin.name!r}", None):
                    given[number] = plugin.setup_dataloader(given[number], self)
        self._pairs += pairs
        self._loaders += loaders.values()
        self._reseed()
        found = tuple(given[id(each)] for each in objects)
        return found[0] if len(found) == 1 else found

    def after_step(self, *_: Any) -> None:
        """Called after each step of each optimizer."""
        self.steps += 1

    def _shared_out(self, loader: DataLoader[Any]) -> GlobalDataLoader:
        groups = self.groups
        return GlobalDataLoader(
            loader, replica=groups.rank("data"), replicas=groups.size("data"), seed=self.options.seed
        )

    def _reseed(self) -> None:
        """Randomness is a function of seed, step and place, so that a run that goes on draws what it would have."""
        seed = (self._place + 0x9E3779B97F4A7C15 * self._steps) % 2**63
        torch.default_generator.manual_seed(seed)  # torch.manual_seed goes through all kinds of devices
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    # What is done in each step

    def backward(self, loss: Tensor, optimizer: Optimizer, weight: Tensor | float | None = None) -> None:
        """Runs the backward pass of a loss, scaled if need be.

        By default all data ranks weigh the same, as under DDP.

        Args:
            loss: A scalar of models that the optimizer trains.
            optimizer: That `initialize` gave.
            weight: How many things, such as tokens, the loss is a mean over: gradients become the mean over all of
                them, on all ranks and in all backward passes of the step.

        Raises:
            ValueError: The optimizer is not from here, or the loss does not depend on what it trains.
        """
        each = self._pair_of(optimizer)
        if optimizer not in self._checked:
            _check_loss(loss, each)
            self._checked.add(optimizer)
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
        criterion: Criterion,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        forward_only: bool = False,
    ) -> Any:
        """Takes the next batch through the model in microbatches, forward and backward; also where no pipeline is.

        Args:
            data_iter: An iterator, or a data loader, whose next epoch begins where one ends. Gives pairs of inputs
                and target; inputs that are a tuple are several arguments. Anything else, such as a dict, is both.
            model: That `initialize` gave.
            criterion: `criterion(outputs, target)`: a mean over rows, or a sum and the number of things summed, whose
                gradients become the mean over all of them on all ranks.
            optimizer: That `initialize` gave; needed unless `forward_only`.
            return_loss: Whether to return the loss.
            return_outputs: Whether to return the outputs, where the last stage is.
            forward_only: Whether to leave out the backward.

        Returns:
            The mean loss of this data rank's batch, an fp64 scalar, on all ranks of the pipeline; or the outputs; or
            both as a pair, if both are asked for.

        Raises:
            ValueError: A model or an optimizer that is not from here.
            StopIteration: The iterator has ended.
        """
        if not forward_only and not any(model is one for one in self._pair_of(optimizer).models):
            raise ValueError(
                f"this {type(optimizer).__name__} does not train this {type(model).__name__}; give those that "
                "initialize() returned together"
            )
        execution = self._execution(model)
        batch = next(self._batches_of(data_iter))
        if any(isinstance(plugin, Device) for plugin in self.plugins):
            batch = placed(batch, self.device)
        loss, outputs = execution.run(batch, criterion, forward_only=forward_only, return_outputs=return_outputs)
        if return_loss and return_outputs:
            return loss, outputs
        return loss if return_loss else outputs

    def _batches_of(self, source: Any) -> Iterator[Any]:
        """The iterator itself, or the one that is kept for a data loader."""
        if isinstance(source, Iterator):
            return source
        if id(source) not in self._batches:
            self._batches[id(source)] = Batches(source)
        return self._batches[id(source)]

    def pipeline(self, model: nn.Module) -> Pipeline:
        """What runs a model's microbatches: for evaluation, timelines and `reset()`."""
        return self._execution(model).pipeline

    def _execution(self, model: nn.Module) -> Execution:
        if model not in self._executions:
            each = next((each for each in self._pairs if any(one is model for one in each.models)), None)
            if each is None:
                raise ValueError(f"this {type(model).__name__} is not from initialize(); give what that returned")
            options = {
                key: value for key, value in self.options.pipeline.items() if key not in ("schedule", "microbatches")
            }
            plan = self.schedule or self._make_schedule()
            self._executions[model] = Execution(model, plan, self.groups, each.optimizer, options)
        return self._executions[model]

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward passes inside add up gradients on each rank; the first one outside reduces them all together.

        Raises:
            ValueError: A plugin does not support it.
        """
        for plugin in self.plugins:
            if not plugin.supports_no_sync:
                raise ValueError(f"plugin {plugin.name!r} does not support no_sync(); run each backward with its step")
        held: AbstractContextManager[Any] = model.__dict__.get("no_sync", nullcontext)()
        with held:
            yield

    def _pair_of(self, optimizer: Optimizer | None) -> Pair:
        found = next((each for each in self._pairs if each.optimizer is optimizer), None)
        if found is None or optimizer is None:
            raise ValueError(f"this {type(optimizer).__name__} is not from initialize(); give what that returned")
        return found

    # Files

    def save(self, obj: Any, path: Path, plan: str = "huggingface", max_file_size_gb: float = 10) -> None:
        """Writes a model, an optimizer or an lr scheduler, as whole tensors that know nothing of ranks. Collective.

        Args:
            obj: That `initialize` gave.
            path: plan "huggingface": the folder, in which an optimizer has a folder `optimizer` of its own. "torch":
                the file, which `torch.load` opens.
            plan: "huggingface" or "torch".
            max_file_size_gb: Of a safetensors file.
        """
        save_object(self._pairs, obj, path, plan, max_file_size_gb)

    def load(self, obj: Any, path: Path, plan: str = "huggingface") -> None:
        """Fills a model, an optimizer or an lr scheduler from what `save` or `checkpoint` wrote. Collective."""
        load_object(self._pairs, obj, path, plan)

    def checkpoint(
        self, root: Path, *, step: int, async_: bool = False, keep_last: int | None = None, **keywords: Any
    ) -> list[Save]:
        """Writes everything that training needs to go on: `root/step-00000100`. Collective.

        Args:
            root: The folder of the run. Of several models, each has a folder `0`, `1`, ... in it.
            step: Steps done.
            async_: Go on at once; the next step of an optimizer waits until the bytes are copied. To change weights
                otherwise, wait for the handle's `wait_for_copy()`.
            keep_last: Older ones are removed, but so many of the newest; None: all stay.
            keywords: Of `par_checkpoint.save`.

        Returns:
            A handle for each model.
        """
        return save_run(self._pairs, self._state(), root, step, keep_last, {"async_": async_, **keywords})

    def newest_step(self, root: Path) -> int | None:
        """The newest step whose checkpoint is whole, for every model; None if there is none. Collective.

        Args:
            root: The folder that `checkpoint` was given.
        """
        return newest_step(self._pairs, root)

    def resume(self, root: Path, *, step: int | None = None) -> int | None:
        """Goes on from a checkpoint, under the topology that wrote it or another one. Collective.

        Of several models the newest step that all of them have is taken: a run that was killed may have written its
        last one for some of them alone.

        Args:
            root: The folder that `checkpoint` was given.
            step: The step of the checkpoint; None takes the newest whole one.

        Returns:
            The step; None if there is no checkpoint.
        """
        step = newest_step(self._pairs, root) if step is None else step
        if step is not None:
            state = load_run(self._pairs, len(self._loaders), root, step)
            self.steps = state["steps"]
            for loader, saved in zip(self._loaders, state["loaders"], strict=True):
                loader.load_state_dict(saved)
        return step

    def _state(self) -> dict[str, Any]:
        return {"steps": self._steps, "loaders": [each.state_dict() for each in self._loaders]}

    # The end

    def close(self) -> None:
        """Ends the groups, and torch.distributed if it was started here; a second call does nothing."""
        if self._owns_groups:
            self.groups.destroy()
        self.environment.close()

    def __enter__(self) -> "Strategy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_loss(loss: Tensor, trained: Pair) -> None:
    """Raises unless a loss depends on a parameter of the models; looked at once for each optimizer."""
    own = {id(parameter) for model in trained.models for parameter in model.parameters()}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in own:
            return
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    names = ", ".join(type(model).__name__ for model in trained.models)
    raise ValueError(f"the loss does not depend on any parameter of {names}, which this optimizer trains; give its own")
