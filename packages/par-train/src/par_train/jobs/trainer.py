"""The trainer of a job: one rank's part of the model, its position in the data, and steps that all ranks agree on."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, default_collate

from par_data import IGNORE_INDEX, split_evenly
from par_groups import ProcessGroups, agree, copy_to_device, number_on_device, sharding_of
from par_pipeline import PipelineError
from par_precision import MixedOptimizer

from .._errors import TrainingError, UserError
from ..strategy.strategy import Strategy
from .byte_gpt import ByteGPT
from .existing.folder import ModelFolder
from .existing.model import PretrainedModel
from .options import Options, TrainOptions, learning_rate
from .recipe import BatchDict, JobData, Recipe


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step, the same on every rank.

    Args:
        loss: Mean over the targets of the global batch, in nats.
        gradient_norm: Norm of the averaged gradient before clipping.
        skipped: Whether the gradient was not finite, so that the step changed nothing.
        routers: Metrics of the routers of experts by name; see `Strategy.router_metrics`.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    routers: Mapping[str, float] = field(default_factory=dict)


class Trainer:
    """Training of one model on rows of tokens; the ranks of a replica compute its part of each batch together.

    Args:
        options: Options of the run, the same on every rank.
        data: Rows of tokens, the same on every rank.
        folder: Folder of the Hugging Face Transformers model to train; None trains the byte GPT.
        groups: Live groups of the topology.
        device: Device on which this rank computes.

    Attributes:
        recipe: Recipe of the model.
        model: This rank's part of the model, as `Strategy.initialize` returned it.
        optimizer: Its optimizer.
        parameters: Number of elements of the full model.
        loader: Data loader of this rank's rows, whose position is part of a checkpoint.

    Raises:
        ValueError: The model cannot be made or not be sharded over these ranks; on every rank.
    """

    def __init__(
        self,
        options: Options,
        data: JobData,
        groups: ProcessGroups,
        device: torch.device,
        folder: ModelFolder | None = None,
    ) -> None:
        self.options, self.data = options, data
        self.strategy = Strategy(
            parallel=groups,
            device=str(device),
            precision=options.precision,
            zero=options.zero,
            clip_norm=options.train.clip_norm,
            pipeline={name: value for name, value in asdict(options.pipeline).items() if value},
            numerics=options.numerics,
            lanes=options.lane_counts,
            gradient_handlers=options.gradient_handlers,
            plugins=options.plugins,
            seed=options.seed,
            recompute=options.recompute or None,
            memory=options.memory.budget,
            # Every rank has the bytes of the text in memory, so that sending batches between ranks would gain nothing.
            broadcast_batches=folder is not None,
        )
        self.recipe: Recipe = ByteGPT(options) if folder is None else PretrainedModel(options, folder, data)
        cut = self.strategy.sequence_ranks
        if data.context % cut and self.strategy.context.ranks == 1:  # sequence ranks pad their rows instead
            raise UserError(
                f"data.context {data.context} does not divide by {cut} tensor ranks, which have a part of each row "
                f"under sequence_parallel; use {data.context - data.context % cut}"
            )
        model = self.recipe.make_model(self.strategy)
        loader = DataLoader(data.train, batch_size=options.train.batch_size, sampler=data.train.sampler, drop_last=True)
        given = self.strategy.initialize(model, make_optimizer(model, options.train), loader)
        self.model, self.optimizer, self.loader = given[0], _checked(given[1]), given[2]
        # Validation always uses the same rows, so that its losses can be compared.
        self._validation = spread(data.held_out.count(0), options.data.validation_windows)
        # Counted once: the banner shows it, and counting is collective.
        self.parameters = count_parameters(self.model, device)
        if folder is None:
            # The byte GPT checks its sizes when it is called. One batch raises now, before the run replaces another.
            # `ByteGPT.prepare` splits rows along the sequence itself, so the loader must return complete ones.
            self.loader.transform = None
            self.model.eval()  # in training mode, routers would count tokens
            try:
                self._evaluate(np.resize(self._validation, self._share_size), self._share_size)
            except PipelineError as error:
                if isinstance(error.__cause__, ValueError):  # sizes that this rank's layers cannot divide
                    raise error.__cause__ from None
                raise
            self.model.train()

    # One step

    def advance(self, batch: BatchDict) -> StepResult:
        """Take one optimizer step on this rank's part of a global batch. Collective.

        Raises:
            TrainingError: The loss is not finite; on every rank.
        """
        given, criterion = self.recipe.prepare(batch)
        loss = self.strategy.execute_pipeline(iter([given]), self.model, criterion, self.optimizer)
        # The rate is a function of the step, so a resumed run needs no state of a scheduler.
        rate = learning_rate(self.options, self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        outcome = self.optimizer.step()  # all ranks agree on the norm, and clip or skip
        self.optimizer.zero_grad()
        # A sequence rank has a part of each row; the loader counted the targets of the complete rows.
        split = batch.get("num_items_in_batch")
        mean = self._mean(loss, target_count(batch) if split is None else split)
        norm, skipped = float(outcome.grad_norm), bool(outcome.skipped)
        routers = self.strategy.router_metrics(self.model) if self.options.model.experts else {}
        metrics = {name: float(value) for name, value in routers.items()}
        return StepResult(loss=mean, gradient_norm=norm, skipped=skipped, routers=metrics)

    def _mean(self, loss: Tensor, count: Tensor) -> float:
        """Return the mean loss over all targets of the world. Collective."""
        sums = copy_to_device(torch.zeros(2, dtype=torch.float64), self.strategy.device)
        sums[1] = count
        sums[0] = torch.where(sums[1] > 0, loss * sums[1], 0.0)  # the mean over no target is NaN
        # Two numbers over the world. The ranks of a replica have the same numbers, so the mean is right.
        dist.all_reduce(sums)
        total, targets = sums.tolist()
        mean: float = total / targets if targets else 0.0
        if not math.isfinite(mean):
            raise TrainingError(
                f"the loss became {mean} at step {self.step}{_on_ranks(loss)}; lower train.learning_rate "
                f"{self.options.peak_learning_rate:g} or train.clip_norm {self.options.train.clip_norm:g}"
            )
        return mean

    # Validation

    def validate(self) -> float:
        """Compute the mean loss over the targets of the held-out rows, which the replicas share evenly. Collective."""
        self.model.eval()
        groups, axes = self.strategy.groups, self.strategy.data_axes
        replicas = groups.size(axes)
        mine = split_evenly(self._validation, groups.rank(axes), replicas)
        total = torch.zeros(2, dtype=torch.float64, device=self.strategy.device)  # sum of losses, count
        most = -(-len(self._validation) // replicas)  # all ranks call as often, because the forward is collective
        # A replica with fewer rows computes a batch of filling, or the collectives of others would hang.
        for start in range(0, most, self._share_size):
            rows = mine[start : start + self._share_size]
            # Every batch has the same size, for microbatches and for modes that split it; the filling counts nothing.
            filled = np.resize(rows if len(rows) else self._validation[:1], self._share_size)
            total += self._evaluate(filled, len(rows))
        self.model.train()
        dist.all_reduce(total, group=groups[axes])  # two numbers; the ranks of a replica have the same ones
        return float(total[0] / total[1])

    def _evaluate(self, rows: NDArray[np.int64], count: int) -> Tensor:
        """Return the sum of the losses of the first `count` of some held-out rows and their targets, fp64 [2]."""
        batch = default_collate([self.data.held_out[0, int(row)] for row in rows])
        batch["labels"][count:] = IGNORE_INDEX
        targets = number_on_device(target_count(batch), self.strategy.device)
        given, criterion = self.recipe.prepare(batch)
        loss = self.strategy.execute_pipeline(iter([given]), self.model, criterion, forward_only=True)
        return torch.stack([torch.where(targets > 0, loss * targets, 0.0), targets])

    @property
    def tokens(self) -> int:
        """Number of tokens that all ranks together have trained on so far."""
        tokens: int = self.loader.samples * self.data.context
        return tokens

    @property
    def step(self) -> int:
        """Steps taken, including those of earlier runs."""
        return self.strategy.steps

    @property
    def _share_size(self) -> int:
        return self.options.train.batch_size // self.strategy.groups.size(self.strategy.data_axes)


def target_count(batch: BatchDict) -> Tensor:
    """Count the targets in a batch of complete rows: labels after a row's first token that are not ignored."""
    return (batch["labels"][:, 1:] != IGNORE_INDEX).sum()


