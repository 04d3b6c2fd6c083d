"""The gradient handler: the mean over data ranks, of numbers that are made smaller for the way."""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import ProcessGroups, gradients


class YourGradientHandler:
    """Averages gradients over the data ranks, in place of the built-in "data_parallel".

    Args:
        model: The model; it is not looked at.
        optimizer: Knows where the gradients live.
        groups: "data" is the one that is reduced over.
        dtype: In which gradients travel, such as "bfloat16", which halves the bytes and rounds each gradient to 8 bits.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, groups: ProcessGroups, *, dtype: str = "bfloat16"
    ) -> None:
        del model
        self._optimizer, self._group = optimizer, groups["data"]
        self._dtype: torch.dtype = getattr(torch, dtype)

    @torch.no_grad()
    def handle_gradient(self) -> None:
        """Called once a step, on all ranks: one all-reduce of all gradients."""
        views = [view for _, _, view in gradients(self._optimizer)]
        if not views:  # a pipeline stage may have no parameters
            return
        flat = torch.cat([view.flatten() for view in views])
        mean = (flat / self._group.size()).to(self._dtype)
        dist.all_reduce(mean, group=self._group)
        for view, part in zip(views, mean.split([view.numel() for view in views]), strict=True):
            view.copy_(part.view_as(view))
