"""The norm of all gradients of a model, wherever they live: one sum in fp64 and one all-reduce."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import backend_of

from .._dtensor import local_gradient
from .counted import EVERYTHING, Counted
from .ownership import Ownership, Parameters, tensors_in
from .sums import largest, sum_of_powers


@torch.no_grad()
def grad_norm(
    params: Parameters,
    group: dist.ProcessGroup | None,
    *,
    replicas: dist.ProcessGroup | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """The norm of gradients over all ranks of a group, each element counted once.

    A DTensor, a tensor with a `Sharding` and a flat one with `Segments` say themselves who owns what. Any other is this
    rank's own (a pipeline stage's, say), unless `replicas` says that it is a copy. One all-reduce of one number; a rank
    without gradients takes part too.

    Args:
        params: Parameters, a module or an optimizer. Under par-zero an optimizer, which is where gradients live.
        group: The ranks that sum: those that share the model, and its gradients. None: this rank alone.
        replicas: The ranks on which tensors that say nothing are copies.
        norm_type: Above 0; math.inf for the largest.

    Returns:
        An fp64 scalar, the same on all ranks of the group.

    Raises:
        ValueError: Another norm_type; or tensors that are cut over ranks, and no group.
        TypeError: A sparse gradient. On all ranks of the group where sums are made on a CPU; else on its own rank, and
            the others get what is not finite.
    """
    check_order(norm_type)
    tensors = list(tensors_in(params))
    held = held_gradients(tensors, Ownership(group, replicas))
    return total_norm(held, group, device_of(tensors, group), norm_type)


Held = list[tuple[Counted, Tensor]]
"""Gradients, and what of them this rank counts."""


def held_gradients(tensors: Iterable[Tensor], ownership: Ownership) -> Held:
    """This rank's parts of the gradients that some tensors have."""
    return [(ownership.of(tensor), gradient) for tensor in tensors if (gradient := local_gradient(tensor)) is not None]


def total_norm(held: Held, group: dist.ProcessGroup | None, device: torch.device, order: float = 2.0) -> Tensor:
    """The norm of what all ranks of a group count.

    Args:
        held: This rank's gradients.
        group: Who sums; None: this rank alone.
        device: Of the all-reduce and of the result.
        order: Of the norm.

    Raises:
        TypeError: A gradient is sparse; as for `grad_norm`.
    """
    sparse = next((gradient for _, gradient in held if gradient.is_sparse), None)
    parts = counted_parts(held) if sparse is None else []
    if order == math.inf:
        total, operation = largest(parts, device), dist.ReduceOp.MAX
    else:
        total, operation = sum_of_powers(parts, order, device), dist.ReduceOp.SUM
    if sparse is not None:
        total.fill_(math.inf if order == math.inf else -math.inf)  # no sum of powers is negative: others see it
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(total, op=operation, group=group)  # one fp64 number
    if sparse is not None or (total.is_cpu and total < 0):  # where a look at it is free
        what = "on another rank" if sparse is None else f"of shape {tuple(sparse.shape)}"
        raise TypeError(f"a gradient {what} is sparse, and norms are of dense ones; use an embedding with sparse=False")
    return total if order == math.inf else total.sqrt() if order == 2 else total.pow(1 / order)


def counted_parts(held: Held) -> list[Tensor]:
    """What this rank counts of its gradients."""
    parts: list[Tensor] = []
    for part, gradient in held:
        if part is EVERYTHING:
            parts.append(gradient)
        else:
            parts.extend(part.of(gradient))
    return parts


def check_order(order: float) -> None:
    """Raises unless it is the order of a norm."""
    if not order > 0:
        raise ValueError(f"norm_type is {order}; give a number above 0, or math.inf for the largest gradient")


def device_of(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """Where a sum over ranks is made: where tensors are, or else where the group's backend works."""
    if tensors:
        return tensors[0].device
    if group is None or backend_of(group, "cpu") is not None:
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")
