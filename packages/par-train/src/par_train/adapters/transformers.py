"""transformers' `Trainer` on a `Strategy`: its loop, its callbacks and its files, under any parallelism.

    trainer = ParTrainer(model, args, train_dataset=rows, strategy=dict(parallel=..., zero=3))

The Trainer's accelerator is a `ParAccelerator`. With a pipeline or a split sequence no rank can call the model, so each
batch runs through `Strategy.execute_pipeline`. Otherwise the loop is the Trainer's own.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import together
from par_layers import parallelization_of
from par_layers.pretrained import IGNORE_INDEX, has_adapters, logits_of, next_labels, weigh_auxiliary_losses_

from ..strategy.strategy import Strategy
from ._options import make_strategy, missing

try:
    from transformers import Trainer
    from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
except ImportError as error:
    raise missing("transformers", "transformers", "trainer") from error

from ._arguments import check_arguments, check_trainer
from .accelerate import ParAccelerator


class _Accelerator(ParAccelerator):
    """The accelerator of a Trainer, which runs pipeline stages by `Strategy.execute_pipeline`."""

    calls_models = False


class ParTrainerMixin:
    """A mixin that runs a subclass of transformers' `Trainer`, such as a trainer of TRL, on a strategy.

    Args:
        *args: Arguments of the trainer.
        strategy: A `par_train.Strategy`, or its keywords, such as dict(parallel=..., zero=3). Default: data parallel.
        **trainer: Keywords of the trainer.

    Attributes:
        strategy: The strategy.

    Raises:
        ValueError: An argument sets what the strategy sets; on every rank.

    Example:
        class ParSFTTrainer(ParTrainerMixin, SFTTrainer): ...
    """

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    accelerator: ParAccelerator
    strategy: Strategy

    def __init__(self, *args: Any, strategy: Mapping[str, Any] | Strategy | None = None, **trainer: Any) -> None:
        self._given = strategy
        try:
            super().__init__(*args, **trainer)
            check_trainer(self, Trainer.compute_loss, self.strategy)
        except Exception:
            if hasattr(self, "strategy") and self.strategy is not strategy:
                self.strategy.close()
            raise

    # Before training

    def _build_accelerator_args(self, **keywords: Any) -> dict[str, Any]:
        """Return the arguments of the accelerator; the strategy gets the others."""
        kept = {name: keywords[name] for name in ("dataloader_config", "gradient_accumulation_plugin")}
        self._told: dict[str, Any] = {"cpu": self.args.use_cpu, "mixed_precision": "no", **kept}
        return self._told

    def create_accelerator_and_postprocess(self) -> None:
        """Make a `ParAccelerator` with the arguments of the Trainer's own accelerator, and replace it."""
        args = self.args
        check_arguments(args, self._given)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.strategy = make_strategy(
            self._given,
            precision=args.mixed_precision,
            said_by=f"TrainingArguments({args.mixed_precision}=True)",
            device="cpu" if args.use_cpu else "auto",
            seed=args.seed,
        )
        self.accelerator = _Accelerator(strategy=self.strategy, **self._told)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=args.eval_use_gather_object
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the strategy moves the model once it has sharded it."""

    def _prepare_for_training(self, max_steps: int, *others: Any, **keywords: Any) -> Any:
        self._count_parameters()
        self.strategy.comparison.restart()
        ready = super()._prepare_for_training(max_steps, *others, **keywords)  # type: ignore[misc]
        if not self.accelerator._models:  # train() has dropped the model, and stages are not prepared twice
            self.accelerator._models.append(self.model_wrapped)
        return ready

    def _count_parameters(self) -> None:
        """Count the parameters that take arithmetic, once, while the model is not sharded."""
        if not hasattr(self, "_arithmetic") and hasattr(self.model, "num_parameters"):
            self._arithmetic = 6 * self.model.num_parameters(exclude_embeddings=True)

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        """Evaluate as the Trainer does."""
        self.strategy.comparison.restart()
        # A strategy initializes a model once. A model that may be trained later therefore needs its optimizer now.
        if not self.accelerator._models and self.train_dataset is not None:  # type: ignore[attr-defined]
            self._count_parameters()
            self.create_optimizer()  # type: ignore[attr-defined]
            self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        return super().evaluation_loop(*args, **keywords)  # type: ignore[misc]

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: a strategy trains one set of models."""
        raise ValueError(
            "hyperparameter_search() trains many models in a process; start each trial as a run of its own"
        )

    # In each step

    @property
    def _runs_batches(self) -> bool:
        """Whether batches run through `Strategy.execute_pipeline`, because no rank can call the model."""
        return self.strategy.schedule is not None or self.strategy.cuts_sequence

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Run forward and backward of a batch; return its part of the mean loss of the step."""
        if not self._runs_batches:
            self._weigh_auxiliary_losses(model)
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            return loss
        model.train()
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        # The mean counts for each token, and the Trainer divides by the tokens of the whole step.
        mean = self._run(model, inputs, self.optimizer.optimizer)[0]
        count = (next_labels(inputs) != IGNORE_INDEX).sum()
        items = count if num_items_in_batch is None else num_items_in_batch
        replicas = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return (torch.where(count > 0, mean * count, 0.0) / items * replicas).float()

    def _weigh_auxiliary_losses(self, model: nn.Module) -> None:
        """Let the auxiliary losses of a model count once per step, from its first forward on."""
        if getattr(self, "_weighed", None) is not model:
            self._weighed = model
            weigh_auxiliary_losses_(model, shifts=getattr(self, "_loss_shifts_labels", True))

    def _run(self, model: nn.Module, inputs: dict[str, Any], optimizer: Any = None, outputs: bool = False) -> Any:
        """Return the mean loss of a batch and, if requested, its logits on the last stage."""
        rows, least = len(inputs["input_ids"]), self.strategy.make_schedule().microbatches
        # Each microbatch needs a row. A small last batch gets more rows, whose labels do not count.
        if rows < least:
            again = torch.arange(least) % rows
            labels = next_labels(inputs)[again]
            labels[rows:] = IGNORE_INDEX
            inputs = {
                **{name: each[again] for name, each in inputs.items() if name != "labels"},
                "shift_labels": labels,
            }
        run = partial(self.strategy.execute_pipeline, iter([inputs]), model, None)
        if optimizer is not None:
            return run(optimizer), None
        loss, logits = run(return_outputs=True, forward_only=True) if outputs else (run(forward_only=True), None)
        return loss, None if logits is None else logits_of(logits)[:rows]

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss, the logits and the labels of a batch, on every rank."""
        if not self._runs_batches:
            self._weigh_auxiliary_losses(model)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc, no-any-return]
        if not prediction_loss_only and self.strategy.cuts_sequence:
            raise ValueError(
                "predictions were asked for, of sequences that are cut over ranks; give prediction_loss_only=True, or "
                "save the model and predict without the axis"
            )
        model = self.model_wrapped
        model.eval()
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        with torch.no_grad():
            loss, logits = self._run(model, inputs, outputs=not prediction_loss_only)
        loss = loss.float() if inputs.get("labels") is not None else None
        if prediction_loss_only:
            return loss, None, None
        return loss, self._from_last_stage(logits), inputs.get("labels")

    def _from_last_stage(self, logits: Tensor | None) -> Tensor:
        """Return the full logits of the last stage on all stages."""
        known = parallelization_of(self.model)
        if logits is not None and known is not None:
            logits = known.gather(logits)
        schedule, group = self.strategy.schedule, self.strategy.groups["pipeline"]
        if schedule is None:
            return logits  # type: ignore[return-value]  # there is one stage
        last = schedule.rank_of(schedule.stages - 1)
        # Other stages know neither the shape nor the dtype of the logits.
        about: list[Any] = [None if logits is None else (logits.shape, logits.dtype)]
        dist.broadcast_object_list(about, group=group, group_src=last)
        shape, dtype = about[0]
        whole = torch.empty(shape, dtype=dtype, device=self.strategy.device) if logits is None else logits.contiguous()
        dist.broadcast(whole, group=group, group_src=last)
        return whole

    def floating_point_ops(self, inputs: Any) -> float:
        """Return this rank's part of the operations of a batch, which the Trainer sums over all ranks."""
        sharing = self.strategy.environment.world_size // self.accelerator.num_processes
        tokens = inputs[self.model.main_input_name].numel() if hasattr(self, "_arithmetic") else 0
        return tokens * getattr(self, "_arithmetic", 0) / sharing

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of a step over all data ranks."""
        rows: int = self._train_batch_size * args.gradient_accumulation_steps  # type: ignore[attr-defined]
        return rows * self.accelerator.num_processes

    # Files

    @property
    def _plan(self) -> str:
        return "peft" if has_adapters(self.model) else "huggingface"

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the full model as the Trainer's own files, in its own layout. Collective."""
        del state_dict
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        # `save` replaces the folder that it writes, and this one has other files of the Trainer.
        staging = folder / "par_saving"  # a folder that has other files is never replaced
        if not self.accelerator._models:
            raise ValueError("the model is saved before train() or evaluate() has prepared it; save the one you gave")
        self.strategy.save(self.model_wrapped, staging, plan=self._plan)
        with together("saving", None):
            if self.args.should_save:
                for file in staging.iterdir():
                    file.replace(folder / file.name)
                staging.rmdir()
                processing = getattr(self, "processing_class", None) or getattr(self.data_collator, "tokenizer", None)  # type: ignore[attr-defined]
                if processing is not None:
                    processing.save_pretrained(folder)
                torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.strategy.save(self.optimizer.optimizer, output_dir)  # as output_dir/optimizer
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: each rank loads its shards once the model is prepared."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not Path(checkpoint, "optimizer").is_dir():
            raise ValueError(
                f"{checkpoint!r} has no folder `optimizer`, so training cannot go on from it; give a checkpoint of "
                "ParTrainer that was not saved with save_only_model, or make the model from it and begin anew"
            )
        self.strategy.load(self.model_wrapped, checkpoint, plan=self._plan)
        self.strategy.load(self.optimizer.optimizer, checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))
        # The seeds of dropout are a function of the step.
        self.strategy.steps = self.state.global_step

    def _load_best_model(self) -> None:
        self.strategy.load(self.model_wrapped, self.state.best_model_checkpoint, plan=self._plan)


class ParTrainer(ParTrainerMixin, Trainer):  # type: ignore[misc]  # transformers has no types
    """transformers' `Trainer`, with its arguments, on a strategy; see `ParTrainerMixin`."""
