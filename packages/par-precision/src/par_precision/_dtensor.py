"""The parts of DTensors that this rank holds. DTensor itself is never imported: only who has one pays for it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

from par_groups import WatchedWeight

from ._torch_private import local_tensor_of, spec_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ORDINARY = (nn.Parameter, Tensor, WatchedWeight)  # comparing types is quicker than looking for an attribute


def is_dtensor(tensor: object) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor."""
    kind = type(tensor)
    return kind not in _ORDINARY and hasattr(kind, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, outside of autograd; an ordinary tensor itself."""
    return local_tensor_of(tensor) if is_dtensor(tensor) else tensor


def cut_like(local: Tensor, tensor: Tensor) -> Tensor:
    """Return a DTensor of a local tensor with the shape of this rank's part of a given DTensor.

    Else the local tensor.
    """
    # State of another shape, such as a count of steps, belongs to the parameter as a whole and is not sharded.
    if not is_dtensor(tensor) or local.shape != local_tensor_of(tensor).shape:
        return local
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of several tensors."""
    return [tensor if type(tensor) in _ORDINARY else local_part(tensor) for tensor in tensors]


def local_gradient(tensor: Tensor) -> Tensor | None:
    """Return the local part of a tensor's gradient, sharded like the tensor; None without a gradient.

    A DTensor's gradient may have other placements than the DTensor, or be partial. It is then redistributed first,
    which is a collective over its mesh.
    """
    gradient = tensor.grad
    # A look at the type settles the usual case, without a search for attributes.
    if gradient is None or type(gradient) is Tensor or not is_dtensor(gradient):
        return gradient
    placements = spec_of(tensor).placements  # only DTensors have such gradients
    if spec_of(gradient).placements == placements:
        return local_tensor_of(gradient)
    # The redistributed gradient stays in place, so that a second look in the same step communicates nothing.
    tensor.grad = gradient.redistribute(placements=placements)
    return local_part(tensor.grad)


def local_gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of the gradients of several tensors, without the tensors that have no gradient."""
    return [gradient for tensor in tensors if (gradient := local_gradient(tensor)) is not None]


def gradient_is_in_place(tensor: Tensor) -> bool:
    """Return whether a tensor's gradient is sharded like the tensor, so `local_gradient` needs no communication."""
    gradient = tensor.grad
    return not is_dtensor(tensor) or not is_dtensor(gradient) or gradient.placements == tensor.placements
