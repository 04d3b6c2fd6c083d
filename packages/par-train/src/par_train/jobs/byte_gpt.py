"""The byte-level GPT of a job: par-layers' example model with random weights, under every parallelism.

Every byte is a token, so the tokenizer is `numpy.frombuffer`; `byte_rows.py` makes the rows.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from par_checkpoint import Format, load
from par_data import IGNORE_INDEX
from par_layers import ExpertConfig, LayerSet, LoadBalancing, RouterConfig, initialize, layer_set
from par_layers.examples import GPT, GPTStage
from par_pipeline import Batch, PipelineStages, Schedule, partition
from par_plan import model_flops

from .. import __version__
from .._errors import UserError
from ..config.settings import build
from ..strategy.execute import Criterion
from ..strategy.strategy import Strategy
from .byte_rows import PADDING
from .options import ModelOptions, Options
from .recipe import BatchDict, Recipe

VOCABULARY = 256
FORMAT = 4
"""Version of the checkpoint's config.json."""


class ByteGPT(Recipe):
    """A GPT on bytes, whose loss is the mean over all targets of all ranks.

    Args:
        options: Options of the run, the same on every rank.
    """

    title, unit, source_digest = "Byte-level GPT", "byte", ""

    def __init__(self, options: Options) -> None:
        self.options = options

    def make_model(self, strategy: Strategy) -> nn.Module:
        """Make the model, or this rank's stages of it; weights are a function of the seed and their names."""
        self._layers, self._context = strategy.layers, strategy.context
        model, schedule = make_gpt(self.options.model, strategy.layers), strategy.schedule
        own = model if schedule is None else gpt_stages(model, schedule, strategy.groups.rank("pipeline"))
        return fill_(own, self.options.seed, strategy.device)

    def prepare(self, batch: BatchDict) -> tuple[Batch, Criterion]:
        """Take this rank's bytes of each row. No communication: all ranks have the same rows."""
        labels = batch["labels"]
        counts = (labels[:, 1:] != IGNORE_INDEX).sum(1)  # of complete rows, as the loss is over all ranks of a sequence
        has_documents = self.options.data.packing != "auto"
        rows = dict(batch) if has_documents else {name: batch[name] for name in ("input_ids", "labels")}
        # All ranks make the same rows from the same text, so there is nothing to compare.
        part, tokens = self._context.cut(rows, pad=True, compare=False)
        keywords: dict[str, Any] = {}
        if has_documents or tokens.padded != tokens.length:
            keywords["tokens"] = tokens
            if self.options.model.experts:
                keywords["mask"] = part["input_ids"] != PADDING
        # Windows have equally many targets, so that the mean over rows is the mean over targets. A sum is larger by the
        # number of targets, which overflows fp16 under the first loss scale.
        has_mean = not has_documents and bool((counts == counts[0]).all())
        criterion = self._mean if has_mean else self._summed
        return Batch((part["input_ids"],), keywords, (part["shift_labels"], counts)), criterion

    def _mean(self, logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss over a microbatch's targets."""
        return self._layers.cross_entropy(logits, target[0], classes=VOCABULARY)

    def _summed(self, logits: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a microbatch's targets and the number of targets."""
        targets, counts = target
        return self._layers.cross_entropy(logits, targets, classes=VOCABULARY, reduction="sum"), counts.sum()

    def describe(self) -> Sequence[str]:
        """Return sizes, and experts if there are some."""
        model = self.options.model
        lines = [f"{model.layers} layers, width {model.width}, {model.heads} heads, context {model.context}"]
        if model.experts:
            balance = {"aux": model.aux, "z": model.z, "bias_rate": model.bias_rate, "capacity": model.capacity}
            kept = [f"{name} {value:g}" for name, value in balance.items() if value]
            shared = f" and {model.shared} shared" if model.shared else ""
            experts = f"{model.experts} experts of {model.features}, {model.top_k} a byte{shared}"
            lines.append(", ".join([experts, *kept]))
        return lines

    @property
    def flops(self) -> float:
        """Operations for one token, forward and backward, with causal attention at half."""
        return model_flops(self.options.model.shape)

    def kept_options(self) -> dict[str, Any]:
        """Return the seed, the precision, the sizes of the model and how documents are packed."""
        options = self.options
        return {
            "seed": options.seed,
            "data.packing": options.data.packing,
            "data.documents": options.data.documents,
            **{f"model.{each.name}": getattr(options.model, each.name) for each in fields(options.model)},
            "precision": options.precision,
        }

    def format(self, model: nn.Module, held: ExitStack) -> Format:
        """Return a format whose config.json has all options, from which `load_model` rebuilds the model."""
        del model, held
        options = json.loads(json.dumps(asdict(self.options)))
        return Format(config={"format": FORMAT, "par_train": __version__, "options": options})


def make_gpt(options: ModelOptions, layers: LayerSet | None = None) -> GPT:
    """Make the full GPT on the meta device, where it takes no memory.

    Args:
        options: Sizes of the model.
        layers: The layers of a tensor mode; default: those of one device.
    """
    balance = LoadBalancing(
        aux_loss_coef=options.aux, scope="sequence", z_loss_coef=options.z, bias_update_rate=options.bias_rate
    )
    mixture = {
        "intermediate_size": options.features,
        "num_experts": options.experts,
        "top_k": options.top_k,
        "num_shared_experts": options.shared,
        "capacity_factor": options.capacity or None,
        "balance": balance,
        "router": RouterConfig(scoring_func=options.score, correction_bias=options.bias_rate > 0),
        "expert": ExpertConfig(activation="gelu"),
    }
    return GPT(
        layers or layer_set(None),
        VOCABULARY,
        options.width,
        options.heads,
        options.layers,
        options.context,
        tied=options.tied,
        mixture=mixture if options.experts else None,
    )


def gpt_stages(model: GPT, schedule: Schedule, rank: int) -> PipelineStages:
    """Take this rank's pipeline stages of a GPT that is still on the meta device.

    Parameters keep the names that they have in the full model.

    Args:
        model: The full GPT.
        schedule: The pipeline's schedule, which assigns stages to ranks.
        rank: Rank in the pipeline.
    """
    cuts = partition(len(model.blocks), schedule.stages)
    runs = {stage: cuts[stage] for stage in schedule.stage_of(rank)}
    parts = {stage: GPTStage(model, run) for stage, run in runs.items()}
    first = any(part.is_first for part in parts.values())
    last = any(part.is_last for part in parts.values())
    is_tied = model.head.weight is model.tokens.weight
    children: dict[str, nn.Module] = {}
    if first or (last and is_tied):  # a tied classifier uses the table on its own rank
        children["tokens"] = model.tokens
    if first:
        children |= {"positions": model.positions, "dropout": model.dropout}
    # The keys are the numbers of blocks in the full model, so that parameters keep their names.
    children["blocks"] = nn.ModuleDict({str(i): model.blocks[i] for run in runs.values() for i in run})
    if last:
        children |= {"norm": model.norm, "head": model.head}
    tied = {"tokens.weight": model.tokens.weight} if first or last else {}
    return PipelineStages(parts, children, [tied] if is_tied else [])


def fill_(model: nn.Module, seed: int | None, device: torch.device | None = None) -> nn.Module:
    """Draw the weights of a GPT, or of its stages, in place; biases are zero, as in GPT-2.

    Args:
        model: The model on the meta device.
        seed: Seed of the weights, which are the same under every topology; None leaves zeros.
        device: Device of the weights; default: the CPU.
    """
    initialize(model, seed, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    return model


def load_model(path: str | Path) -> GPT:
    """Load the byte GPT of a checkpoint on the CPU. Collective if torch.distributed runs.

    Args:
        path: Folder of the checkpoint, such as `runs/gpt/checkpoints/step-00000800`.

    Raises:
        ValueError: The folder holds no checkpoint, or its format is not this version's.
    """
    if not Path(path).is_dir():
        raise UserError(f"there is no checkpoint {str(path)!r}; pass the folder of one")
    model = make_gpt(load_options_of(Path(path)).model)
    fill_(model, None)
    load(path, model=model)
    return model


def load_options_of(path: Path) -> Options:
    """Read the options that a checkpoint of the byte GPT was trained with.

    Raises:
        ValueError: Its config cannot be read, or its format is not this version's.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        version = config["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(file)!r} is not the config of a byte GPT: {error!r}; pass another checkpoint") from None
    if version != FORMAT:
        raise UserError(
            f"{str(file)!r} has format {version!r}, this par-train reads {FORMAT}; use the one that wrote it"
        )
    return build(Options, config["options"])
