"""Gradient handler that averages over the data ranks in a smaller dtype."""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import ProcessGroups, gradients


class YourGradientHandler:
    """Average of gradients over the data ranks; replaces "data_parallel".

    Args:
        model: Model of the strategy; unused.
        optimizer: Optimizer that holds the gradients.
        groups: Process groups; the handler reduces over "data".
        dtype: Dtype of the all-reduce. "bfloat16" halves the bytes and rounds each
            gradient to 8 significant bits.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        groups: ProcessGroups,
        *,
        dtype: str = "bfloat16",
    ) -> None:
        del model
        self._optimizer, self._group = optimizer, groups["data"]
        self._dtype: torch.dtype = getattr(torch, dtype)

    @torch.no_grad()
    def handle_gradient(self) -> None:
        """Average all gradients with one all-reduce; called once a step."""
        views = [view for _, _, view in gradients(self._optimizer)]
        if not views:  # a pipeline stage may have no parameters
            return
        flat = torch.cat([view.flatten() for view in views])
        mean = (flat / self._group.size()).to(self._dtype)
        dist.all_reduce(mean, group=self._group)
        parts = mean.split([view.numel() for view in views])
        for view, part in zip(views, parts, strict=True):
            view.copy_(part.view_as(view))