def spread(rows: int, wanted: int) -> NDArray[np.int64]:
    """Return the numbers of at most `wanted` rows, evenly spaced: the fixed sample that validation uses."""
    count = min(rows, wanted)
    return np.arange(count) * rows // count


def _on_ranks(loss: Tensor) -> str:
    """Describe the ranks whose loss is not finite; "" if all are. All-gather of a number over the world."""
    finite = agree(None, math.isfinite(float(loss)), None)
    odd = [rank for rank, is_finite in finite.items() if not is_finite]
    if len(odd) in (0, len(finite)):
        return ""
    return f" on rank {odd[0]} alone" if len(odd) == 1 else f" on ranks {odd[:8]}{'...' if len(odd) > 8 else ''} alone"


def _checked(optimizer: Optimizer) -> MixedOptimizer:
    """Return the optimizer if its steps report a norm and whether they were skipped."""
    if not isinstance(optimizer, MixedOptimizer):
        raise UserError(
            f"a plugin controls precision, and made a {type(optimizer).__name__}, which does not report norm and "
            "skipped steps; set --precision instead, or use the plugin with par_train.Strategy"
        )
    return optimizer


def count_parameters(model: nn.Module, device: torch.device) -> int:
    """Count the elements of the full model, of which every rank has some. Collective."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    boxes = [box for parameter in model.parameters() for box in sharding_of(parameter).boxes]
    own = sum(math.prod(box.size) for box in boxes if box.owns(rank, ranks))
    total = torch.tensor(own, device=device)
    dist.all_reduce(total)  # one number over the world
    return int(total)


def make_optimizer(model: nn.Module, options: TrainOptions) -> AdamW:
    """Make an AdamW that decays matrices, and neither biases nor norms. Each step sets its learning rate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        # Norms and biases have few elements, and decay would pull norms towards zero.
        {"params": [one for one in trained if one.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, betas=(0.9, options.beta2), fused=True)
