"""One batch through a model in microbatches: with a pipeline or without, the same loop."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from par_groups import ProcessGroups
from par_pipeline import Pipeline, Schedule
from par_precision import MixedOptimizer

from .stages import Stages

Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]
"""`criterion(outputs, target)`: the mean over a microbatch's rows; or a sum, and the number of things summed."""


class Execution:
    """Runs a model's pipeline, of one stage if it is not cut, and takes the mean of its losses.

    Args:
        model: A module, or `Stages`.
        schedule: For as many ranks as the pipeline group has.
        groups: Of the strategy.
        optimizer: Scales losses; None, or one of torch's own, leaves them.
        options: Of `par_pipeline.PipelineOptions`.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        groups: ProcessGroups,
        optimizer: torch.optim.Optimizer | None,
        options: dict[str, Any],
    ) -> None:
        self._schedule, self._groups = schedule, groups
        self._optimizer = optimizer if isinstance(optimizer, MixedOptimizer) else None
        self._criterion: Criterion = _none
        self._rows = 0
        self._sum: Tensor | float = 0.0
        self._count: Tensor | float = 0.0
        self.pipeline = Pipeline(
            model.runners() if isinstance(model, Stages) else [model],
            schedule,
            groups["pipeline"],
            loss_fn=self._loss,
            weight=self._counted,
            **options,
        )

    def run(self, batch: Any, criterion: Criterion, *, forward_only: bool, return_outputs: bool) -> tuple[Any, Any]:
        """The loss of the batch, on all ranks of the pipeline, and the outputs, where the last stage is.

        Args:
            batch: A pair of inputs and target; inputs that are a tuple are several arguments. Anything else, such as
                a dict, is both.
            criterion: Of outputs and target.
            forward_only: Whether to leave out the backward.
            return_outputs: Whether outputs are kept.
        """
        self._criterion = criterion
        self._rows, self._sum, self._count = 0, 0.0, 0.0
        outputs, _, _ = self.pipeline.forward_backward_step(
            iter([batch]), forward_only=forward_only, return_outputs=return_outputs
        )
        return self._mean(), outputs

    def _counted(self, target: Any) -> float:
        """Adds up the rows, before the first microbatch. What one counts is said by `_loss`."""
        self._rows += rows_of(target)
        return 1.0

    def _loss(self, outputs: Any, target: Any) -> Tensor:
        """What backward begins with. The pipeline multiplies it by 1 / microbatches, which is undone here."""
        found = self._criterion(outputs, target)
        microbatches = self._schedule.microbatches
        if isinstance(found, tuple):
            total, count = found
            self._note(total, count)
            weight = torch.as_tensor(count, dtype=torch.float64, device=total.device)
            mean = total / torch.where(weight > 0, weight, 1.0).to(total.dtype)  # of nothing, the sum is 0
            return self._scaled(mean * microbatches, weight)
        rows = rows_of(target) if self._rows else 1
        whole = self._rows or microbatches
        self._note(found * rows, rows)
        return self._scaled(found * (microbatches * rows / whole), None)

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

    def _note(self, total: Tensor, count: Tensor | float) -> None:
        self._sum, self._count = self._sum + total.detach().double(), self._count + count

    def _mean(self) -> Tensor:
        """The loss of this replica's batch; broadcast of one number over the pipeline."""
        device = self._groups.device
        mean = torch.zeros((), dtype=torch.float64, device=device)
        if self.pipeline.is_last:
            mean = torch.as_tensor(self._sum / self._count, dtype=torch.float64, device=device)
        if self._groups.size("pipeline") > 1:
            last = self._schedule.rank_of(self._schedule.stages - 1)
            dist.broadcast(mean, group=self._groups["pipeline"], group_src=last)
        return mean


def rows_of(value: Any) -> int:
    """The length of the first tensor in a nested value; 0 if there is none that has one."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 0


class Batches(Iterator[Any]):
    """The batches of a data loader, epoch after epoch.

    Args:
        source: The data loader.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._iterator: Iterator[Any] = iter(source)

    def __next__(self) -> Any:
        """The next batch; where an epoch ends, the next one begins."""
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.source)
            return next(self._iterator)


def _none(_: Any, __: Any) -> Tensor:
    raise RuntimeError("the pipeline was run without a criterion; call Strategy.execute_pipeline()")
