"""One rank's model, optimizer and place in the data: what a step computes and communicates."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from par_groups import ProcessGroups
from par_layers import PartialGradients, layer_set
from par_zero import shard

from ._checkpoint import TrainingState, load_checkpoint
from ._clip import clip_gradients_
from ._errors import UserError
from ._gpt import GPT
from ._options import Options, TrainOptions, learning_rate
from ._order import DataOrder, Windows, share, spread, window_count
from ._stop import SIGNALS
from ._text import Text

_IGNORED = -100  # a target that does not count


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What all ranks know alike after a step.

    Args:
        loss: Mean over the global batch, in nats a byte.
        gradient_norm: Of the averaged gradient, before clipping.
        signal: The signal that one of the ranks got, else 0.
    """

    loss: float
    gradient_norm: float
    signal: int


class Trainer:
    """Trains a GPT on the text; the ranks of a tensor group hold one replica, which computes its share of each batch.

    Args:
        options: The same on every rank.
        text: The same on every rank.
        groups: Who works together; "data" averages gradients, "tensor" shares the layers.
        device: Where this rank computes.
    """

    def __init__(self, options: Options, text: Text, groups: ProcessGroups, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.groups, self.device = groups, device
        self.replica, self.replicas = groups.rank("data"), groups.size("data")
        self.model = GPT(options.model, layer_set("auto", groups), seed=options.seed, device=device)
        self.optimizer = make_optimizer(self.model, options.train)
        shard(self.model, self.optimizer, stage=options.zero, group=groups["data"])
        self._partial = PartialGradients(self.optimizer, groups)
        self.step = 0
        self.samples = 0
        context = options.model.context
        self._train_text = np.frombuffer(text.train, np.uint8)
        self._held_out = np.frombuffer(text.held_out, np.uint8)
        self._order = DataOrder(windows=window_count(len(text.train), context), seed=options.seed)
        with torch.no_grad():
            self._loss(self._next_windows())  # sizes that a tensor mode cannot cut are said here, before any step
        self._validation = spread(window_count(len(text.held_out), context), options.data.validation_windows)

    def advance(self, signal: int) -> StepResult:
        """One optimizer step on the next global batch.

        Args:
            signal: What this rank was asked for, to be agreed on.

        Raises:
            UserError: The loss is not finite; on every rank.
        """
        options = self.options.train
        loss = self._loss(self._next_windows())
        torch.autograd.backward(loss)  # and the mean over the data group, chunk by chunk
        self._partial.handle_gradient()  # sums inside the tensor group
        norm = clip_gradients_(self.optimizer, self.groups, options.clip_norm)
        self._set_learning_rate(learning_rate(options, self.step + 1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.samples += options.batch_size
        return self._agree(loss.detach(), norm, signal)

    def validate(self) -> float:
        """The mean loss over the validation windows, which the replicas share as evenly as they can."""
        mine = share(self._validation, self.replica, self.replicas)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, count
        with torch.no_grad():
            for start in range(0, len(mine), self._share_size):
                windows = mine[start : start + self._share_size]
                # Every batch has the same size, for a tensor mode may cut it; what it is filled up with does not count.
                inputs, targets = self._tokens(self._held_out, np.resize(windows, self._share_size))
                targets[len(windows) :] = _IGNORED
                count = len(windows) * targets.shape[1]
                total += torch.stack(
                    [self.model.loss(self.model(inputs), targets).double() * count, total.new_tensor(count)]
                )
        dist.all_reduce(total, group=self.groups["data"])  # sum over the data group, shape (2,)
        return float(total[0] / total[1])

    def restore(self, path: Path, state: TrainingState) -> None:
        """Goes on from a checkpoint, of which this rank takes its part. Collective."""
        load_checkpoint(path, self.model, self.optimizer)
        self.step, self.samples = state.step, state.samples
        torch.set_rng_state(state.rng)

    @property
    def tokens(self) -> int:
        """Bytes trained on so far, by all ranks together."""
        return self.samples * self.options.model.context

    @property
    def _share_size(self) -> int:
        return self.options.train.batch_size // self.replicas

    def _next_windows(self) -> Windows:
        """This rank's share of the next global batch."""
        batch = self._order.batch(self.samples, self.options.train.batch_size)
        return share(batch, self.replica, self.replicas)

    def _loss(self, windows: Windows) -> Tensor:
        inputs, targets = self._tokens(self._train_text, windows)
        return self.model.loss(self.model(inputs), targets)

    def _tokens(self, text: np.ndarray, windows: Windows) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (windows, context): the target of a byte is the one behind it."""
        context = self.options.model.context
        places = windows[:, None] * context + np.arange(context + 1)
        tokens = torch.from_numpy(text[places].astype(np.int64)).to(self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _agree(self, loss: Tensor, norm: Tensor, signal: int) -> StepResult:
        """The mean loss, and whether any rank was asked to leave."""
        asked = [float(signal == each) for each in SIGNALS]
        sums = torch.tensor([0.0, *asked], dtype=torch.float64, device=self.device)
        sums[0] = loss
        dist.all_reduce(sums)  # sum over the world, shape (1 + signals,)
        mean, *asked = sums.tolist()
        mean /= dist.get_world_size()  # every replica's share has the same size, and its ranks have the same loss
        if not math.isfinite(mean):
            raise UserError(
                f"the loss became {mean} at step {self.step}; lower train.learning_rate "
                f"{self.options.train.learning_rate:g} or train.clip_norm {self.options.train.clip_norm:g}"
            )
        agreed = next((number for number, count in zip(SIGNALS, asked, strict=True) if count), 0)
        return StepResult(loss=mean, gradient_norm=float(norm), signal=agreed)


def make_optimizer(model: GPT, options: TrainOptions) -> AdamW:
    """AdamW that decays matrices and leaves biases and norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=options.learning_rate, betas=(0.9, options.beta2), fused=True)
