"""Checks of the `TrainingArguments` and of the Trainer that a strategy cannot be combined with."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from par_layers.pretrained import unlike_causal

from ..strategy.strategy import Strategy
from ._options import said

REFUSED = {
    "fsdp": "strategy=dict(zero=3)",
    "deepspeed": "strategy=dict(zero=...), and memory= for what leaves the device",
    "parallelism_config": "strategy=dict(parallel=...)",
    "ddp_find_unused_parameters": "nothing: parameters without a gradient are found",
    "ddp_bucket_cap_mb": "strategy=dict(zero=dict(stage=..., overlap=dict(bucket=...)))",
    "ddp_broadcast_buffers": "nothing: buffers are each rank's own",
    "ddp_static_graph": "nothing: no graph is recorded",
    "torch_compile": "a plugin of the strategy that compiles modules",
    "auto_find_batch_size": "per_device_train_batch_size; Strategy.plan(model) says what a batch takes",
    "fp16_full_eval": "strategy=dict(precision=...), which evaluates in it too",
    "bf16_full_eval": "strategy=dict(precision=...), which evaluates in it too",
    "save_on_each_node": "an output_dir that all nodes share",
}
"""Arguments that must not be set, and the option to use instead."""


def check_arguments(args: Any, given: Mapping[str, Any] | Strategy | None) -> None:
    """Check that no argument sets what a strategy sets.

    Args:
        args: The `TrainingArguments`.
        given: The strategy's keywords, or the strategy.

    Raises:
        ValueError: An argument does; the message names the option to use instead.
    """
    for name, instead in REFUSED.items():
        value = getattr(args, name, None)
        # None is the default of DDP's options, and False is a choice.
        if value or (name.startswith("ddp_") and value is not None):
            raise ValueError(f"TrainingArguments has {name}={value!r}; leave it out and give {instead}")
    clip_norm = said(given, "clip_norm")
    if clip_norm is not None:
        raise ValueError(
            f"the strategy has clip_norm={clip_norm}; leave it out: TrainingArguments(max_grad_norm=...) says it"
        )
    recompute = said(given, "recompute")
    if recompute and (getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing):
        raise ValueError(
            f"TrainingArguments checkpoints activations, and the strategy has recompute={recompute!r}: both compute "
            "again; give one"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, which is nn.DataParallel; start one for each with torchrun"
        )
    if dist.is_initialized() and dist.get_world_size() != args.world_size:
        raise ValueError(
            f"there are {dist.get_world_size()} ranks, of which TrainingArguments sees {args.world_size}; on CPUs give "
            "use_cpu=True, and start the ranks with torchrun before they are made"
        )


def check_trainer(trainer: Any, loss: Any, strategy: Strategy) -> None:
    """Check that the strategy can compute a trainer's loss from its batches.

    Args:
        trainer: The trainer.
        loss: `Trainer.compute_loss` of transformers.
        strategy: The strategy.

    Raises:
        ValueError: It cannot; the message names the argument to change.
    """
    args, groups = trainer.args, strategy.groups
    together = [axis for axis in ("tensor", "pipeline", "sequence") if groups.size(axis) > 1]
    if together and args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' gives each rank rows of its own, and the "
            f"{together[0]} ranks of a replica have the same; use 'random' or 'group_by_length'"
        )
    cut = [name for name in ("pipeline", "sequence", "tensor") if groups.size(name) > 1]
    if not cut:
        return
    over = f"{cut[0]}={groups.size(cut[0])}"
    own = {"compute_loss of its own": type(trainer).compute_loss is not loss}
    if cut[0] != "tensor":
        own["compute_loss_func"] = trainer.compute_loss_func is not None
        own["label_smoothing_factor"] = args.label_smoothing_factor != 0
    for name, has in own.items():
        if has:
            raise ValueError(
                f"this {type(trainer).__name__} has a {name}, and over {over} no rank need have whole logits: the loss "
                "is the model's own causal one; leave it out, or use zero= and data ranks alone"
            )
    other = unlike_causal(trainer.model) if cut[0] != "tensor" else None
    if other is not None:
        raise ValueError(
            f"{over}: there the loss of a {type(trainer).__name__} is that of the next token, and {other}; use zero= "
            "and data or tensor ranks, or pass a criterion to Strategy.execute_pipeline in a loop of your own"
        )
