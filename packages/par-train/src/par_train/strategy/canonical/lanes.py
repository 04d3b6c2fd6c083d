"""The run of a batch whose microbatches are lanes.

A lane is a microbatch of a fixed number of rows. Every lane runs its own forward and backward, in the same shapes on
every topology, and what ranks and microbatches add up are the gradients of lanes, rounded to one grid. The sums are
exact, so their order does not matter: `par_precision.ExactSums` has the argument.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from par_groups import agree
from par_precision import TotalWeights

from ..._torch_private import tree_leaves
from ..execute import Criterion, Execution, rows_of


class LaneExecution(Execution):
    """The pipeline of a model whose microbatches are lanes: the factor of a loss does not depend on the others'.

    Args:
        *arguments: The arguments of `Execution`.
    """

    normalizes = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._fits = False  # a batch of fewer rows would have fewer lanes
        self._copies = 1  # of a criterion's count, which each rank of a sequence returns for full rows

    def run(
        self, next_batch: Callable[[], Any], criterion: Criterion | None, *, forward_only: bool, **options: Any
    ) -> Any:
        """Run a batch, and let all ranks know beforehand, in the first step, how much a loss weighs."""
        optimizer = self._optimizer
        if not forward_only and optimizer is not None and optimizer.scaling.steps == 0:
            weights = optimizer.scaling.loss_weights
            next_batch = partial(self._expected, next_batch, weights)  # type: ignore[arg-type]
        self._copies = 1 if criterion is None else self._groups.size("sequence")
        return super().run(next_batch, criterion, forward_only=forward_only, **options)

    def _expected(self, next_batch: Callable[[], Any], weights: TotalWeights) -> Any:
        problem, ended, batch, items = None, False, None, 0
        try:
            batch = next_batch()
            items = _items_of(batch) // self.pipeline.schedule.microbatches
        except StopIteration:
            ended = True
        except Exception as error:  # of any kind: every rank raises what one rank has raised
            problem = error
        # The end of the data is no error, and is raised only after the ranks have agreed.
        weights.expect(float(max(agree(problem, items, None).values())))
        if ended:
            raise StopIteration
        return batch

    def _scaled(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        # The optimizer adds up the weights of all ranks of a sequence. The causal loss counts a rank's own labels.
        return super()._scaled(loss, None if weight is None else weight / self._copies)

    def _weigh(self, target: Any) -> float:
        self._weights.append(float(rows_of(target) or 1))
        if self._weights[-1] != self._weights[0]:
            raise ValueError(
                f"the batch has microbatches of {self._weights[0]:g} and {self._weights[-1]:g} rows, but lanes are of "
                f"equal size; pass a number of rows that {self.pipeline.schedule.microbatches} divides"
            )
        return 1.0


def _items_of(batch: Any) -> int:
    """Return the number of elements of a batch's target: an upper bound of what a sum of losses counts."""
    target = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    if isinstance(target, Mapping) and "labels" in target:
        target = target["labels"]
    return next((leaf.numel() for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim()), 1)
