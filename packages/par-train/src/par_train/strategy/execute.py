"""One batch through a model in microbatches: with a pipeline or without, the same loop."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups
from par_pipeline import Batch, Pipeline, Schedule
from par_pipeline import schedule as make_schedule
from par_precision import MixedOptimizer

from .._torch_private import tree_leaves
from .axes import cuts_sequence, data_axes
from .batches import read_once
from .mixture.factor import LossFactor
from .pretrained.causal import CausalModel, pretrained_of, split_keywords, unlike_causal
from .stages import Stages

Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]
"""`criterion(outputs, target)`: the mean over a microbatch's rows; or a sum, and the number of things summed."""


class Execution:
    """Runs a model's pipeline, of one stage if it is not cut, and takes the mean of its losses.

    Args:
        model: A module, or `Stages`.
        schedule: A schedule for as many ranks as the pipeline group has.
        groups: The groups of the strategy.
        optimizer: The model's optimizer; a MixedOptimizer scales losses, any other one, or None, leaves them.
        options: Further keywords of `par_pipeline.Pipeline`.
        factor: What tells the model's routers what the loss is multiplied by.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        groups: ProcessGroups,
        optimizer: torch.optim.Optimizer | None,
        options: dict[str, Any],
        factor: LossFactor,
    ) -> None:
        self._schedule, self._groups, self._factor = schedule, groups, factor
        self._kind = type(model).__name__
        self._causal = None if pretrained_of(model) is None else CausalModel(model)
        self._other_loss = None if self._causal is None else unlike_causal(model)
        self._optimizer = optimizer if isinstance(optimizer, MixedOptimizer) else None
        self._criterion: Criterion = _none
        self._weights: list[float] = []  # what each microbatch of the batch weighs
        self._sum: Tensor | float = 0.0
        self._count: Tensor | float = 0.0
        stages = model.runners(schedule.stages - 1, factor) if isinstance(model, Stages) else [model]
        group = groups["pipeline"]
        self._make: Callable[[Schedule], Pipeline] = lambda plan: Pipeline(
            stages, plan, group, loss_fn=self._loss, weight=self._weigh, **options
        )
        self.pipeline = self._make(schedule)
        axes, microbatches = (data_axes(groups.topology), "pipeline"), schedule.microbatches
        self._fits = microbatches > 1 and all(groups.size(each) == 1 for each in axes) and "split" not in options
        self._splits_by_rows = "split" not in options
        self._smaller: dict[int, Pipeline] = {}  # by microbatches; of one rank, for batches with fewer rows

    def run(
        self, next_batch: Callable[[], Any], criterion: Criterion | None, *, forward_only: bool, return_outputs: bool
    ) -> tuple[Any, Any]:
        """The loss of the batch, on all ranks of the pipeline, and the outputs, where the last stage is.

        Args:
            next_batch: Gives the batch, or raises StopIteration; other ranks of the pipeline hear of what it raises. A
                batch is a pair of inputs and target; inputs that are a tuple are several arguments. Anything else,
                such as a dict, is both; a model of transformers is called with the keywords that it names.
            criterion: A function of outputs and target; None: the causal loss of a model of transformers.
            forward_only: Whether to leave out the backward.
            return_outputs: Whether outputs are kept.

        Raises:
            ValueError: There is no criterion, and the loss of the model of transformers is not the causal one.
            TypeError, PipelineError: There is no criterion, and no model of transformers, or no batch of one.
        """
        if criterion is None and self._other_loss is not None:
            raise ValueError(
                f"criterion=None: it stands for the loss of the next token, and {self._other_loss}; pass a "
                "criterion(outputs, batch) that gives the loss, a mean over rows, or a sum and its count"
            )
        self._weights, self._sum, self._count = [], 0.0, 0.0
        causal = None if criterion is not None else self._causal
        self._criterion = criterion or (_none if causal is None else causal.loss)
        pipeline = self.pipeline
        if self._fits:
            batch, next_batch = read_once(next_batch)
            pipeline = self._fit_for(rows_of(batch))
        with nullcontext() if causal is None or return_outputs else causal.without_gathering():
            outputs, _, _ = pipeline.forward_backward_step(
                _Batches(lambda: self._called_with(next_batch(), criterion, pipeline.schedule.microbatches)),
                forward_only=forward_only,
                return_outputs=return_outputs,
            )
        return self._mean(), outputs

    def _fit_for(self, rows: int) -> Pipeline:
        """The pipeline, or one of fewer microbatches where a batch has fewer rows than they are.

        Only where no other rank has as many: stage 3, for example, gathers parameters in each microbatch.
        """
        if not 0 < rows < self._schedule.microbatches:
            return self.pipeline
        if rows not in self._smaller:
            self._smaller[rows] = self._make(make_schedule("1f1b", 1, rows))
        return self._smaller[rows]

    def _called_with(self, batch: Any, criterion: Criterion | None, microbatches: int) -> Any:
        """The batch as the pipeline takes it.

        Raises:
            TypeError: There is no criterion, and no model of transformers, or no batch of one.
        """
        if self._causal is not None and isinstance(batch, Mapping):
            inputs, keywords, labels = self._causal.fed(batch)
            if self._splits_by_rows:
                keywords = split_keywords(keywords, len(labels), microbatches)
            return Batch(inputs, keywords, labels if criterion is None else dict(batch))
        if criterion is None:
            raise TypeError(
                f"criterion is None, which is the causal loss of a transformers model called with a dict; this is a "
                f"{self._kind} with a {type(batch).__name__} for a batch; give a criterion(outputs, target)"
            )
        return batch

    @property
    def takes_dicts(self) -> bool:
        """Whether batches that are dicts are the keywords of a model of transformers."""
        return self._causal is not None

    def close(self) -> None:
        """Releases the pipeline's connections, and waits for no other rank."""
        for pipeline in (self.pipeline, *self._smaller.values()):
            pipeline.close()

    def _weigh(self, target: Any) -> float:
        """A microbatch weighs its rows: the pipeline multiplies each loss by its part of the sum of all weights.

        It asks for all weights before the first microbatch.
        """
        self._weights.append(float(rows_of(target) or 1))
        return self._weights[-1]

    def _loss(self, outputs: Any, target: Any) -> Tensor:
        """What backward begins with: the criterion's mean, or its mean without the part that rows have in the batch.

        A mean is over rows, which the pipeline weighs. A sum comes with a count that is its weight on all ranks and in
        all microbatches, and which the optimizer applies: the weight of the rows is taken out.
        """
        given = self._criterion(outputs, target)
        rows = float(rows_of(target) or 1)
        total, count = given if isinstance(given, tuple) else (given * rows, rows)
        self._sum, self._count = self._sum + total.detach().double(), self._count + count
        if not isinstance(given, tuple):
            return self._scaled(self._factor.of(given), None)
        weight = torch.as_tensor(count, dtype=torch.float64, device=total.device)
        mean = total / torch.where(weight > 0, weight, 1.0).to(total.dtype)  # a sum of nothing is 0
        return self._scaled(self._factor.of(mean) * (sum(self._weights) / rows), weight)

    def _scaled(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return loss
        if self._optimizer is None:
            if weight is not None:
                raise ValueError(
                    "a plugin controls precision here, so the criterion must give a mean, not (sum, count)"
                )
            return loss
        return self._optimizer.scale(loss, weight=weight)

    def _mean(self) -> Tensor:
        """The mean loss of this replica's batch, of which sequence ranks have parts.

        An all-reduce of two numbers over the sequence group, a broadcast of one over the pipeline group.
        """
        device = self._groups.device
        mean = torch.zeros((), dtype=torch.float64, device=device)
        if self.pipeline.is_last:
            mean = torch.as_tensor(self._sum / self._count, dtype=torch.float64, device=device)
        if self.pipeline.is_last and cuts_sequence(self._groups.topology):
            count = torch.as_tensor(self._count, dtype=torch.float64, device=device)
            both = torch.stack([torch.as_tensor(self._sum, dtype=torch.float64, device=device), count])
            dist.all_reduce(both, group=self._groups["sequence"])
            mean = both[0] / both[1]
        if self._groups.size("pipeline") > 1:
            last = self._schedule.rank_of(self._schedule.stages - 1)
            dist.broadcast(mean, group=self._groups["pipeline"], group_src=last)
        return mean


class _Batches(Iterator[Any]):
    """What a function gives, again and again, as an iterator."""

    def __init__(self, next_batch: Callable[[], Any]) -> None:
        self._next_batch = next_batch

    def __next__(self) -> Any:
        return self._next_batch()


def rows_of(value: Any) -> int:
    """The length of the first tensor in a nested value; 0 if there is none that has one."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 0


def _none(_: Any, __: Any) -> Tensor:
    raise RuntimeError("the pipeline was run without a criterion; call Strategy.execute_pipeline()")
