"""One data-parallel rank's model, optimizer and place in the data: what a step computes and communicates."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ._errors import UserError
from ._gpt import GPT, VOCABULARY
from ._options import Options, TrainOptions, learning_rate
from ._order import DataOrder, Windows, share, spread, window_count
from ._stop import SIGNALS
from ._text import Text


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Which data-parallel rank this is.

    Args:
        group: The ranks that average gradients.
        index: This one's position among them.
        count: How many they are.
        device: Where it computes.
    """

    group: dist.ProcessGroup
    index: int
    count: int
    device: torch.device


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
    """Trains a GPT on the text; every rank holds a replica and computes its share of each global batch.

    Args:
        options: The same on every rank.
        text: The same on every rank.
        replica: Who this rank is.
    """

    def __init__(self, options: Options, text: Text, replica: Replica) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.replica = replica
        self.model = GPT(options.model).to(replica.device)
        self.optimizer = make_optimizer(self.model, options.train)
        self.step = 0
        self.samples = 0
        context = options.model.context
        self._train_text = np.frombuffer(text.train, np.uint8)
        self._held_out = np.frombuffer(text.held_out, np.uint8)
        self._order = DataOrder(windows=window_count(len(text.train), context), seed=options.seed)
        self._validation = spread(window_count(len(text.held_out), context), options.data.validation_windows)
        devices = None if replica.device.type == "cpu" else [replica.device]
        self._parallel = DistributedDataParallel(self.model, device_ids=devices, process_group=replica.group)
        self._settle_buckets()

    def advance(self, signal: int) -> StepResult:
        """One optimizer step on the next global batch.

        Args:
            signal: What this rank was asked for, to be agreed on.

        Raises:
            UserError: The loss is not finite; on every rank.
        """
        options = self.options.train
        loss = self._loss(self._next_windows())
        torch.autograd.backward(
            loss
        )  # all-reduce over the data group: the mean of the replicas' gradients, bucket by bucket
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        self._set_learning_rate(learning_rate(options, self.step + 1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.samples += options.batch_size
        return self._agree(loss.detach(), norm, signal)

    def validate(self) -> float:
        """The mean loss over the validation windows, which the ranks share as evenly as they can."""
        mine = share(self._validation, self.replica.index, self.replica.count)
        total = torch.zeros(2, dtype=torch.float64, device=self.replica.device)  # sum of losses, count
        with torch.no_grad():
            for start in range(0, len(mine), self._share_size):
                inputs, targets = self._tokens(self._held_out, mine[start : start + self._share_size])
                losses = functional.cross_entropy(
                    self.model(inputs).flatten(0, 1), targets.flatten(), reduction="none"
                ).double()
                total += torch.stack([losses.sum(), losses.new_tensor(losses.numel())])
        dist.all_reduce(total, group=self.replica.group)  # sum over the data group, shape (2,)
        return float(total[0] / total[1])

    @property
    def tokens(self) -> int:
        """Bytes trained on so far, by all ranks together."""
        return self.samples * self.options.model.context

    @property
    def _share_size(self) -> int:
        return self.options.train.batch_size // self.replica.count

    def _next_windows(self) -> Windows:
        """This rank's share of the next global batch."""
        batch = self._order.batch(self.samples, self.options.train.batch_size)
        return share(batch, self.replica.index, self.replica.count)

    def _loss(self, windows: Windows) -> Tensor:
        inputs, targets = self._tokens(self._train_text, windows)
        return functional.cross_entropy(self._parallel(inputs).view(-1, VOCABULARY), targets.flatten())

    def _tokens(self, text: np.ndarray, windows: Windows) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (windows, context): the target of a byte is the one behind it."""
        context = self.options.model.context
        places = windows[:, None] * context + np.arange(context + 1)
        tokens = torch.from_numpy(text[places].astype(np.int64)).to(self.replica.device)
        return tokens[:, :-1], tokens[:, 1:]

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _agree(self, loss: Tensor, norm: Tensor, signal: int) -> StepResult:
        """The mean loss, and whether any rank was asked to leave."""
        asked = [float(signal == each) for each in SIGNALS]
        sums = torch.tensor([0.0, *asked], dtype=torch.float64, device=self.replica.device)
        sums[0] = loss
        dist.all_reduce(sums, group=self.replica.group)  # sum over the data group, shape (1 + signals,)
        mean, *asked = sums.tolist()
        mean /= self.replica.count  # every replica's share has the same size
        if not math.isfinite(mean):
            raise UserError(
                f"the loss became {mean} at step {self.step}; lower train.learning_rate "
                f"{self.options.train.learning_rate:g} or train.clip_norm {self.options.train.clip_norm:g}"
            )
        agreed = next((number for number, count in zip(SIGNALS, asked, strict=True) if count), 0)
        return StepResult(loss=mean, gradient_norm=float(norm), signal=agreed)

    def _settle_buckets(self) -> None:
        """Spends one backward pass on DDP's buckets.

        After its first backward, DDP sorts gradients into other buckets, and with them the order in which more than
        two ranks are summed. That must happen before the first step, or the first step after a resume would round
        differently from the same step of a run that was never interrupted.
        """
        torch.autograd.backward(self._loss(self._next_windows()))
        self.optimizer.zero_grad()


def make_optimizer(model: GPT, options: TrainOptions) -> AdamW:
    """AdamW that decays matrices and leaves biases and norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=options.learning_rate, betas=(0.9, options.beta2), fused=True)
