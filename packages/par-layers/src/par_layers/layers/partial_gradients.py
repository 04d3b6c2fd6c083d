"""Reduction of partial gradients, of parameters that are replicated over ranks with different tokens or features."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups, gradients

from .parallel_layer import check_records


class PartialGradientReducer:
    """A gradient handler that sums, once a step, what is still partial after the last backward.

    Partial are the gradients of norms and biases under sequence parallelism and in 2D to 3D, of weights over the depth
    of 2.5D, and of copied key and value heads. Sums over different axes commute, so data-parallel reduction may come
    before or after.

    Args:
        source: The model, or the optimizer where gradients live in flat shards.
        groups: The groups that the model's layers were made with.

    Example:
        loss.backward()
        PartialGradientReducer(model, groups).handle_gradient()
        optimizer.step()
    """

    def __init__(self, source: nn.Module | torch.optim.Optimizer, groups: ProcessGroups) -> None:
        self._source = source
        self._groups = groups
        self._checked = False

    def handle_gradient(self) -> None:
        """Sum in place: one all-reduce for each set of axes over which some gradient is partial.

        Every rank of the tensor group must call it, once after the last backward of a step.

        Raises:
            RuntimeError: A parameter of our layers does not say which sums it needs, as after FSDP2's `fully_shard`.
        """
        if not self._checked and isinstance(self._source, nn.Module):
            check_records(self._source)
        self._checked = True
        partial: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}
        for _, box, view in gradients(self._source):
            if box.sum_over:
                partial.setdefault((box.sum_over, view.dtype), []).append(view)
        for (axes, _), views in partial.items():
            flat = torch.cat([view.reshape(-1) for view in views])
            dist.all_reduce(flat, group=self._groups[axes if len(axes) > 1 else axes[0]])  # sum over `axes`
            for view, summed in zip(views, flat.split([view.numel() for view in views]), strict=True):
                view.copy_(summed.view_as(view))
