"""One rank's model, optimizer and place in the data: what a step computes and communicates."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from par_groups import ProcessGroups, sharding_of
from par_pipeline import Schedule, Timeline
from par_precision import MixedOptimizer, Step

from .._errors import TrainingError, UserError
from ..data.shares import share
from ..run.stop import SIGNALS
from ..strategy.strategy import Strategy
from .checkpoint import TrainingState, load_checkpoint
from .gpt import GPT
from .gpt_stages import gpt_stages
from .options import Options, TrainOptions, learning_rate
from .order import DataOrder, Windows, spread, window_count
from .text import Text

_IGNORED = -100  # a target that does not count


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What all ranks know alike after a step.

    Args:
        loss: Mean over the global batch, in nats a byte.
        gradient_norm: Norm of the averaged gradient, before clipping.
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
        options: Options of the run, equal on every rank.
        text: The text to train on, equal on every rank.
        groups: Who works together; "data" averages gradients, "tensor" shares the layers.
        device: Where this rank computes.
    """

    def __init__(self, options: Options, text: Text, groups: ProcessGroups, device: torch.device) -> None:
        self.options = options
        self.groups, self.device = groups, device
        self.replica, self.replicas = groups.rank("data"), groups.size("data")
        self.strategy = Strategy(
            groups=groups,
            device=str(device),
            precision=options.precision,
            zero=options.zero,
            clip_norm=options.train.clip_norm,
            pipeline=asdict(options.pipeline),
            gradient_handlers=options.gradient_handlers,
            plugins=options.plugins,
            seed=options.seed,
        )
        self.gpt, model = self._make_model()
        self.model, optimizer = self.strategy.initialize(model, make_optimizer(self.gpt, options.train))
        self.optimizer = _checked(optimizer)
        self.parameters = count_parameters(self.model, device)
        self.step = self._first = 0
        self.samples = 0
        context = options.model.context
        self._train_text = np.frombuffer(text.train, np.uint8)
        self._held_out = np.frombuffer(text.held_out, np.uint8)
        self._order = DataOrder(windows=window_count(len(text.train), context), seed=options.seed)
        self._evaluate(*self._tokens(self._train_text, self._next_windows()))  # sizes that cannot be cut are said here
        self._validation = spread(window_count(len(text.held_out), context), options.data.validation_windows)

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

    def advance(self, signal: int) -> StepResult:
        """One optimizer step on the next global batch.

        Args:
            signal: What this rank was asked for, to be agreed on.

        Raises:
            TrainingError: The loss is not finite; on every rank.
        """
        options = self.options.train
        batch = self._tokens(self._train_text, self._next_windows())
        loss = self.strategy.execute_pipeline(iter([batch]), self.model, self.gpt.loss, self.optimizer)
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
        most = -(-len(self._validation) // self.replicas)  # all ranks go as often: forward may be collective
        for start in range(0, most, self._share_size):
            windows = mine[start : start + self._share_size]
            # Every batch has the same size, for a tensor mode may cut it; what it is filled up with does not count.
            filled = np.resize(windows if len(windows) else self._validation[:1], self._share_size)
            inputs, targets = self._tokens(self._held_out, filled)
            targets = targets.clone()  # it shares memory with the inputs
            targets[len(windows) :] = _IGNORED
            loss, count = self._evaluate(inputs, targets), len(windows) * targets.shape[1]
            if loss is not None and len(windows):
                total += torch.stack([loss.double() * count, total.new_tensor(count)])
        total = total_over(self.groups, total)
        return float(total[0] / total[1])

    def restore(self, path: Path, state: TrainingState) -> None:
        """Goes on from a checkpoint, of which this rank takes its part. Collective."""
        load_checkpoint(path, self.model, self.optimizer)
        self.step = self._first = self.strategy.steps = state.step
        self.samples = state.samples

    def timeline(self) -> Timeline | None:
        """When the ranks of this pipeline did what in the last step; None if there was none. Collective over it."""
        if self.strategy.schedule is None or self.step == self._first:
            return None
        return self.strategy.pipeline(self.model).timeline()

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline's schedule, if there is a pipeline."""
        return self.strategy.schedule

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

    @torch.no_grad()
    def _evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The loss of a batch, where the model ends."""
        if self.schedule is None:
            return self.gpt.loss(self.model(inputs), targets)
        pipeline = self.strategy.pipeline(self.model)
        logits = pipeline.evaluate(inputs).outputs
        return self.gpt.loss(logits, targets) if pipeline.is_last else None

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
            raise TrainingError(
                f"the loss became {mean} at step {self.step}; lower train.learning_rate "
                f"{self.options.train.learning_rate:g} or train.clip_norm {self.options.train.clip_norm:g}"
            )
        agreed = next((number for number, count in zip(SIGNALS, asked, strict=True) if count), 0)
        norm, skipped = float(outcome.grad_norm), bool(outcome.skipped)
        return StepResult(loss=mean, gradient_norm=norm, skipped=skipped, signal=agreed)


def total_over(groups: ProcessGroups, total: Tensor) -> Tensor:
    """The sum over the replicas, and from the last stage to all others. In place."""
    dist.all_reduce(total, group=groups["data"])  # sum over the data group
    if groups.size("pipeline") > 1:
        dist.all_reduce(total, group=groups["pipeline"])  # all but the last stage bring zeros
    return total


def _checked(optimizer: Optimizer) -> MixedOptimizer:
    """The optimizer, which says what became of a step."""
    if not isinstance(optimizer, MixedOptimizer):
        raise UserError(
            f"a plugin controls precision, and made a {type(optimizer).__name__}, which does not tell norm and skipped "
            "steps; leave it to --precision, or use the plugin with par_train.Strategy"
        )
    return optimizer


def count_parameters(model: nn.Module, device: torch.device) -> int:
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
