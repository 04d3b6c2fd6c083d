"""`StepSums`: the numbers that the ranks sum in each step of a `MixedOptimizer`."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from .norm.sums import sum_of_powers
from .scale.loss_weights import LossWeights


class StepSums:
    """Sums over ranks that a step needs: the squares of gradients, and the weights of losses."""

    def totals(self, parts: Sequence[Tensor], weights: LossWeights, group: dist.ProcessGroup | None) -> Tensor:
        """Return the sums, (4) in fp64, as `LossWeights.divide_` takes them. Collective: one all-reduce of them.

        Args:
            parts: The elements of gradients that this rank counts.
            weights: The weights of the step's losses.
            group: Ranks that sum. None: only this rank.
        """
        totals = weights.beside(sum_of_powers(parts, 2, weights.typical.device))
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(totals, group=group)  # (4) in fp64
        return totals
