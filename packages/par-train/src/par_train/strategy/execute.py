"""The run of one batch through a model in microbatches: the same loop with a pipeline and without."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_data import read_once
from par_groups import ProcessGroups, agree, data_axes, number_on_device, replica_axes, splits_sequence
from par_layers import LossFactor
from par_layers.pretrained import CausalModel, pretrained_of, unlike_causal
from par_pipeline import (
    Batch,
    LossWeight,
    Microbatches,
    Pipeline,
    PipelineStages,
    Schedule,
    StageRunner,
    split_keywords,
)
from par_pipeline import schedule as make_schedule
from par_precision import MixedOptimizer

from .._torch_private import tree_leaves

Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]
"""`criterion(outputs, target)`: the mean over a microbatch's rows; or a sum and the number of its items."""


class Execution:
    """The pipeline of a model, of a single stage if the model is not split, and the mean of its losses.

    Args:
        model: A module, or `PipelineStages`.
        schedule: The schedule, for as many ranks as the pipeline group has.
        groups: The groups of the strategy.
        optimizer: The model's optimizer. A MixedOptimizer scales losses; another one, or None, does not.
        options: Other keywords of `par_pipeline.Pipeline`.
        factor: The object that passes the factor of the loss to the model's routers.

    Attributes:
        normalizes: Whether the pipeline multiplies each loss by the microbatch's part of the batch's rows.
    """

    normalizes = True

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
        stages: list[nn.Module] = [model]
        if isinstance(model, PipelineStages):
            last, travels = schedule.stages - 1, factor.travels
            stages = [*model.runners(partial(FactorStageRunner, last=last, factor=factor) if travels else None)]
        group = groups["pipeline"]
        # A pipeline runs a fixed number of microbatches, so batches with fewer rows get pipelines of their own.
        self._make: Callable[[Schedule], Pipeline] = lambda plan: Pipeline(
            stages,
            plan,
            group,
            loss_fn=self._loss,
            weight=LossWeight(of=self._weigh, normalize=self.normalizes),
            **options,
        )
        self.pipeline = self._make(schedule)
        axes, microbatches = (data_axes(groups.topology), "pipeline"), schedule.microbatches
        # All ranks of a pipeline, and data ranks at stage 3, must run as many microbatches as each other.
        self._fits = microbatches > 1 and all(groups.size(each) == 1 for each in axes) and "split" not in options
        self._splits_by_rows = "split" not in options
        self._smaller: dict[int, Pipeline] = {}  # by microbatches; of one rank, for batches with fewer rows

    def run(
        self,
        next_batch: Callable[[], Any],
        criterion: Criterion | None,
        *,
        forward_only: bool,
        return_outputs: bool,
        over_data: bool,
    ) -> tuple[Any, Any]:
        """Run a batch. Return its loss, on all ranks of the pipeline, and the outputs, on the ranks of the last stage.

        Args:
            next_batch: A function that returns the batch or raises StopIteration; the pipeline reports its errors to
                other ranks. A batch is a pair of inputs and target; inputs that are a tuple are several arguments. Any
                other batch, such as a dict, is both; a transformers model receives the keywords that it names.
            criterion: A function of outputs and target. None for the causal loss of a transformers model.
            forward_only: Whether to omit the backward pass.
            return_outputs: Whether to return outputs.
            over_data: Whether all data ranks run a batch in this pass, because they reduce gradients.

        Raises:
            ValueError: There is no criterion, and the loss of the transformers model is not the causal one. Or images
                do not fit their placeholders on a rank; on all ranks of the replica, and of all replicas in training.
            TypeError, PipelineError: There is no criterion, and the model or the batch is not of transformers' kind.
        """
        if criterion is None and self._other_loss is not None:
            raise ValueError(
                f"criterion=None: it means the loss of the next token, and {self._other_loss}; pass a "
                "criterion(outputs, batch) that returns a mean over rows, or a sum and the number of its items"
            )
        self._weights, self._sum, self._count = [], 0.0, 0.0
        causal = None if criterion is not None else self._causal
        self._criterion = criterion or (_none if causal is None else causal.loss)
        pipeline = self.pipeline
        # The number of rows decides the number of microbatches, so the batch is read before the pipeline starts.
        if self._fits:
            batch, next_batch = read_once(next_batch)
            pipeline = self._fit_for(rows_of(batch))
        # The causal loss is computed from sharded logits. Only a caller who wants outputs pays for gathering them.
        microbatches = pipeline.schedule.microbatches
        called: Callable[[], Any] = lambda: self._called_with(next_batch(), criterion, microbatches)  # noqa: E731
        if self._causal is not None and self._causal.reads_images:
            called = self._read_together(called, over_data=over_data)
        with nullcontext() if causal is None or return_outputs else causal.without_gathering():
            outputs, _, _ = pipeline.forward_backward_step(
                # In a generator, a StopIteration of the data would become a RuntimeError.
                map(lambda _: called(), repeat(None)),  # noqa: C417
                forward_only=forward_only,
                return_outputs=return_outputs,
            )
        return self._mean(), outputs

    def _fit_for(self, rows: int) -> Pipeline:
        """Return a pipeline that has no more microbatches than the batch has rows.

        Only a rank without peers may choose a number: at stage 3, for example, all ranks gather in each microbatch.
        """
        if not 0 < rows < self._schedule.microbatches:
            return self.pipeline
        # Pipelines are kept, because the last batch of each epoch usually has the same number of rows.
        if rows not in self._smaller:
            self._smaller[rows] = self._make(make_schedule("1f1b", 1, rows))
        return self._smaller[rows]

    def _called_with(self, batch: Any, criterion: Criterion | None, microbatches: int) -> Any:
        """Return the batch as the pipeline takes it.

        Raises:
            TypeError: There is no criterion, and the model or the batch is not of transformers' kind.
        """
        if self._causal is not None and isinstance(batch, Mapping):
            is_staged = self._splits_by_rows and self._schedule.stages > 1
            inputs, keywords, labels = self._causal.fed(batch, places=is_staged)
            if self._splits_by_rows:
                # Images have no rows: each microbatch gets those whose placeholders are in its rows.
                split = self._causal.split_images(batch, microbatches)
                images = {name: Microbatches(parts) for name, parts in split.items()}
                others = {name: value for name, value in keywords.items() if name not in images}
                keywords = {**split_keywords(others, len(labels), microbatches), **images}
            return Batch(inputs, keywords, labels if criterion is None else dict(batch))
        if criterion is None:
            raise TypeError(
                f"criterion=None: it means the causal loss of a transformers model called with a dict, and this is a "
                f"{self._kind} with a {type(batch).__name__} for a batch; pass a criterion(outputs, target)"
            )
        return batch

    def _read_together(self, read: Callable[[], Any], *, over_data: bool) -> Callable[[], Any]:
        """Read a batch, and raise on all ranks if one rank cannot. It all-reduces one number over each axis.

        Only a rank that has the images can see that they do not fit, and the other ranks would wait for it in the
        forward pass. Data ranks may evaluate, and accumulate gradients, on different numbers of batches.

        Args:
            read: A function that returns the batch or raises.
            over_data: Whether all data ranks read a batch in this pass.

        Returns:
            A function that returns the batch, or raises StopIteration again, which the pipeline reports.
        """
        topology = self._groups.topology
        axes = [*replica_axes(topology), *([data_axes(topology)] if over_data else [])]
        groups = [self._groups[axis] for axis in axes if self._groups.size(axis) > 1]
        _, again = read_once(read)
        problem = None
        try:
            with suppress(StopIteration):  # the pipeline reports it
                again()
        except Exception as error:  # of any kind: the other ranks raise, too
            problem = error
        failed = torch.tensor(int(problem is not None), device=self._groups.device)
        for group in groups:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group)
        if failed.item():
            agree(problem, None, *groups)
        return again

    @property
    def takes_dicts(self) -> bool:
        """Whether batches that are dicts are the keywords of a transformers model."""
        return self._causal is not None

    def close(self) -> None:
        """Release the pipeline's connections. It waits for no other rank."""
        for pipeline in (self.pipeline, *self._smaller.values()):
            pipeline.close()

    def _weigh(self, target: Any) -> float:
        """Return the weight of a microbatch, its rows.

        The pipeline multiplies each loss by the microbatch's part of the sum of all weights. It asks for all weights
        before the first microbatch, so `_loss` can read them all.
        """
        self._weights.append(float(rows_of(target) or 1))
        return self._weights[-1]

    def _loss(self, outputs: Any, target: Any) -> Tensor:
        """Return the scalar from which backward starts, and add the criterion's result to the loss of the batch.

        The pipeline multiplies it by the part that the microbatch has of the batch's rows, which is right for a mean
        over rows. The count of a sum is its weight over all ranks and microbatches, which the optimizer applies:
        therefore the pipeline's factor is divided out again.
        """
        # A mean is converted to a sum here, so that microbatches of different sizes add up to the mean of the batch.
        given = self._criterion(outputs, target)
        rows = float(rows_of(target) or 1)
        total, count = given if isinstance(given, tuple) else (given * rows, rows)
        # The sums stay on the device: reading them here would wait for the microbatch.
        self._sum, self._count = self._sum + total.detach().double(), self._count + count
        if not isinstance(given, tuple):
            return self._scaled(self._factor.of(given), None)
        weight = number_on_device(count, total.device)
        mean = total / torch.where(weight > 0, weight, 1.0).to(total.dtype)  # a sum of no items is 0, not NaN
        undone = sum(self._weights) / rows if self.normalizes else 1.0
        return self._scaled(self._factor.of(mean) * undone, weight)

    def _scaled(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return loss
        if self._optimizer is None:
            if weight is not None:
                raise ValueError(
                    "criterion() returned (sum, count): a plugin controls precision here and cannot weigh by counts; "
                    "return a mean from criterion(), or remove the plugin"
                )
            return loss
        return self._optimizer.scale(loss, weight=weight)

    def _mean(self) -> Tensor:
        """Return the mean loss of this replica's batch, of which each sequence rank has a shard.

        It all-reduces two numbers over the sequence group and broadcasts one over the pipeline group.
        """
        device = self._groups.device
        mean = torch.zeros((), dtype=torch.float64, device=device)
        if self.pipeline.is_last:
            mean = number_on_device(self._sum / self._count, device)
        if self.pipeline.is_last and splits_sequence(self._groups.topology):
            count = number_on_device(self._count, device)
            # Sequence ranks have different numbers of labels, so sums and counts are reduced, not means.
            both = torch.stack([number_on_device(self._sum, device), count])
            dist.all_reduce(both, group=self._groups["sequence"])
            mean = both[0] / both[1]
        if self._groups.size("pipeline") > 1:
            # Only the last stage has computed the loss.
            last = self._schedule.rank_of(self._schedule.stages - 1)
            dist.broadcast(mean, group=self._groups["pipeline"], group_src=last)
        return mean


class FactorStageRunner(StageRunner):
    """A stage that hands the scalar of a `LossFactor` on with its activations.

    Args:
        stages: The stages of the rank.
        number: The number of the stage.
        last: The number of the pipeline's last stage.
        factor: The factor of the rank's model.
    """

    def __init__(self, stages: PipelineStages, number: int, *, last: int, factor: LossFactor) -> None:
        super().__init__(stages, number)
        self._last, self._factor = last, factor

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the stage on its inputs, without the scalar."""
        inputs, scalar = self._factor.into(inputs, is_first=self.number == 0)
        output = super().forward(*inputs, **keywords)
        return self._factor.out_of(output, scalar, is_last=self.number == self._last)


def rows_of(value: Any) -> int:
    """Return the length of the first tensor with dims in a nested value; 0 if there is no such tensor."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 0


def _none(_: Any, __: Any) -> Tensor:
    raise RuntimeError("the pipeline ran without a criterion; call Strategy.execute_pipeline(), which sets it")
