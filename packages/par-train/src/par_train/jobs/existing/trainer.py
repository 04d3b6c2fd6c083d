"""One rank's part of an existing model and place in its rows: what a step computes, and what a checkpoint holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from par_checkpoint import Checkpoints, Format, Save
from par_data import IGNORED
from par_groups import ProcessGroups, Topology, together
from par_plan import PretrainedShape, model_flops
from par_precision import precision_of

from ..._errors import UserError
from ...strategy.axes import data_axes
from ...strategy.pretrained.adapters import write_config
from ...strategy.pretrained.make import make_on_meta
from ..checkpoint import Origin, TrainingState, write_checkpoint
from ..options import Options
from ..order import Windows, spread
from ..report import end_of
from ..training import Training, make_optimizer
from .adapter import adapter_parts, lora_config
from .data import ModelData, kept_options
from .folder import ModelFolder
from .prompts import Prompts


class ModelTrainer(Training):
    """Trains a model of transformers, or an adapter of one, on rows of tokens.

    Args:
        options: Options of the run, equal on every rank.
        data: The model's folder and its rows, equal on every rank.
        groups: Who works together.
        device: Where this rank computes.

    Raises:
        ValueError: The model cannot be made, or not be cut in this way; on every rank.
    """

    unit = "token"

    def __init__(self, options: Options, data: ModelData, groups: ProcessGroups, device: torch.device) -> None:
        super().__init__(options, groups, device)
        self._data = data
        self.title = data.folder.name
        self.guess = math.log(data.folder.vocabulary or data.vocabulary)
        cut = self.strategy.sequence_ranks
        if self.context % cut and self.strategy.context.ranks == 1:  # else rows are filled up
            raise UserError(
                f"data.context {self.context} does not divide by {cut} tensor ranks, which have a part of each row "
                f"under sequence_parallel; use {self.context - self.context % cut}"
            )
        loader = DataLoader(data.train, batch_size=options.train.batch_size, sampler=data.train.sampler, drop_last=True)
        self._prompts = Prompts(options, data)
        model = self._make_model()
        model, optimizer, self._loader = self.strategy.initialize(model, make_optimizer(model, options.train), loader)
        self._take(model, optimizer)
        self._validation = spread(data.held_out.count(0), options.data.validation_windows)

    def _make_model(self) -> nn.Module:
        """This rank's part of the model, in training mode."""
        options, folder = self.options, self._data.folder
        return self.strategy.from_pretrained(
            folder.path,
            dtype=weights_dtype(options, folder),
            attention=options.model.attention or None,
            adapter=lora_config(options, folder),
            weights=bool(folder.weights),
        ).train()

    @property
    def context(self) -> int:
        """Tokens in a row."""
        return self._data.folder.context

    def about(self, topology: Topology) -> Mapping[str, Sequence[str]]:
        """The model's folder, the file, and rows."""
        folder, data, batch = self._data.folder, self._data, self.options.train.batch_size
        replicas = topology.size(data_axes(topology))
        formats = ", ".join(sorted(data.formats))
        weights = end_of(str(folder.path)) if folder.weights else f"random weights, seed {self.options.seed}"
        train, held_out = data.documents
        parts = [f" x {source['weight']:g}" for source in self.options.data.sources] or [""]
        return {
            "model": [f"{self.title}, {self.parameters:,} parameters", weights],
            "data": [
                *(f"{end_of(path)}{part}" for path, part in zip(data.corpora, parts, strict=True)),
                f"{formats}: {data.tokens:,} tokens; {train:,} documents, {held_out:,} held out",
            ],
            "batch": [f"{batch} rows of {self.context} tokens, {batch // replicas} a replica"],
        }

    @property
    def flops(self) -> float | None:
        """Operations of the whole model for one token, causal attention counted as half; None with an adapter.

        The backward of an adapter leaves out most of them, and no formula here says which.
        """
        if self.options.adapter.rank:
            return None
        made = make_on_meta(str(self._data.folder.path), torch.float32, self.options.model.attention or None)
        return model_flops(PretrainedShape(made, context=self.context))

    def _forward_backward(self) -> tuple[Tensor, Tensor]:
        """The mean over this replica's targets, of which the rows of another one may have more or fewer."""
        self.on_phase("data")
        batch = next(iter(self._loader))
        self.on_phase("step")
        loss = self.strategy.execute_pipeline(iter([batch]), self.model, None, self.optimizer)
        cut = batch.get("num_items_in_batch")  # of the whole rows, of which a sequence rank has some tokens
        return loss, target_count(batch) if cut is None else cut

    def _evaluate(self, rows: Windows, count: int) -> Tensor:
        """The ranks of a replica have the same numbers, on whatever stage they are."""
        batch = default_collate([self._data.held_out[0, int(row)] for row in rows])
        batch["labels"][count:] = IGNORED
        targets = target_count(batch).to(self.device, torch.float64)
        loss = self.strategy.execute_pipeline(iter([batch]), self.model, None, forward_only=True)
        return torch.stack([torch.where(targets > 0, loss * targets, 0.0), targets])

    def write_samples(self) -> list[dict[str, str]]:
        """What the model goes on with after each prompt, always by its most likely token. Collective."""
        if not self._prompts.tokens:
            return []
        texts = self.strategy.sample(self.model, self._prompts.tokens, self.options.sample.tokens)
        return self._prompts.written(texts)

    def state(self, seconds: float) -> TrainingState:
        """Progress, the digests of model and tokens, and what may not change."""
        return TrainingState(
            step=self.step,
            samples=self.samples,
            seconds=seconds,
            text=self._data.digest,
            model=self._data.folder.digest,
            kept=kept_options(self.options, self.context),
        )

    def save(self, place: Path | Checkpoints, state: TrainingState) -> Save:
        """A folder that transformers opens, with the tokenizer's files and what is written of the model as they are.

        Of a model with an adapter, the adapter alone: peft opens it, and transformers where the model is still there.
        """
        folder = self._data.folder
        if self.options.adapter.rank:
            with TemporaryDirectory() as made:
                with together("the adapter's config", None):
                    write_config(self.model, made)
                assets = [folder.path, *Path(made).iterdir()]
                return write_checkpoint(place, state, **self._parts(assets))
        names = ["generation_config.json"]
        stored, written = folder.dtype, precision_of(self.options.precision).weights
        written = written or weights_dtype(self.options, folder)
        if stored is None or f"torch.{stored}" == str(written):
            names.append("config.json")  # else transformers says in it which dtype the weights have now
        assets = [folder.path, *(folder.path / name for name in names if (folder.path / name).is_file())]
        return write_checkpoint(place, state, **self._parts(assets))

    def _parts(self, assets: Sequence[Path] | None = None) -> dict[str, Any]:
        """Return the keywords with which par-checkpoint saves or loads model or adapter, optimizer and loss scale.

        Args:
            assets: Files that a save copies next to the tensors.
        """
        of_model: dict[str, Any] = {"model": self.model, "format": Format()}
        if self.options.adapter.rank:
            of_model = adapter_parts(self.model)
        of_model["format"] = replace(of_model["format"], assets=assets)
        return {**of_model, "optimizer": self.optimizer, "scheduler": self.optimizer.scaling}

    def _load(self, origin: Origin) -> None:
        """Also goes to the row after the last one that was trained on.

        Raises:
            UserError: The position does not lie between two batches of this size.
        """
        try:
            self._loader.load_state_dict({"samples": origin.state.samples})
        except ValueError as error:
            raise UserError(f"train.batch_size {self.options.train.batch_size}: {error}") from None
        origin.load(**self._parts())


def weights_dtype(options: Options, folder: ModelFolder) -> torch.dtype:
    """The dtype in which weights are read, before the precision is applied.

    Where the precision keeps weights in 16 bits, and so does the folder, reading 32 would only take memory.
    """
    if options.model.dtype != "auto":
        named: torch.dtype = getattr(torch, options.model.dtype)
        return named
    wanted = precision_of(options.precision).weights
    return wanted if wanted is not None and str(wanted) == f"torch.{folder.dtype}" else torch.float32


def target_count(batch: Mapping[str, Any]) -> Tensor:
    """The number of targets in a batch of rows: of labels behind a row's first token that count."""
    labels: Tensor = batch["labels"]
    return (labels[:, 1:] != IGNORED).sum()
