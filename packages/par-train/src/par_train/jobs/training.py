"""What every job has on a rank: a strategy, an optimizer, a place in the data, and steps on which all ranks agree."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from par_checkpoint import Checkpoints, Save
from par_data import share
from par_groups import STOP_SIGNALS, ProcessGroups, Topology, agree, sharding_of
from par_pipeline import Schedule, Timeline
from par_precision import MixedOptimizer, Step

from .._errors import TrainingError, UserError
from ..run.metrics import load_of
from ..run.stop import FAILED
from ..strategy.axes import data_axes
from ..strategy.strategy import Strategy
from .checkpoint import Origin, TrainingState
from .options import Options, TrainOptions, learning_rate
from .order import Windows


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What all ranks know alike after a step.

    Args:
        loss: Mean over the targets of the global batch, in nats.
        gradient_norm: Norm of the averaged gradient, before clipping.
        skipped: Whether it was not finite, so that nothing was changed.
        signal: The signal that one of the ranks got, else 0.
        routers: What routers say, by name; empty without experts. See `Strategy.router_metrics`.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    signal: int
    routers: Mapping[str, float] = field(default_factory=dict)


class Training(ABC):
    """Trains a model; the ranks of a replica compute its share of each batch together.

    Args:
        options: Options of the run, equal on every rank.
        groups: Who works together; "data" averages gradients, "tensor" shares layers, "pipeline" has some of them
            each, "expert" some experts of each.
        device: Where this rank computes.

    Attributes:
        model: What this rank has of the model, as `Strategy.initialize` gave it.
        optimizer: Its optimizer.
        parameters: Elements of the whole model.
        step: Steps taken, those of earlier runs included.
        samples: Windows, or rows, that all ranks together have trained on: the position in the data.
        on_phase: Called with "data" before the next batch is made, and with "step" after.
    """

    title: str
    """The heading of the loss curve."""
    unit: str
    """What the loss is a mean over."""
    guess: float
    """The loss of a model that thinks everything equally likely."""

    model: nn.Module
    optimizer: MixedOptimizer
    parameters: int

    _validation: Windows
    """Numbers of the held-out windows, or rows, over which the loss is a mean."""

    def __init__(self, options: Options, groups: ProcessGroups, device: torch.device) -> None:
        self.options = options
        self.groups, self.device = groups, device
        apart = data_axes(groups.topology)
        self.replica, self.replicas = groups.rank(apart), groups.size(apart)
        self.strategy = Strategy(
            parallel=groups,
            device=str(device),
            precision=options.precision,
            zero=options.zero,
            clip_norm=options.train.clip_norm,
            pipeline=asdict(options.pipeline),
            gradient_handlers=options.gradient_handlers,
            plugins=options.plugins,
            seed=options.seed,
            recompute=options.recompute or None,
            memory=options.memory.budget,
        )
        self.step = self._first = 0
        self.samples = 0
        self.on_phase: Callable[[str], object] = lambda _: None

    def _take(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Takes over what the strategy has initialized."""
        self.model, self.optimizer = model, _checked(optimizer)
        self.parameters = count_parameters(model, self.device)

    @property
    def has_routers(self) -> bool:
        """Whether the model has routers of ours, on whatever stage."""
        return self.options.model.experts > 0

    def expert_load(self) -> dict[str, list[float]]:
        """Tokens of each expert in the last step by the mean of its router's, as a line has them. Collective."""
        return load_of(self.strategy.expert_load(self.model)) if self.has_routers else {}

    # What each job does in its own way

    @property
    @abstractmethod
    def context(self) -> int:
        """Bytes, or tokens, in a window or row."""

    @abstractmethod
    def about(self, topology: Topology) -> Mapping[str, Sequence[str]]:
        """What the banner says of the model, the data and the batch: lines by label."""

    @abstractmethod
    def state(self, seconds: float) -> TrainingState:
        """What a checkpoint has to say beside weights and optimizer.

        Args:
            seconds: Time spent so far.
        """

    @abstractmethod
    def save(self, place: Path | Checkpoints, state: TrainingState) -> Save:
        """Writes a checkpoint, to which every rank gives its part. Collective.

        Args:
            place: The folder, whose checkpoint is replaced, or the run's checkpoints in its tiers.
            state: What it has to say beside weights and optimizer.

        Returns:
            The save, which may still be on its way to further tiers.
        """

    @property
    @abstractmethod
    def flops(self) -> float | None:
        """Operations of the whole model for one token, forward and backward; None where no formula knows them."""

    @abstractmethod
    def _forward_backward(self) -> tuple[Tensor, Tensor | float]:
        """Computes loss and gradients of this replica's share of the next batch.

        Returns:
            The mean loss of the share, and the number of targets that it is a mean over.
        """

    @abstractmethod
    def _evaluate(self, rows: Windows, count: int) -> Tensor:
        """The sum of the losses of held-out targets and their number, fp64 [2]; zeros where this rank does not know.

        Collective, in the same order on all ranks of a replica.

        Args:
            rows: Numbers of windows, or rows, of the held-out data; as many in every call.
            count: How many of them count, from the first on; the others fill up the batch.
        """

    @abstractmethod
    def _load(self, origin: Origin) -> None:
        """Fills model and optimizer from a checkpoint, and goes to its place in the data. Collective."""

    def write_samples(self) -> list[dict[str, str]]:
        """Texts that the model writes, each as "prompt" and "text". Collective."""
        return []

    # What all do alike

    def advance(self, signal: int) -> StepResult:
        """One optimizer step on the next global batch.

        Args:
            signal: What this rank was asked for, to be agreed on.

        Raises:
            TrainingError: The loss is not finite; on every rank.
        """
        loss, count = self._forward_backward()
        rate = learning_rate(self.options, self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        outcome = self.optimizer.step()  # the world agrees on the norm, clips or skips
        self.optimizer.zero_grad()
        self.step += 1
        self.samples += self.options.train.batch_size
        return self._agree(loss, count, outcome, signal)

    def validate(self) -> float:
        """The mean loss over the targets of the held-out data, which the replicas share evenly. Collective."""
        self.model.eval()
        mine = share(self._validation, self.replica, self.replicas)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, count
        most = -(-len(self._validation) // self.replicas)  # all ranks go as often: forward may be collective
        for start in range(0, most, self._share_size):
            rows = mine[start : start + self._share_size]
            # Every batch has the same size, for microbatches and modes that cut it; what fills it up does not count.
            filled = np.resize(rows if len(rows) else self._validation[:1], self._share_size)
            total += self._evaluate(filled, len(rows))
        self.model.train()
        self._add_up_(total)
        return float(total[0] / total[1])

    def _add_up_(self, total: Tensor) -> None:
        """Sums what `_evaluate` gave over the replicas, in place; the ranks of a replica have the same numbers."""
        dist.all_reduce(total, group=self.groups[self.strategy.data_axes])  # two numbers

    def restore(self, origin: Origin) -> None:
        """Goes on from a checkpoint, of which this rank takes its part. Collective."""
        self._load(origin)
        self.step = self._first = self.strategy.steps = origin.state.step
        self.samples = origin.state.samples

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
        """Bytes, or tokens, trained on so far, by all ranks together."""
        return self.samples * self.context

    @property
    def _share_size(self) -> int:
        return self.options.train.batch_size // self.replicas

    def _agree(self, loss: Tensor, count: Tensor | float, outcome: Step, signal: int) -> StepResult:
        """The mean loss over all targets, and whether any rank was asked to leave."""
        numbers = (FAILED, *STOP_SIGNALS)
        asked = [float(signal == each) for each in numbers]
        sums = torch.tensor([0.0, 0.0, *asked], dtype=torch.float64, device=self.device)
        sums[1] = count
        sums[0] = torch.where(sums[1] > 0, loss * sums[1], 0.0)  # the mean over no target is not a number
        dist.all_reduce(sums)  # sum over the world, shape (2 + numbers,); the ranks of a replica have the same numbers
        total, targets, *asked = sums.tolist()
        mean = total / targets if targets else 0.0
        if not math.isfinite(mean):
            raise TrainingError(
                f"the loss became {mean} at step {self.step}{_on_ranks(loss)}; lower train.learning_rate "
                f"{self.options.peak_learning_rate:g} or train.clip_norm {self.options.train.clip_norm:g}"
            )
        agreed = next((number for number, count in zip(numbers, asked, strict=True) if count), 0)
        norm, skipped = float(outcome.grad_norm), bool(outcome.skipped)
        routers = self.strategy.router_metrics(self.model) if self.has_routers else {}
        said = {name: float(value) for name, value in routers.items()}
        return StepResult(loss=mean, gradient_norm=norm, skipped=skipped, signal=agreed, routers=said)


def _on_ranks(loss: Tensor) -> str:
    """On which ranks a loss is not finite, in words; "" if on all. All-gather of a number over the world."""
    finite = agree(None, math.isfinite(float(loss)), None)
    odd = [rank for rank, is_finite in finite.items() if not is_finite]
    if len(odd) in (0, len(finite)):
        return ""
    return f" on rank {odd[0]} alone" if len(odd) == 1 else f" on ranks {odd[:8]}{'...' if len(odd) > 8 else ''} alone"


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


def make_optimizer(model: nn.Module, options: TrainOptions) -> AdamW:
    """AdamW that decays matrices and leaves biases and norms alone. Its learning rate is set before each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, betas=(0.9, options.beta2), fused=True)
