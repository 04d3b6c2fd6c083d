"""`Strategy`: the order in which the packages of par are applied to a model, an optimizer and their data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from par_data import BatchComparison, StepRandomness, WorkerSignals
from par_groups import Digest, agree, check_alike, digest_of, settle_, together
from par_layers import RouterLosses, parallelization_of
from par_layers.pretrained import Ends, Prompts, joined_rows, make_batch_splitter, read_request, write_on
from par_pipeline import Pipeline, build_stage, build_stages, schedule
from par_precision import MixedOptimizer
from par_zero import reduces_gradients

from .batches import BatchReader
from .bundles import ModelBundle
from .canonical.environment import environment_of
from .canonical.lanes import LaneExecution
from .canonical.plugins import GridPlugin
from .canonical.randomness import LaneRandomness
from .execute import Criterion, Execution
from .files import RunState, StrategyFiles
from .initialize import check_objects, wire
from .options import StrategyOptions, takes_options_of
from .plugins import choose_plugins, spend_measured
from .pretrained.files import PathLike
from .pretrained.make import Plan, make_part

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class Strategy(StrategyFiles):
    """Parallel training of models, with their optimizers, data loaders and lr schedulers. Nothing is global.

    A strategy uses torch.distributed if it runs. Otherwise it starts torch.distributed from the variables that a
    launcher has set, or as a single process. As a context manager it ends everything that it has started.

    Args:
        **options: The fields of `StrategyOptions`, such as `parallel`, `precision` and `zero`; `__init__` lists them.

    Attributes:
        options: The arguments, as `StrategyOptions`.
        environment: The rank, the local rank and the world size.
        groups: The process groups along each axis.
        device: The device on which this rank computes.
        schedule: The schedule of pipelines; None without a pipeline axis.
        plugins: All plugins, in the order in which they are applied.
        randomness: The seeds of torch's generators in each step, and the states for data loaders of other trainers.
        comparison: The check that all ranks of a replica received the same batch.
        spent: The plan of the `memory` budget after a model is initialized. Print it to see its reasons.
        environment_of_bits: The versions and the hardware on which the bits of canonical numerics depend.
        worker_signals: The signals that the workers of data loaders survive while a `Run` saves.

    Raises:
        ValueError, TypeError: An option has a wrong value, or options differ between ranks; on every rank.

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

    @takes_options_of(StrategyOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(options, choose_plugins)
        make_randomness = StepRandomness if self.options.lanes is None else LaneRandomness
        self.randomness = make_randomness(self.options.seed, self.groups, self.data_axes, self.device)
        self._bundles = []
        self.environment_of_bits = environment_of(self.options, self.device)
        self._state = RunState(self.randomness, self.groups.rank(self.data_axes), self.environment_of_bits)
        self._checkpoints = {}
        self._executions: dict[nn.Module, Execution] = {}
        self._grid = next((plugin for plugin in self.plugins if isinstance(plugin, GridPlugin)), None)
        self._hooks: list[RemovableHandle] = []  # on models and optimizers, which may outlive the strategy
        self._checked_losses: set[Optimizer] = set()
        self.comparison = BatchComparison(self.groups["tensor"], self.groups["pipeline"])
        self._batches = BatchReader(self, self.randomness, self.comparison)
        self.worker_signals = WorkerSignals()

    @property
    def steps(self) -> int:
        """The optimizer steps, of all optimizers together. Set it to draw the random numbers of that step."""
        return self.randomness.step

    @steps.setter
    def steps(self, steps: int) -> None:
        self.randomness.step = steps

    # Before training

    def build(self, layers: nn.Sequential | Sequence[Any]) -> nn.Module:
        """Make a model from layers or descriptions of layers. This rank builds only the layers of its own stages.

        Args:
            layers: `nn.Module`s, `par_pipeline.Lazy`, or dict(type="Linear", ...), in order.
        """
        rank, seed = self.groups.rank("pipeline"), self.options.seed
        with together("the layers", None):
            if self.schedule is not None:
                return build_stages(layers, self.schedule, rank, seed=seed)
            # One stage of one rank is the whole model, made by the same code, so weights do not depend on the pipeline.
            return build_stage(layers, schedule("1f1b", 1, 1), 0, seed=seed)[0]

    def from_pretrained(
        self,
        path: PathLike,
        *,
        plan: Plan = "auto",
        dtype: str | torch.dtype = "auto",
        adapter: Any = None,
        attention: str | None = None,
        weights: bool = True,
    ) -> nn.Module:
        """Make this rank's part of a causal language model from a folder that transformers writes. Collective.

        The model is made on the meta device, sharded over the tensor ranks and split into stages; then each rank reads
        its own bytes. Make the optimizer of its parameters and pass both to `initialize`. With adapters, make the
        optimizer of the parameters that require gradients: only the adapters do.

        Args:
            path: The folder, with config.json and safetensors files.
            plan: The rules by which `par_layers.parallelize` shards the model over tensor ranks.
            dtype: The dtype of the weights, whatever the files hold. Default: the config's.
            adapter: A peft `LoraConfig`: the linear layers that it names get adapters, A drawn from the strategy's seed
                and the layer's name, B zero. Or the folder of an adapter, to continue its training.
            attention: The name of a transformers attention implementation, such as "sdpa". Default: transformers' own.
            weights: Whether to read weights. If False, the folder needs only config.json, and weights are drawn as
                transformers would, from the strategy's seed and their names: identical under every topology.

        Raises:
            ImportError: transformers or peft is not installed.
            ValueError, TypeError: The folder holds no causal language model, the model cannot be sharded, or adapters
                of this kind cannot be trained; on every rank.
        """
        return make_part(self, path, plan=plan, dtype=dtype, adapter=adapter, attention=attention, weights=weights)

    def initialize(self, *objects: Any, plans: Mapping[nn.Module, Plan] | None = None) -> Any:
        """Make models, optimizers, data loaders and lr schedulers parallel, mostly in place. Collective.

        Args:
            *objects: Models, optimizers, DataLoaders and lr schedulers, in any order and number. The models of an
                optimizer's parameters come in the same call, before its first step; several models may share one. A
                list of optimizers serves one model, such as Muon for its matrices and AdamW for the rest. The
                batch_size of a DataLoader counts the rows of all data ranks together.
            plans: For each model that is not built of parallel layers, the plan by which `par_layers.parallelize`
                shards it over the tensor ranks. Transformers models need no plan; their default is "auto".

        Returns:
            The objects to use from now on, in the same order, with one optimizer for a list of optimizers; for a single
            argument, the object.

        Raises:
            ValueError, TypeError: The objects do not fit together, or differ between ranks; on every rank.
        """
        self._check_open()
        # Plugins look the plans up by model, so they are set before any check.
        self.plans = dict(plans or {})
        objects, bundles, loaders = check_objects(objects, self, self._bundles, self.worker_signals)
        # A wired object may be a new one, such as a wrapped optimizer, so results are found by the id of the argument.
        wired: dict[int, Any] = {}
        for bundle in bundles:
            became, hook = wire(bundle, self.plugins, self, self._after_step)
            wired.update(became)
            self._hooks += [] if hook is None else [hook]
            self._hooks += [self.comparison.watch(model) for model in bundle.models if self._takes_equal_inputs(model)]
        for number, loader in loaders.items():
            # The loader is already broadcast when the transform runs: each rank takes its part of the same batch.
            loader.transform = make_batch_splitter(self.context) if self.cuts_sequence else None
            self._state.add(loader)
            wired[number] = loader
            for plugin in self.plugins:
                with together(f"plugin {plugin.name!r}", None):
                    wired[number] = plugin.setup_dataloader(wired[number], self)
        self._bundles += bundles
        if self.spent is not None and self.spent.is_open and self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)  # the first step is measured
        self.steps = self.steps  # seeds torch's generators: the plugins have drawn from them
        results = tuple(wired[id(given)] for given in objects)
        return results[0] if len(results) == 1 else results

    def _takes_equal_inputs(self, model: nn.Module) -> bool:
        """Return whether a loop of the user's own calls a model with the same inputs on all ranks of a replica.

        Stages of a pipeline are not called by the loop, and some layers take each rank's part of an activation.
        """
        residual = self.layers.rules.residual
        is_split = (residual.tokens or residual.features) and parallelization_of(model) is None
        return self.schedule is None and not is_split

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        # The first step was measured with as little on the device as possible. Now the rest of the budget is spent.
        if self.spent is not None and self.spent.is_open:
            spend_measured(next(each.models for each in self._bundles if each.optimizer is not None), self)

    # In each training step

    def backward(
        self, loss: Tensor, optimizer: Optimizer, weight: Tensor | float | None = None, *, factor: float = 1.0
    ) -> None:
        """Run the backward pass of a loss, scaled if the precision needs a loss scale.

        By default every data rank has the same weight, as under DDP.

        Args:
            loss: A scalar that depends on the models of `optimizer`.
            optimizer: The optimizer that `initialize` returned.
            weight: The number of items, such as tokens, that the loss is a mean of. Gradients then are the mean over
                all items of all ranks and all backward passes of the step.
            factor: A factor of the loss, such as 1 / 4 if four passes make a step. Pass it here rather than multiply
                the loss, so that the losses of routers are multiplied as well.

        Raises:
            ValueError: The optimizer is not from `initialize`, or the loss does not depend on its models.
        """
        bundle = self._bundle_of(optimizer)
        # The walk through the graph is slow, and a wrong pairing shows in the first step.
        if optimizer not in self._checked_losses:
            bundle.check_loss(loss)
            self._checked_losses.add(optimizer)
        # Routers receive the gradient of this result, so the factor and the loss scale are applied after it.
        loss = bundle.loss_factor.of(loss)
        loss = loss if factor == 1.0 else loss * factor
        if isinstance(optimizer, MixedOptimizer):
            with nullcontext() if self._grid is None else self._grid.accumulating(bundle.models, optimizer):
                optimizer.backward(loss, weight=weight)
        elif weight is None:
            loss.backward()
        else:
            raise ValueError(
                f"weight={weight}: a plugin controls precision here, and backward() cannot weigh the loss; remove "
                "weight, and multiply the loss yourself"
            )

    def execute_pipeline(  # noqa: PLR0917 - the signature of other engines
        self,
        data_iter: Any,
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        forward_only: bool = False,
    ) -> Any:
        """Run the next batch through the model in microbatches, forward and backward; also without a pipeline.

        Args:
            data_iter: An iterator; or a data loader, which starts its next epoch after its last batch. It returns pairs
                of inputs and target; inputs that are a tuple are several arguments. Any other batch, such as a dict,
                is both inputs and target.
            model: The model that `initialize` returned.
            criterion: A function `criterion(outputs, target)` that returns a mean over rows; or a sum and the number of
                its items, and then gradients are the mean over all items of all ranks. None for the causal loss of a
                transformers model, a mean over all tokens with a label; the batch then is a dict, as a collator
                returns it.
            optimizer: The optimizer that `initialize` returned; required unless `forward_only`.
            return_loss: Whether to return the loss.
            return_outputs: Whether to return the outputs, on the ranks of the last stage.
            forward_only: Whether to omit the backward pass.

        Returns:
            The mean loss of this data rank's batch, an fp64 scalar, on all ranks of the pipeline; or the outputs; or
            both, as a pair.

        Raises:
            ValueError: The model or the optimizer is not from `initialize`. Or the model reads images, and a rank
                cannot use its batch; on all ranks of its replica, and outside of `no_sync` on all training ranks.
            StopIteration: The iterators of all ranks of the pipeline have ended.
            par_pipeline.PipelineError: A stage has raised on a rank of the pipeline, or the data of only some of its
                ranks has ended. Or the data has raised, and the model reads no images; if it does, the rank raises the
                error of its data, and the other ranks ValueError. On all ranks of this pipeline: other pipelines wait
                in their next reduction until the `timeout` of `par_groups.launch`.
        """
        if not forward_only and not any(model is own for own in self._bundle_of(optimizer).models):
            raise ValueError(
                f"this {type(optimizer).__name__} does not train this {type(model).__name__}; pass a model and the "
                "optimizer that initialize() returned with it"
            )
        # A loader of the strategy has split its dicts already; other sources give full rows.
        execution = self._execution(model)
        cuts_dicts = self.cuts_sequence and execution.takes_dicts
        read = self._batches.reader(data_iter, (model, forward_only), cuts_dicts=cuts_dicts)
        with self.comparison.paused():  # the reader has compared the batch; the model runs its microbatches
            over_data = not forward_only and reduces_gradients(model)
            loss, outputs = execution.run(
                read, criterion, forward_only=forward_only, return_outputs=return_outputs, over_data=over_data
            )
        if return_loss and return_outputs:
            return loss, outputs
        return loss if return_loss else outputs

    def pipeline(self, model: nn.Module) -> Pipeline:
        """Return the pipeline that runs a model's microbatches, for evaluation, timelines and `reset()`."""
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
        """Continue prompts with a causal model as it is now, identically on every rank. Collective.

        Use it to inspect a model during training. There is no cache of keys and values, so each token costs a forward
        pass of the full text. The model runs in eval mode; torch's generators are not used. Over an axis `sequence`, a
        model of your own receives rows that are padded until they divide.

        Args:
            model: The model that `initialize` returned.
            ids: The prompts, identical on every rank: [rows, time], or a list of [time] of different lengths.
            tokens: The largest number of new tokens of each prompt.
            temperature: The divisor of the logits before a token is drawn from their softmax; 0 takes the most likely.
            seed: The seed of the draws. The draws of a prompt depend only on the seed and on the prompt's number.
            ends: The token, or tokens, after which a text ends; None for no such token. Default: those of a
                transformers model's generation_config or config.

        Returns:
            The prompts with their continuations, int64, on the device of the prompts: a list of [time] for a list; else
            [rows, time], in which the token that ended a text fills up its row.

        Raises:
            ValueError, TypeError: The model is not from `initialize`, or the prompts or options are wrong or differ
                between ranks; on every rank.
        """
        with together("sample", None):
            self._bundle_with(model)
            options: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "seed": seed, "ends": ends}
            request = read_request(model, ids, **options, ranks=self.groups.size("tensor"))
        check_alike(agree(None, request.digest(), None), "prompts or options to sample by", show=False)
        run: Callable[..., Any] = model
        rows, chooser = 1, 0
        if self.schedule is not None:
            pipeline, rows = self.pipeline(model), self.schedule.microbatches
            run = lambda given, **keywords: pipeline.evaluate(given, **keywords).outputs  # noqa: E731
            chooser = self.groups.topology.group("pipeline", 0)[self.schedule.rank_of(self.schedule.stages - 1)]
        with self.comparison.paused():  # the prompts were compared
            texts = write_on(request, model, run, self.context, rows=rows, chooser=chooser, device=self.device)
        given = [text.to(prompt.device) for text, prompt in zip(texts, ids, strict=True)]
        return joined_rows(given) if isinstance(ids, Tensor) else given

    @contextmanager
    def no_sync(self, model: nn.Module, *, keep: bool = True) -> Iterator[None]:
        """Return a context in which each rank accumulates gradients; the first backward after it reduces them.

        Args:
            model: The model that `initialize` returned.
            keep: At stage 3, whether gathered parameters stay gathered between passes, which takes the memory of the
                full model. If False, every pass gathers them again; see `par_zero.no_sync`.

        Raises:
            ValueError: A plugin does not support it.
        """
        for plugin in self.plugins:
            if not plugin.supports_no_sync:
                raise ValueError(f"plugin {plugin.name!r} does not support no_sync(); run each backward with its step")
        # A plugin that replaces ZeRO may leave the model without it; its gradients then accumulate anyway.
        deferring = getattr(model, "no_sync", None)  # par-zero's own, also on the wrapper of torch.compile
        with nullcontext() if deferring is None else deferring() if keep else deferring(keep=False):
            yield

    def router_metrics(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the routing metrics of a mixture of experts since the last call, identical on all ranks. Collective.

        Args:
            model: The model that `initialize` returned.

        Returns:
            fp64 scalars, each only if a router has counted it. "aux" and "z": the losses of all routers, the mean over
            microbatches and ranks. "imbalance": the tokens of the busiest expert of a layer divided by the layer's
            mean, the highest of all layers. "dropped": tokens beyond an expert's capacity, of all ranks.
        """
        self._bundle_with(model)
        return RouterLosses(model).take(self.groups)

    def expert_load(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tokens of each expert in the latest step, over all ranks, by the router's name. Collective.

        Args:
            model: The model that `initialize` returned.

        Returns:
            int64 [E] on the CPU for each router of all stages; empty before the first step.
        """
        self._bundle_with(model)
        return RouterLosses(model).load(self.groups)

    def digest(self, model: nn.Module) -> Digest:
        """Return a digest of a model's trained weights that no topology changes, identical on all ranks. Collective.

        It reads the weights that the optimizer steps: the fp32 master weights, if there are any. Runs with canonical
        numerics have equal digests after equal steps; other runs usually differ in the last bits.

        Args:
            model: The model that `initialize` returned, with its optimizer.

        Raises:
            ValueError: The model is not from `initialize`, or has no optimizer.
        """
        optimizer = self._bundle_with(model).optimizer
        if optimizer is None:
            raise ValueError(f"this {type(model).__name__} has no optimizer; pass a model that is trained")
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        settle_(tensors)  # a thread may still step some of them
        return digest_of(((str(number), tensor) for number, tensor in enumerate(tensors)), dist.group.WORLD)

    # The end

    def close(self) -> None:
        """End everything that this strategy has started, and drop all references; a second call does nothing.

        That includes the connections of its pipelines, the workers of its data loaders, its groups, and
        torch.distributed if it was started here. It waits for no other rank. Models keep their parameters, at stage 3
        only this rank's shard, and cannot be trained any more.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last_first:  # if one of these raises, the rest still runs
            last_first.callback(self.started.close)
            for reference, _ in self._state.loaders:
                if (loader := reference()) is not None:
                    last_first.callback(loader.close)
            last_first.callback(self._batches.clear)
            for execution in self._executions.values():
                last_first.callback(execution.close)
            for hook in self._hooks:
                last_first.callback(hook.remove)
        for kept in (self._bundles, self._state.loaders, self._checkpoints, self._executions, self._hooks):
            kept.clear()
        self._checked_losses.clear()

    def __enter__(self) -> "Strategy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bundle_with(self, model: nn.Module) -> ModelBundle:
        self._check_open()
        bundle = next((each for each in self._bundles if any(one is model for one in each.models)), None)
        if bundle is None:
            raise ValueError(f"this {type(model).__name__} is not from initialize(); pass the model that it returned")
        return bundle

    def _bundle_of(self, optimizer: Optimizer | None) -> ModelBundle:
        self._check_open()
        bundle = next((each for each in self._bundles if each.optimizer is optimizer), None)
        if bundle is None or optimizer is None:
            kind = type(optimizer).__name__
            raise ValueError(f"this {kind} is not from initialize(); pass the optimizer that it returned")
        return bundle

    def _execution(self, model: nn.Module) -> Execution:
        bundle = self._bundle_with(model)
        if model not in self._executions:
            schedule, options = self.schedule or self.make_schedule(), self.options.pipeline_keywords
            for name in ("schedule", "microbatches"):
                options.pop(name, None)
            kind = Execution if self._grid is None else LaneExecution
            self._executions[model] = kind(model, schedule, self.groups, bundle.optimizer, options, bundle.loss_factor)
        return self._executions[model]
