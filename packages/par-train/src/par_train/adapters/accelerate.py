"""Accelerate on a `Strategy`: in a script with an `Accelerator`, a `ParAccelerator` replaces it.

The strategy initializes models and optimizers. Accelerate keeps data loaders, lr schedulers, trackers and the states of
random generators. A "process" of Accelerate is a data rank here: the ranks that share a replica receive its batches.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from par_data import RandomStream, synchronize_draws
from par_groups import parse_size

from ..strategy.strategy import Strategy
from ._options import initialize, make_strategy, missing

try:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState
except ImportError as error:
    raise missing("accelerate", "accelerate", "accelerate") from error

from ._accelerated import OverDataRanks, ParOptimizer, ParScheduler, Refusing, check_keywords

EPOCHS = "par_epochs.json"
"""The file of a saved state with the epoch of each data loader, in the order in which the loaders were prepared."""


class ParAccelerator(OverDataRanks, Refusing, Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An `Accelerator` that trains with a `Strategy`.

    `num_processes` is the number of data ranks, and `process_index` is the index of this rank among them. Batches, lr
    schedulers and `gather` therefore count each sample once. `is_main_process` is true only on rank 0.

    Args:
        strategy: A `par_train.Strategy`, or its keywords, such as dict(parallel=..., zero=3). Default: data parallel.
        mixed_precision: "no", "bf16" or "fp16". The last two are autocast, "bf16-amp" and "fp16-amp" of the strategy.
        cpu: Whether to compute on the CPU even if the host has an accelerator.
        **accelerator: Other keywords of `Accelerator`, with their meaning there.

    Attributes:
        strategy: The strategy, for methods that Accelerate lacks, such as `execute_pipeline` and `sample`.

    Raises:
        ValueError: An argument, or a variable of `accelerate launch`, sets what the strategy sets.

    Example:
        accelerator = ParAccelerator(strategy=dict(parallel=dict(tensor=dict(size=2, mode="1d")), zero=1))
        model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    """

    calls_models = True  # a trainer that runs microbatches through stages sets False
    scaler: Any  # Accelerate's own, as the two below
    _models: list[Any]
    _optimizers: list[Any]

    def __init__(
        self,
        *,
        strategy: Mapping[str, Any] | Strategy | None = None,
        mixed_precision: str | None = None,
        cpu: bool = False,
        **accelerator: Any,
    ) -> None:
        check_keywords(accelerator)
        # The state of an earlier accelerator in this process is shared.
        shared = AcceleratorState().mixed_precision if AcceleratorState._shared_state else None
        mixed_precision = mixed_precision or shared or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        config = accelerator.pop("dataloader_config", None) or DataLoaderConfiguration()
        said = f"mixed_precision={mixed_precision!r}"
        device = "cpu" if cpu else "auto"
        self.strategy = make_strategy(strategy, precision=mixed_precision, said_by=said, device=device)
        place = self.strategy.environment
        if place.world_size > 1:  # Accelerate reads these variables, which SLURM and Open MPI name differently
            for name, number in (("RANK", place.rank), ("WORLD_SIZE", place.world_size)):
                os.environ.setdefault(name, str(number))
            os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
            os.environ.setdefault("LOCAL_WORLD_SIZE", str(place.local_world_size))
        super().__init__(
            mixed_precision=mixed_precision,
            cpu=place.device.type == "cpu",  # else Accelerate would count each rank on a CPU as a job of its own
            dataloader_config=replace(config, dispatch_batches=False),
            **accelerator,
        )
        self.scaler = None  # the strategy's optimizer scales the loss

    # Before training

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare objects as `Accelerator.prepare`. Pass a model and its optimizer in one call. Collective.

        Raises:
            ValueError, TypeError: As `Strategy.initialize`; on every rank.
        """
        if device_placement is not None:
            raise ValueError("device_placement was given to prepare(); everything comes to the strategy's device")
        # Objects that are neither models nor optimizers nor known to Accelerate come back unchanged.
        became = {id(each): each for each in args}
        others = [each for each in args if not _is_the_strategys(each)]
        # Samplers of data loaders read torch's seed, so they are prepared before the strategy sets it.
        for other in others:
            became[id(other)] = self._prepare_one(other, first_pass=True)
        became |= self._initialized([each for each in args if _is_the_strategys(each) and not _is_prepared(each)])
        for each in became.values():
            kept = self._models if isinstance(each, nn.Module) else self._optimizers
            if _is_the_strategys(each) and not any(each is one for one in kept):
                kept.append(each)
        for other in others:  # lr schedulers, which need the prepared optimizers
            became[id(other)] = self._prepare_one(became[id(other)])
        # Trainers prepare some objects twice, and by this mark `prepare` knows those that it has returned before.
        for each in became.values():
            if any(each is one for one in (*self._models, *self._optimizers, *self._schedulers, *self._dataloaders)):
                each._is_accelerate_prepared = True
        result = tuple(became[id(each)] for each in args)
        return result if len(result) > 1 else result[0]

    def _initialized(self, objects: list[Any]) -> dict[int, Any]:
        """Initialize models and optimizers; return the results by the id of each object."""
        if not objects:
            return {}
        for each in objects:
            if isinstance(each, nn.Module) and self.verify_device_map(each):
                raise ValueError(f"this {type(each).__name__} was loaded with a device_map; load it without one")
        # `initialize` replaces the parameters of param groups by shards, so the user's are recorded before.
        groups = [each.param_groups if isinstance(each, Optimizer) else [] for each in objects]
        held = [{id(parameter) for group in own for parameter in group["params"]} for own in groups]
        given = initialize(self.strategy, objects, "use ParTrainer" if self.calls_models else None)
        here = {id(each) for model in given if isinstance(model, nn.Module) for each in model.parameters()}
        for place, optimizer in enumerate(given):
            if isinstance(optimizer, Optimizer):
                # A pipeline keeps only the parameters of this rank's stages, and `model.parameters()` of the user has
                # only those.
                given[place] = ParOptimizer(optimizer, held[place] & here, self.strategy.options.clip_norm)
                self.scaler = given[place].scaling
        return {id(old): new for old, new in zip(objects, given, strict=True)}

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model that is only evaluated. Pass a model that is trained to `prepare`, with its optimizer."""
        del device_placement, evaluation_mode
        prepared: nn.Module = self.prepare(model)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Return a prepared optimizer. Pass any other optimizer to `prepare`, with its model."""
        del device_placement
        prepared: Optimizer = self.prepare(optimizer)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **keywords: Any) -> Any:
        """Prepare a loader as Accelerate does. All ranks draw one order, and a replica the same rows. Collective."""
        if _is_prepared(data_loader):
            return super().prepare_data_loader(data_loader, *args, **keywords)
        sampler = data_loader.sampler if data_loader.batch_sampler is None else data_loader.batch_sampler
        synchronized = ("generator",) if self.num_processes > 1 else ()  # by Accelerate, in each epoch
        draws = RandomStream(states=self.strategy.randomness.loader_states(sampler, leave_out=synchronized))
        with draws.entered():  # some samplers of Accelerate read a seed when they are made
            prepared = super().prepare_data_loader(data_loader, *args, **keywords)
        prepared.base_dataloader = synchronize_draws(
            prepared.base_dataloader, draws.states, rank=self.process_index, num_replicas=self.num_processes
        )
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that steps with the optimizers, once per data rank, as schedulers of Accelerate do."""
        if not _is_prepared(scheduler):
            scheduler = ParScheduler(
                scheduler,
                self._optimizers,
                step_with_optimizer=self.step_scheduler_with_optimizer,
                times=1 if self.split_batches else self.num_processes,
            )
        if not any(scheduler is one for one in self._schedulers):
            self._schedulers.append(scheduler)
        return scheduler

    # In each step

    def backward(
        self, loss: Tensor, *, weight: Tensor | float | None = None, optimizer: Optimizer | None = None, **others: Any
    ) -> None:
        """Run the backward pass of a loss.

        Args:
            loss: A scalar. Without a weight it is divided by `gradient_accumulation_steps`, as Accelerate does.
            weight: The number of items, such as tokens, that the loss is a mean of. Gradients then are the mean over
                all items of all ranks and all passes of the step.
            optimizer: The prepared optimizer of the loss's model; required if there are several optimizers.
            **others: Arguments of `Tensor.backward`, which are not supported.

        Raises:
            ValueError: There are several optimizers or none, and `optimizer` names none of them.
        """
        if others:
            raise ValueError(f"backward() was given {sorted(others)}; it takes a loss, weight= and optimizer=")
        meant = [each for each in self._optimizers if optimizer is None or each is optimizer]
        if len(meant) != 1:
            raise ValueError(
                f"{len(self._optimizers)} optimizers are prepared, and backward() must know which is meant; prepare "
                "a model with its own, and give optimizer= where there are several"
            )
        # With a weight, the optimizer divides by the weights of all passes.
        factor = 1.0 if weight is not None else 1.0 / self.gradient_accumulation_steps
        self.strategy.backward(loss, meant[0].optimizer, weight, factor=factor)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A context in which backward passes accumulate gradients on each rank; see `Strategy.no_sync`."""
        with self.strategy.no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip all gradients of an optimizer in its next step, since sharded gradients are complete only there.

        Args:
            parameters: All parameters that an optimizer trains.
            max_norm: The largest norm of all gradients together; inf for no clipping.
            norm_type: The order of the norm, which must be 2.

        Returns:
            The norm before clipping: an fp64 scalar, NaN until the optimizer has stepped.

        Raises:
            ValueError: `norm_type` is not 2, or an optimizer trains further parameters.
        """
        given = {id(each) for each in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for optimizer in self._optimizers:
            if optimizer.trained <= given:
                norm: Tensor = optimizer.clipping.clip(float(max_norm), norm_type)
                return norm
        raise ValueError(
            f"clip_grad_norm_ was given {len(given)} parameters, which are not all that a prepared optimizer trains; "
            "its gradients have one norm: give it model.parameters()"
        )

    # Files

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model as a folder that transformers opens; see `Strategy.save`. Collective."""
        if not safe_serialization:
            raise ValueError("safe_serialization=False; models are written as safetensors alone")
        size = parse_size(max_shard_size, name="max_shard_size", least=1)
        self.strategy.save(model, save_directory, max_file_size_gb=size / 1e9)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **others: Any) -> str:
        """Write everything that training needs to resume. Collective.

        The folder has a checkpoint of the strategy for models and optimizers, which does not depend on the topology. It
        also has the files of `Accelerator.save_state`, and the epochs of the data loaders.
        """
        with self._without_models():
            folder: str = super().save_state(output_dir, safe_serialization, **others)
        if self.is_main_process:
            Path(folder, EPOCHS).write_text(json.dumps([self._epoch_of(each) for each in self._dataloaders]))
        self.strategy.checkpoint(folder, step=self.strategy.steps)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **others: Any
    ) -> None:
        """Resume from a folder of `save_state`, under this or another topology. Collective."""
        # Accelerate chooses the folder itself if none is given; a hook receives it.
        folders: list[str] = []
        hook = Accelerator.register_load_state_pre_hook(self, lambda _, folder: folders.append(folder))
        try:
            with self._without_models():
                super().load_state(input_dir, load_kwargs, **others)
        finally:
            hook.remove()
        if self.strategy.resume(folders[0]) is None:
            raise ValueError(
                f"{folders[0]!r} holds no checkpoint of a strategy; give a folder of ParAccelerator.save_state"
            )
        epochs = json.loads(Path(folders[0], EPOCHS).read_text())
        for loader, epoch in zip(self._dataloaders, epochs, strict=False):  # some are prepared later
            loader.set_epoch(epoch)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches as Accelerate does. Afterwards the loader itself continues with the next epoch."""
        skipped = super().skip_first_batches(dataloader, num_batches)
        if hasattr(dataloader, "iteration"):
            dataloader.iteration += 1
        return skipped

    def _epoch_of(self, loader: Any) -> int:
        """Return the epoch of a loader that runs, also if it skipped its first batches; else its next epoch."""
        order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        for each in self.gradient_state.dataloader_references:
            if each is not None:
                own = each.sampler if each.batch_sampler is None else each.batch_sampler
                if own is order or getattr(own, "batch_sampler", None) is order:
                    loader = each
        epoch: int = loader.iteration
        return epoch

    @contextmanager
    def _without_models(self) -> Iterator[None]:
        """A context in which Accelerate sees only the objects that it has prepared itself."""
        models, optimizers, scaler = self._models, self._optimizers, self.scaler
        self._models, self._optimizers, self.scaler = [], [], None
        try:
            yield
        finally:
            self._models, self._optimizers, self.scaler = models, optimizers, scaler

    def end_training(self) -> None:
        """End the trackers and the strategy."""
        for tracker in self.trackers:
            tracker.finish()
        self.strategy.close()
        self.state.destroy_process_group()


def _is_the_strategys(value: Any) -> bool:
    return isinstance(value, nn.Module | Optimizer)


def _is_prepared(value: Any) -> bool:
    return getattr(value, "_is_accelerate_prepared", False)
