"""The output of rank 0 before and after a job trains."""

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from par_groups import Topology, data_axes

from ..run.output import say
from ..run.progress import interval, short
from ..strategy.setup import Setup
from .options import Options

if TYPE_CHECKING:
    from .trainer import Trainer


def print_banner(options: Options, topology: Topology, trainer: "Trainer") -> None:
    """Print the banner: ranks, model, data, and where the run starts.

    Args:
        options: Options of the run.
        topology: Topology of the ranks.
        trainer: The trainer, which has restored the checkpoint.
    """
    recipe, data, batch = trainer.recipe, trainer.data, options.train.batch_size
    replicas = topology.size(data_axes(topology))
    rows = "rows" if options.model.folder or options.data.packing != "auto" else "windows"
    # Axes with one rank say nothing, and the product "model" would make the table too wide.
    left_out = ["model", *(name for name in (*topology.axes, *topology.products) if topology.size(name) == 1)]
    drawn = [line for line in topology.describe().splitlines() if line.split()[0] not in left_out]
    say("\n".join(drawn if topology.world_size > 1 else drawn[:1]))
    _row("model", f"{recipe.title}, {trainer.parameters:,} parameters", *recipe.describe())
    _row("precision", f"{options.precision}, ZeRO stage {options.zero}")
    schedule = trainer.strategy.schedule
    if schedule is not None:
        _row("pipeline", f"{options.pipeline.schedule}, {schedule.microbatches} microbatches")
    _row("data", *data.summary)
    _row("batch", f"{batch} {rows} of {data.context} {recipe.unit}s, {batch // replicas} a replica")
    print_spent(trainer.strategy)
    _row("device", f"{trainer.strategy.device.type}; CPU threads a rank: {torch.get_num_threads()}")
    place = f"resumes after step {trainer.step}" if trainer.step else "starts at step 0"
    _row("output", options.output_folder, f"{place} of {options.train.steps}")
    tiers, copies = options.checkpoint.tiers, options.checkpoint.copies
    if tiers:
        kept = f", of each host's own, on {copies} host{'s' * (copies > 1)} each" if copies else ""
        first = f"first to {tiers[0]}{kept}"
        then = [f"then to {tier}" for tier in tiers[1:]]
        _row("saves", first, *then)


def print_spent(strategy: Setup) -> None:
    """Print the use of a memory budget, if set: at the start, and after the first step was measured."""
    if strategy.spent is not None:
        _row("memory", *strategy.spent.reasons)


def print_summary(options: Options, lines: Sequence[dict[str, Any]], step: int, ended_by: int, guess: float) -> None:
    """Print the results of a run, and the files that it wrote.

    Args:
        options: Options of the run.
        lines: Lines of its metrics.
        step: Step at which it has ended.
        ended_by: Signal that ended it, or 0.
        guess: Loss of a model that gives every token the same probability.
    """
    if ended_by:
        say(
            f"par-train: {signal.Signals(ended_by).name}: saved after step {step} of {options.train.steps}; "
            f"go on with --resume auto",
            sys.stderr,
        )
    if lines:
        _print_results(lines, guess)
    files, tiers = options.files, options.checkpoint.tiers
    if step:
        say(f"wrote {tiers[-1] if tiers else files.folder}/{files.checkpoints.name}/step-{step:08d}")
    for path in files.present():
        if path != files.checkpoints:
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
    # Some skipped steps are usual while a loss scale of fp16 settles; many of them explain a poor loss.
    skipped = sum("skipped" in line for line in lines)
    if skipped:
        _row("skipped", f"{skipped} steps, whose gradient was not finite")


def _row(label: str, *lines: str) -> None:
    say(f"{label:<11}" + ("\n" + 11 * " ").join(lines))
