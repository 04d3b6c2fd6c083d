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
    """Return the norm of gradients over all ranks of a group, each element counted once.

    A DTensor, a tensor with a `Sharding` and a flat one with `Segments` say themselves which rank owns which element.
    Any other tensor is this rank's own (as a pipeline stage's is), unless `replicas` says that it is a copy. There is
    one all-reduce, of one number; a rank without gradients takes part too.

    Args:
        params: Parameters, a module or an optimizer. Under par-zero an optimizer, since that is where gradients live.
        group: The ranks that sum: those that share the model and its gradients. None: this rank alone.
        replicas: The ranks on which tensors that say nothing of ranks are copies of each other.
        norm_type: Order of the norm, above 0; math.inf for the largest absolute value.

    Returns:
        An fp64 scalar, the same on all ranks of the group.

    Raises:
        ValueError: A norm_type that is not above 0; or tensors that are cut over ranks, and no group.
        TypeError: A sparse gradient. On all ranks of the group if the sum is made on a CPU; else on its own rank, and
            the others get a norm that is not finite.
    """
    norm_type = checked_order(norm_type)
    tensors = list(tensors_in(params))
    gradients = counted_gradients(tensors, Ownership(group, replicas))
    return total_norm(gradients, group, device_of(tensors, group), norm_type)


CountedGradients = list[tuple[Counted, Tensor]]
"""This rank's parts of gradients, and which elements of each it counts."""


def counted_gradients(tensors: Iterable[Tensor], ownership: Ownership) -> CountedGradients:
    """Return this rank's parts of the gradients of some tensors, without the tensors that have no gradient."""
    return [(ownership.of(tensor), gradient) for tensor in tensors if (gradient := local_gradient(tensor)) is not None]


def total_norm(
    gradients: CountedGradients, group: dist.ProcessGroup | None, device: torch.device, order: float = 2.0
) -> Tensor:
    """All-reduce the norm of the elements that the ranks of a group count: one fp64 number.

    Args:
        gradients: This rank's gradients.
        group: The ranks that sum. None: this rank alone.
        device: Device of the all-reduce and of the result.
        order: Order of the norm.

    Raises:
        TypeError: A sparse gradient; on which ranks, `grad_norm` says.
    """
    sparse = next((gradient for _, gradient in gradients if gradient.is_sparse), None)
    parts = counted_parts(gradients, order) if sparse is None else []
    if order == math.inf:
        total, operation = largest(parts, device), dist.ReduceOp.MAX
    else:
        total, operation = sum_of_powers(parts, order, device), dist.ReduceOp.SUM
    if sparse is not None:
        # The others must be reached through the one number. No sum of powers is negative, so they know what this means
        total.fill_(math.inf if order == math.inf else -math.inf)
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(total, op=operation, group=group)
    if sparse is not None or (total.is_cpu and total < 0):  # on a GPU this look would wait
        what = "on another rank" if sparse is None else f"of shape {tuple(sparse.shape)}"
        raise TypeError(f"a gradient {what} is sparse, and norms are of dense ones; use an embedding with sparse=False")
    return total if order == math.inf else total.sqrt() if order == 2 else total.pow(1 / order)


def counted_parts(gradients: CountedGradients, order: float = 2.0) -> list[Tensor]:
    """Return the elements of gradients that this rank counts, as real tensors to sum.

    Args:
        gradients: This rank's gradients.
        order: Order of the norm. The sums of squares of real and imaginary parts are those of absolute values; in any
            other order, the absolute values of complex numbers themselves are summed.
    """
    parts: list[Tensor] = []
    for counted, gradient in gradients:
        own = [gradient] if counted is EVERYTHING else counted.of(gradient)
        if gradient.is_complex():
            own = [as_real(part) if order == 2 else part.to(torch.complex128).abs() for part in own]
        parts += own
    return parts


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as its real and imaginary parts, in the same memory; any other tensor unchanged.

    A conjugate is a view of other numbers; its imaginary parts are returned as they are stored in memory.
    """
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def checked_order(order: float) -> float:
    """Return the order of a norm as a float, as torch does: configs write "inf". Raise ValueError for any other."""
    if not float(order) > 0:
        raise ValueError(f"norm_type is {order}; give a number above 0, or math.inf for the largest gradient")
    return float(order)


def device_of(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for sums over ranks: the tensors' device, else a device that the group's backend supports."""
    for tensor in tensors:
        # State that is offloaded has its gradients on the host, from where NCCL sends nothing.
        if group is None or backend_of(group, tensor.device.type) is not None:
            return tensor.device
    if group is None or backend_of(group, "cpu") is not None:
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")
