"""One rank's model, optimizer and place in the data: what a step computes and communicates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from par_groups import ProcessGroups, sharding_of
from par_layers import PartialGradients, layer_set
from par_pipeline import Pipeline, Schedule, Shared, Timeline
from par_precision import Step, mixed
from par_zero import shard

from ._checkpoint import TrainingState, load_checkpoint
from ._checks import make_schedule
from ._errors import UserError
from ._gpt import GPT
from ._gpt_stages import Stage, cut_blocks, tie, total_over
from ._options import Options, TrainOptions, learning_rate
from ._order import DataOrder, Windows, share, spread, window_count
from ._stop import SIGNALS
from ._text import Text

_IGNORED = -100  # a target that does not count
_WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # the optimizer keeps fp32 copies


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What all ranks know alike after a step.

    Args:
        loss: Mean over the global batch, in nats a byte.
        gradient_norm: Of the averaged gradient, before clipping.
        skipped: Whether it was not finite, so that nothing was changed.
        signal: The signal that one of the ranks got, else 0.
    """

    loss: float
    gradient_norm: float
    skipped: bool
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
        self.schedule = make_schedule(options, groups.topology)
        parts = None if self.schedule is None else cut_blocks(options.model, self.schedule, groups.rank("pipeline"))
        layers = layer_set("auto", groups)
        self.model = model = GPT(options.model, layers, seed=options.seed, device=device, parts=parts)
        if options.precision == "bf16-sr":
            model.bfloat16()  # no fp32 copy: shards, too, are of what is left
        optimizer = make_optimizer(model, options.train)
        shared = tie(model, groups, optimizer)
        shard(model, optimizer, stage=options.zero, group=groups["data"], param_dtype=_WEIGHTS.get(options.precision))
        _, self.optimizer = mixed(
            model, optimizer, options.precision, group=dist.group.WORLD, clip_norm=options.train.clip_norm
        )
        self._pipeline = None if self.schedule is None or parts is None else self._connect(self.schedule, parts, shared)
        self._partial = PartialGradients(self.optimizer, groups)
        self.parameters = count_parameters(model, device)
        self.step = self._first = 0
        self.samples = 0
        context = options.model.context
        self._train_text = np.frombuffer(text.train, np.uint8)
        self._held_out = np.frombuffer(text.held_out, np.uint8)
        self._order = DataOrder(windows=window_count(len(text.train), context), seed=options.seed)
        self._evaluate(*self._tokens(self._train_text, self._next_windows()))  # sizes that cannot be cut are said here
        self._validation = spread(window_count(len(text.held_out), context), options.data.validation_windows)

    def advance(self, signal: int) -> StepResult:
        """One optimizer step on the next global batch.

        Args:
            signal: What this rank was asked for, to be agreed on.

        Raises:
            UserError: The loss is not finite; on every rank.
        """
        options = self.options.train
        loss = self._forward_backward(*self._tokens(self._train_text, self._next_windows()))
        self._partial.handle_gradient()  # sums inside the tensor group
        self._set_learning_rate(learning_rate(options, self.step + 1))
        outcome = self.optimizer.step()  # the world agrees on the norm, clips or skips
        self.optimizer.zero_grad()
        self.step += 1
        self.samples += options.batch_size
        return self._agree(loss, outcome, signal)

    def validate(self) -> float:
        """The mean loss over the validation windows, which the replicas share as evenly as they can."""
        mine = share(self._validation, self.replica, self.replicas)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, count
        for start in range(0, len(mine), self._share_size):
            windows = mine[start : start + self._share_size]
            # Every batch has the same size, for a tensor mode may cut it; what it is filled up with does not count.
            inputs, targets = self._tokens(self._held_out, np.resize(windows, self._share_size))
            targets = targets.clone()  # it shares memory with the inputs
            targets[len(windows) :] = _IGNORED
            loss, count = self._evaluate(inputs, targets), len(windows) * targets.shape[1]
            if loss is not None:
                total += torch.stack([loss.double() * count, total.new_tensor(count)])
        total = total_over(self.groups, total)
        return float(total[0] / total[1])

    def restore(self, path: Path, state: TrainingState) -> None:
        """Goes on from a checkpoint, of which this rank takes its part. Collective."""
        load_checkpoint(path, self.model, self.optimizer)
        self.step = self._first = state.step
        self.samples = state.samples
        torch.set_rng_state(state.rng)

    def timeline(self) -> Timeline | None:
        """When the ranks of this pipeline did what in the last step; None if there was none. Collective over it."""
        return None if self._pipeline is None or self.step == self._first else self._pipeline.timeline()

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

    def _connect(self, schedule: Schedule, parts: Sequence[range], shared: Sequence[Shared]) -> Pipeline:
        """Stages that run this rank's parts of the model."""
        return Pipeline(
            [Stage(self.model, part) for part in parts],
            schedule,
            self.groups["pipeline"],
            loss_fn=lambda logits, targets: self.optimizer.scale(self.model.loss(logits, targets)),
            shared=shared,
            broadcast_loss=True,
        )

    def _forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients of this replica's batch, averaged over the data group chunk by chunk; its loss."""
        if self._pipeline is None:
            loss = self.model.loss(self.model(inputs), targets)
            self.optimizer.backward(loss)
            return loss.detach()
        scaled, _ = self._pipeline.step(inputs, target=targets)
        if scaled is None:
            raise RuntimeError("the pipeline gave no loss")  # it was told to tell all ranks
        return scaled.detach() / self.optimizer.scale(torch.ones_like(scaled.detach()))

    @torch.no_grad()
    def _evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The loss of a batch, where the model ends."""
        if self._pipeline is None:
            return self.model.loss(self.model(inputs), targets)
        logits = self._pipeline.evaluate(inputs, target=targets).outputs
        return self.model.loss(logits, targets) if self._pipeline.is_last else None

    def _tokens(self, text: np.ndarray, windows: Windows) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (windows, context): the target of a byte is the one behind it."""
        context = self.options.model.context
        places = windows[:, None] * context + np.arange(context + 1)
        tokens = torch.from_numpy(text[places].astype(np.int64)).to(self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _agree(self, loss: Tensor, outcome: Step, signal: int) -> StepResult:
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
        norm, skipped = float(outcome.grad_norm), bool(outcome.skipped)
        return StepResult(loss=mean, gradient_norm=norm, skipped=skipped, signal=agreed)


def count_parameters(model: GPT, device: torch.device) -> int:
    """The elements of the whole model, of which every rank has some."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    boxes = [box for parameter in model.parameters() for box in sharding_of(parameter).boxes]
    own = sum(math.prod(box.size) for box in boxes if box.owns(rank, ranks))
    total = torch.tensor(own, device=device)
    dist.all_reduce(total)  # one number over the world
    return int(total)


def make_optimizer(model: GPT, options: TrainOptions) -> AdamW:
    """AdamW that decays matrices and leaves biases and norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=options.learning_rate, betas=(0.9, options.beta2), fused=True)
