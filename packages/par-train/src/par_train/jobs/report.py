"""What the master of the main job says before and after it trains."""

import math
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from par_groups import Topology

from ..run.output import say
from ..run.progress import interval, short
from ..strategy.setup import Setup
from .options import ModelOptions, Options
from .text import Text
from .training import Training

UNIFORM = math.log(256)
"""The loss of a model that thinks every byte equally likely, in nats."""

_COLUMNS = 80


def print_banner(options: Options, topology: Topology, trainer: Training, origin: str | None = None) -> None:
    """Says what is about to happen.

    Args:
        options: The options of the run.
        topology: Its ranks.
        trainer: The trainer, which has restored the checkpoint that the run goes on from.
        origin: The folder of that checkpoint; None: the run starts anew.
    """
    about = trainer.about(topology)
    say("\n".join(_drawn(topology)))
    _row("model", *about["model"])
    _row("precision", f"{options.precision}, ZeRO stage {options.zero}")
    if trainer.schedule is not None:
        _row("pipeline", f"{options.pipeline.schedule}, {trainer.schedule.microbatches} microbatches")
    for label in ("data", "batch"):
        _row(label, *about[label])
    print_spent(trainer.strategy)
    _row("device", f"{trainer.device.type}; CPU threads a rank: {torch.get_num_threads()}")
    place = f"goes on after step {trainer.step}" if trainer.step else "starts at step 0"
    _row("output", options.output_folder, f"{place} of {options.train.steps}")
    tiers, copies = options.checkpoint.tiers, options.checkpoint.copies
    if tiers:
        kept = f", of each host's own, on {copies} host{'s' * (copies > 1)} each" if copies else ""
        first = f"first to {tiers[0]}{kept}"
        then = [f"then to {tier}" for tier in tiers[1:]]
        _row("saves", first, *then, *([] if origin is None else [f"goes on from {origin}"]))


def print_spent(strategy: Setup) -> None:
    """Says what a budget of memory is spent on, if there is one: at first, and when the first step was measured."""
    if strategy.spent is not None:
        _row("memory", *strategy.spent.reasons)


def about_gpt(options: Options, text: Text, parameters: int, replicas: int) -> Mapping[str, Sequence[str]]:
    """What the banner says of a byte-level GPT: lines by label.

    Args:
        options: The options of the run.
        text: What it is trained on.
        parameters: Elements of the whole model.
        replicas: The number of data ranks.
    """
    shape, batch, data = options.model, options.train.batch_size, options.data
    what = "windows" if data.packing == "auto" else "rows"
    packed = [] if data.packing == "auto" else [f"packed {data.documents}, {data.packing}"]
    return {
        "model": [
            f"byte-level GPT, {parameters:,} parameters",
            f"{shape.layers} layers, width {shape.width}, {shape.heads} heads, context {shape.context}",
            *([_about_experts(shape)] if shape.experts else []),
        ],
        "data": [
            end_of(str(text.folder)),
            f"{text.files:,} files, {len(text.train):,} bytes to train on, {len(text.held_out):,} held out",
        ],
        "batch": [f"{batch} {what} of {shape.context} bytes, {batch // replicas} a replica", *packed],
    }


def _about_experts(model: ModelOptions) -> str:
    """What the banner says of experts: how many, and what keeps them equally busy."""
    balance = {"aux": model.aux, "z": model.z, "bias_rate": model.bias_rate, "capacity": model.capacity}
    kept = [f"{name} {value:g}" for name, value in balance.items() if value]
    shared = f" and {model.shared} shared" if model.shared else ""
    return ", ".join([f"{model.experts} experts of {model.features}, {model.top_k} a byte{shared}", *kept])


def print_summary(
    options: Options, lines: Sequence[dict[str, Any]], step: int, ended_by: int, guess: float = UNIFORM
) -> None:
    """Says what has happened, and which files it left.

    Args:
        options: The options of the run.
        lines: The lines of its metrics.
        step: The step at which it has ended.
        ended_by: The signal that ended it, or 0.
        guess: The loss of a model that thinks everything equally likely.
    """
    if ended_by:
        say(
            f"par-train: {signal.Signals(ended_by).name}: saved after step {step} of {options.train.steps}; "
            f"go on with --resume auto",
            sys.stderr,
        )
    if lines:
        _print_results(lines, guess)
    for path in options.files.present():
        say(f"wrote {path}")


def _print_results(lines: Sequence[dict[str, Any]], guess: float) -> None:
    last, validated = lines[-1], [line for line in lines if "validation_loss" in line]
    rate = short(last["tokens"] / max(last["seconds"], 1e-3))
    _row("trained", f"{last['step']} steps in {interval(last['seconds'])}, {rate} tokens/s all included")
    _row("loss", f"{last['loss']:.4f} at the last step; a guess has {guess:.4f}")
    if validated:
        newest = validated[-1]
        perplexity = f", perplexity {newest['perplexity']:.4g}" if newest.get("perplexity") else ""
        _row("held out", f"{newest['validation_loss']:.4f} at step {newest['step']}{perplexity}")
    skipped = sum("skipped" in line for line in lines)
    if skipped:
        _row("skipped", f"{skipped} steps, whose gradient was not finite")


def _drawn(topology: Topology) -> list[str]:
    """The topology as a table, without the axes that have one rank; "model" would be too wide."""
    left_out = ["model", *(name for name in (*topology.axes, *topology.products) if topology.size(name) == 1)]
    lines = [line for line in topology.describe().splitlines() if line.split()[0] not in left_out]
    return lines if topology.world_size > 1 else lines[:1]


def _row(label: str, *lines: str) -> None:
    say(f"{label:<11}" + ("\n" + 11 * " ").join(lines))


def end_of(text: str) -> str:
    """As much of the end of a path as fits into a line."""
    room = _COLUMNS - 11
    return text if len(text) <= room else "..." + text[3 - room :]
