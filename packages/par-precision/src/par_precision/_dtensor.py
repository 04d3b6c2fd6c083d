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
    """Whether a tensor is a DTensor."""
    kind = type(tensor)
    return kind not in _ORDINARY and hasattr(kind, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, outside of autograd; an ordinary tensor itself."""
    return local_tensor_of(tensor) if is_dtensor(tensor) else tensor


def cut_like(local: Tensor, tensor: Tensor) -> Tensor:
    """A DTensor of what this rank holds, if that has the shape of its part of a DTensor; else the tensor itself."""
    if not is_dtensor(tensor) or local.shape != local_tensor_of(tensor).shape:
        return local
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of several tensors that this rank holds."""
    return [tensor if type(tensor) in _ORDINARY else local_part(tensor) for tensor in tensors]


def local_gradient(tensor: Tensor) -> Tensor | None:
    """Return the local part of a tensor's gradient, sharded like the tensor; None without a gradient.

    A DTensor's gradient may have other placements than the DTensor, or be partial. It is then redistributed first,
    which is a collective over its mesh.
    """
    gradient = tensor.grad
    if gradient is None or type(gradient) is Tensor or not is_dtensor(gradient):
        return gradient
    placements = spec_of(tensor).placements  # only DTensors have such gradients
    if spec_of(gradient).placements == placements:
        return local_tensor_of(gradient)
    tensor.grad = gradient.redistribute(placements=placements)
    return local_part(tensor.grad)


def local_gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of gradients that this rank holds, of those tensors that have a gradient."""
    return [gradient for tensor in tensors if (gradient := local_gradient(tensor)) is not None]


def gradient_is_in_place(tensor: Tensor) -> bool:
    """Whether a tensor's gradient is cut like the tensor, so that `local_gradient` needs no communication."""
    gradient = tensor.grad
    return not is_dtensor(tensor) or not is_dtensor(gradient) or gradient.placements == tensor.placements
