"""A Hugging Face Transformers model, or an adapter of one, as a job trains it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from par_checkpoint import Format
from par_groups import together
from par_layers.pretrained import check_packed_rows, make_on_meta, pretrained_of, write_config
from par_plan import PretrainedShape, model_flops
from par_precision import precision_of

from ..._errors import as_user_error
from ...run.output import end_of
from ...strategy.strategy import Strategy
from ..options import Options
from ..recipe import BatchDict, JobData, Recipe
from .folder import ModelFolder
from .prompts import Prompts


class PretrainedModel(Recipe):
    """A model from a folder that transformers writes, with its weights or with random ones.

    Args:
        options: Options of the run, the same on every rank.
        folder: Folder of the model.
        data: Rows of tokens, whose format decides how prompts are encoded.
    """

    unit = "token"

    def __init__(self, options: Options, folder: ModelFolder, data: JobData) -> None:
        self.options, self.folder = options, folder
        self.title, self.source_digest = folder.name, folder.digest
        self.plan = "peft" if options.adapter.rank else "huggingface"
        self._prompts = Prompts(options, folder, is_chat=data.formats == {"chat"})

    def make_model(self, strategy: Strategy) -> nn.Module:
        """Make this rank's part of the model, in training mode. Collective.

        Raises:
            UserError: The model cannot separate the documents of packed rows; on every rank.
        """
        model = strategy.from_pretrained(
            self.folder.path,
            dtype=weights_dtype(self.options, self.folder),
            attention=self.options.model.attention or None,
            adapter=_lora_config(self.options, self.folder),
            weights=bool(self.folder.weights),
        )
        with as_user_error(f"{str(self.folder.path)!r}: "):
            check_packed_rows(pretrained_of(model))
        return model.train()

    def prepare(self, batch: BatchDict) -> tuple[BatchDict, None]:
        """Return the batch as it is: the model computes its own loss from a dict."""
        return batch, None

    def describe(self) -> Sequence[str]:
        """Return where the weights are from."""
        is_read = bool(self.folder.weights)
        return [end_of(str(self.folder.path)) if is_read else f"random weights, seed {self.options.seed}"]

    @property
    def flops(self) -> float | None:
        """Operations for one token, forward and backward, with causal attention at half; None with an adapter.

        An adapter's backward omits most of them, and no formula here counts which.
        """
        if self.options.adapter.rank:
            return None
        made = make_on_meta(str(self.folder.path), torch.float32, self.options.model.attention or None)
        return model_flops(PretrainedShape(made, context=self.folder.context))

    def kept_options(self) -> dict[str, Any]:
        """Return the seed, the adapter, the precision and how documents are packed."""
        options, adapter = self.options, asdict(self.options.adapter)
        return {
            "seed": options.seed,
            "data.context": self.folder.context,
            "data.packing": options.data.rows,
            "data.validation_fraction": options.data.validation_fraction,
            **({"data.sources": [dict(source) for source in options.data.sources]} if options.data.sources else {}),
            **{
                f"adapter.{name}": list(value) if isinstance(value, tuple) else value for name, value in adapter.items()
            },
            "precision": options.precision,
        }

    def format(self, model: nn.Module, held: ExitStack) -> Format:
        """Return a format with the files that make the checkpoint a folder of transformers, or of peft."""
        if self.options.adapter.rank:
            made = held.enter_context(TemporaryDirectory())
            with together("the adapter's config", None):
                write_config(model, made)
            return Format(assets=[self.folder.path, *Path(made).iterdir()])
        names = ["generation_config.json"]
        # A config that names another dtype than the files have would make transformers convert on load.
        stored, written = self.folder.dtype, precision_of(self.options.precision).weights
        written = written or weights_dtype(self.options, self.folder)
        if stored is None or f"torch.{stored}" == str(written):
            names.append("config.json")  # otherwise transformers writes one with the dtype that weights have now
        copied = [self.folder.path / name for name in names if (self.folder.path / name).is_file()]
        return Format(assets=[self.folder.path, *copied])  # the tokenizer's files are in the folder

    def write_samples(self, strategy: Strategy, model: nn.Module) -> list[dict[str, str]]:
        """Continue each prompt, always with the most likely token. Collective."""
        if not self._prompts.tokens:
            return []
        return self._prompts.written(strategy.sample(model, self._prompts.tokens, self.options.sample.tokens))


def weights_dtype(options: Options, folder: ModelFolder) -> torch.dtype:
    """Return the dtype in which weights are read, before the precision is applied.

    If the precision keeps weights in the 16-bit dtype of the folder, reading them in 32 bits would only take memory.
    """
    if options.model.dtype != "auto":
        named: torch.dtype = getattr(torch, options.model.dtype)
        return named
    wanted = precision_of(options.precision).weights
    return wanted if wanted is not None and str(wanted) == f"torch.{folder.dtype}" else torch.float32


def _lora_config(options: Options, folder: ModelFolder) -> Any:
    """Return the `LoraConfig` of peft that the options describe; None if no adapter is trained.

    Args:
        options: Options of the run.
        folder: Folder of the model, whose path the config has.
    """
    adapter = options.adapter
    if not adapter.rank:
        return None
    return import_module("peft").LoraConfig(
        r=adapter.rank,
        lora_alpha=2 * adapter.rank if adapter.alpha == "auto" else adapter.alpha,
        target_modules=list(adapter.targets) or "all-linear",
        lora_dropout=adapter.dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder.path.resolve()),
    )
