"""One rank's part of the byte-level GPT and place in the text: what a step computes and communicates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_checkpoint import Checkpoints, Save
from par_data import IGNORED, Packing, share
from par_groups import ProcessGroups, Topology
from par_layers import Tokens
from par_pipeline import Batch
from par_plan import model_flops

from ..strategy.axes import data_axes
from .checkpoint import Origin, TrainingState, kept_of_text, save_checkpoint
from .gpt import GPT
from .gpt_stages import gpt_stages
from .options import Options
from .order import DataOrder, Samples, TextRows, TextWindows, Windows, spread
from .report import UNIFORM, about_gpt
from .text import Lengths, Text
from .training import Training, make_optimizer


class LocalBatch(NamedTuple):
    """This rank's part of some windows, or rows.

    Attributes:
        inputs: Bytes, int64 [rows, s], 0 for padding.
        targets: The byte behind each, int64 [rows, s]; -100 where a document ends, and for padding.
        counts: The number of targets in each whole row, int64 [rows].
        tokens: Documents, and which rank has which bytes; None for rows of one document that divide over the ranks.
        mask: Where there is text and no padding, bool [rows, s], for a model with experts; None where all is text.
    """

    inputs: Tensor
    targets: Tensor
    counts: Tensor
    tokens: Tokens | None
    mask: Tensor | None

    @property
    def keywords(self) -> dict[str, Any]:
        """What the model is called with beside its inputs."""
        given = {"tokens": self.tokens, "mask": self.mask}
        return {name: value for name, value in given.items() if value is not None}


class Trainer(Training):
    """Trains a GPT on the text; the ranks of a tensor group hold one replica, which computes its share of each batch.

    Args:
        options: Options of the run, equal on every rank.
        text: The text to train on, equal on every rank; where it has documents, these are packed into rows.
        groups: Who works together; "data" averages gradients, "tensor" shares the layers, "sequence" the bytes of a
            window.
        device: Where this rank computes.
    """

    title, unit, guess = "Byte-level GPT", "byte", UNIFORM

    def __init__(self, options: Options, text: Text, groups: ProcessGroups, device: torch.device) -> None:
        super().__init__(options, groups, device)
        self._text = text
        self.gpt, model = self._make_model()
        self._take(*self.strategy.initialize(model, make_optimizer(self.gpt, options.train)))
        train, held_out = text.documents or (None, None)
        self._train = self._samples(text.train, train, options.data.rows)
        self._held_out = self._samples(text.held_out, held_out, "whole")
        self._order = DataOrder(windows=len(self._train), seed=options.seed)
        self.model.eval()  # in training routers would count
        self._loss(self._part(self._train, self._next_windows()))  # sizes that cannot be cut are said here
        self.model.train()
        self._validation = spread(len(self._held_out), options.data.validation_windows)

    def _make_model(self) -> tuple[GPT, nn.Module]:
        """What this rank has of the GPT, and the module that is trained: the same, or its pipeline stages."""
        options, strategy = self.options, self.strategy
        if strategy.schedule is None:
            model = GPT(options.model, strategy.layers, seed=options.seed, device=self.device)
            return model, model
        rank = self.groups.rank("pipeline")
        return gpt_stages(
            options.model, strategy.layers, strategy.schedule, rank, seed=options.seed, device=self.device
        )

    def _samples(self, text: bytes, documents: Lengths | None, packing: Packing) -> Samples:
        """The windows of a text, or, where it has documents, the rows into which they are packed."""
        if documents is None:
            return TextWindows(text, self.context)
        return TextRows(text, documents, self.context, packing, self.options.seed)

    @property
    def context(self) -> int:
        """Bytes in a window, or row."""
        return self.options.model.context

    def about(self, topology: Topology) -> Mapping[str, Sequence[str]]:
        """Sizes, the folder of text, and windows."""
        return about_gpt(self.options, self._text, self.parameters, topology.size(data_axes(topology)))

    @property
    def flops(self) -> float:
        """Operations of the whole GPT for one token, causal attention counted as half."""
        return model_flops(self.options.model.shape)

    def _forward_backward(self) -> tuple[Tensor, Tensor | float]:
        """The windows of every replica's share have as many targets; its rows may have more or fewer than others'."""
        self.on_phase("data")
        part = self._part(self._train, self._next_windows())
        self.on_phase("step")
        run, inputs = self.strategy.execute_pipeline, (part.inputs,)
        if self._text.documents is None:
            batch = Batch(inputs, part.keywords, part.targets)
            return run(iter([batch]), self.model, self.gpt.loss, self.optimizer), 1.0
        batch = Batch(inputs, part.keywords, (part.targets, part.counts))
        return run(iter([batch]), self.model, self._summed, self.optimizer), part.counts.sum()

    def _summed(self, logits: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of the losses of a microbatch's targets, and their number; both are of whole rows."""
        targets, counts = target
        return self.gpt.loss(logits, targets, "sum"), counts.sum()

    def state(self, seconds: float) -> TrainingState:
        """Progress, the digest of the text, and how it is packed."""
        return TrainingState(
            step=self.step,
            samples=self.samples,
            seconds=seconds,
            text=self._text.digest,
            kept=kept_of_text(self.options.data),
            options=json.loads(json.dumps(asdict(self.options))),
        )

    def save(self, place: Path | Checkpoints, state: TrainingState) -> Save:
        """Weights by name, with the options that make the model again."""
        return save_checkpoint(place, self.model, self.optimizer, self.options, state)

    def _load(self, origin: Origin) -> None:
        """The place in the text is the number of samples."""
        origin.load(model=self.model, optimizer=self.optimizer, scheduler=self.optimizer.scaling)

    def _next_windows(self) -> Windows:
        """This rank's share of the next global batch."""
        batch = self._order.batch(self.samples, self.options.train.batch_size)
        return share(batch, self.replica, self.replicas)

    def _evaluate(self, rows: Windows, count: int) -> Tensor:
        """The last stage of a pipeline alone knows a loss."""
        part = self._part(self._held_out, rows)
        part.targets[count:], part.counts[count:] = IGNORED, 0
        total = self._loss(part)
        if total is None:
            return torch.zeros(2, dtype=torch.float64, device=self.device)
        return torch.stack([total.double(), part.counts.sum().double()])

    def _add_up_(self, total: Tensor) -> None:
        """Also brings the sums from the last stage to the others."""
        super()._add_up_(total)
        if self.groups.size("pipeline") > 1:
            dist.all_reduce(total, group=self.groups["pipeline"])  # all but the last stage bring zeros

    @torch.no_grad()
    def _loss(self, part: LocalBatch) -> Tensor | None:
        """The sum of the losses of a batch, where the model ends."""
        if self.schedule is None:
            return self.gpt.loss(self.model(part.inputs, **part.keywords), part.targets, "sum")
        pipeline = self.strategy.pipeline(self.model)
        logits = pipeline.evaluate(part.inputs, **part.keywords).outputs
        return self.gpt.loss(logits, part.targets, "sum") if pipeline.is_last else None

    def _part(self, samples: Samples, numbers: Windows) -> LocalBatch:
        """This rank's bytes of some windows, or rows, which all ranks of a sequence take alike; no communication."""
        context, documents = self.strategy.context, samples.documents(numbers)
        tokens = context.tokens(self.context, documents=documents, pad=True)
        places = tokens.index(context.rank)
        arrays = (*samples.take(numbers, places), samples.counts(numbers))
        inputs, targets, counts = (torch.from_numpy(each).to(self.device) for each in arrays)
        is_static = documents is None and tokens.padded == self.context
        mask = None
        if self.options.model.experts and not is_static:
            mask = torch.from_numpy(samples.is_text(numbers, places).copy()).to(self.device)
        return LocalBatch(inputs, targets, counts, None if is_static else tokens, mask)
