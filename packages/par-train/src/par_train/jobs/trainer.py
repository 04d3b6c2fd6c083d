"""One rank's part of the byte-level GPT and place in the text: what a step computes and communicates."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from par_groups import ProcessGroups, Topology

from .._errors import UserError
from ..data.shares import share
from .checkpoint import TrainingState, load_checkpoint, save_checkpoint
from .gpt import GPT
from .gpt_stages import gpt_stages
from .options import Options
from .order import DataOrder, Windows, spread, window_count
from .report import UNIFORM, about_gpt
from .text import Text
from .training import Training, make_optimizer

_IGNORED = -100  # a target that does not count


class Trainer(Training):
    """Trains a GPT on the text; the ranks of a tensor group hold one replica, which computes its share of each batch.

    Args:
        options: Options of the run, equal on every rank.
        text: The text to train on, equal on every rank.
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
        self._train_text = np.frombuffer(text.train, np.uint8)
        self._held_out = np.frombuffer(text.held_out, np.uint8)
        self._places = self._own_places()
        self._order = DataOrder(windows=window_count(len(text.train), self.context), seed=options.seed)
        self._loss(*self._tokens(self._train_text, self._next_windows()))  # sizes that cannot be cut are said here
        self._validation = spread(window_count(len(text.held_out), self.context), options.data.validation_windows)

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

    @property
    def context(self) -> int:
        """Bytes in a window."""
        return self.options.model.context

    def about(self, topology: Topology) -> Mapping[str, Sequence[str]]:
        """Sizes, the folder of text, and windows."""
        return about_gpt(self.options, self._text, self.parameters, topology.size("data"))

    def _forward_backward(self) -> tuple[Tensor, float]:
        """Every replica's share has the same size."""
        batch = self._tokens(self._train_text, self._next_windows())
        return self.strategy.execute_pipeline(iter([batch]), self.model, self.gpt.loss, self.optimizer), 1.0

    def state(self, seconds: float) -> TrainingState:
        """Progress, and the digest of the text."""
        return TrainingState(step=self.step, samples=self.samples, seconds=seconds, text=self._text.digest)

    def save(self, path: Path, state: TrainingState) -> None:
        """Weights by name, with the options that make the model again."""
        save_checkpoint(path, self.model, self.optimizer, self.options, state)

    def _load(self, path: Path, state: TrainingState) -> None:
        del state  # the place in the text is the number of samples
        load_checkpoint(path, self.model, self.optimizer)

    def _next_windows(self) -> Windows:
        """This rank's share of the next global batch."""
        batch = self._order.batch(self.samples, self.options.train.batch_size)
        return share(batch, self.replica, self.replicas)

    def _evaluate(self, rows: Windows, count: int) -> Tensor:
        """The last stage of a pipeline alone knows a loss."""
        inputs, targets = self._tokens(self._held_out, rows)
        targets[count:] = _IGNORED
        loss, targets_count = self._loss(inputs, targets), count * targets.shape[1]
        if loss is None or not count:
            return torch.zeros(2, dtype=torch.float64, device=self.device)
        return torch.stack([loss.double() * targets_count, loss.new_tensor(targets_count, dtype=torch.float64)])

    def _add_up_(self, total: Tensor) -> None:
        """Also brings the sums from the last stage to the others."""
        super()._add_up_(total)
        if self.groups.size("pipeline") > 1:
            dist.all_reduce(total, group=self.groups["pipeline"])  # all but the last stage bring zeros

    @torch.no_grad()
    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The loss of a batch, where the model ends."""
        if self.schedule is None:
            return self.gpt.loss(self.model(inputs), targets)
        pipeline = self.strategy.pipeline(self.model)
        logits = pipeline.evaluate(inputs).outputs
        return self.gpt.loss(logits, targets) if pipeline.is_last else None

    def _tokens(self, text: np.ndarray, windows: Windows) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets, both (windows, time): the target of a byte is the one behind it."""
        places = windows[:, None] * self.context + self._places
        inputs, targets = (torch.from_numpy(text[each].astype(np.int64)) for each in (places, places + 1))
        return inputs.to(self.device), targets.to(self.device)

    def _own_places(self) -> NDArray[np.int64]:
        """The places in a window of the bytes that this rank has: all of them, unless a sequence is cut.

        Raises:
            UserError: Windows of this length cannot be cut over so many ranks.
        """
        context = self.strategy.context
        try:
            return context.tokens(self.context).index(context.rank)
        except ValueError:
            part = 2 * context.ranks  # zigzag has two chunks a rank
            raise UserError(
                f"model.context is {self.context} bytes, which {context.ranks} sequence ranks cannot share; use "
                f"{-(-self.context // part) * part}, or another parallel.sequence.size"
            ) from None
