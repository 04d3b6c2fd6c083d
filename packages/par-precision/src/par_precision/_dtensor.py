"""DTensors: what this rank has of them. Who has none does not import them."""

from collections.abc import Iterable
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn


class Placed(Protocol):
    """What is asked of a DTensor."""

    placements: tuple[Any, ...]
    device_mesh: Any
    _local_tensor: Tensor
    _spec: Any

    def redistribute(self, *, placements: tuple[Any, ...]) -> Tensor:
        """The same, placed otherwise."""


_ORDINARY = (nn.Parameter, Tensor)  # a look at the type is quicker than one at an attribute


def is_placed(tensor: object) -> TypeGuard[Placed]:
    """Whether a tensor is a DTensor."""
    kind = type(tensor)
    return kind not in _ORDINARY and hasattr(kind, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, of which no graph is made: what `to_local()` returns then, after more looks."""
    return tensor._local_tensor if is_placed(tensor) else tensor


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same of several."""
    return [each if type(each) in _ORDINARY else local_part(each) for each in tensors]


def local_gradient(tensor: Tensor) -> Tensor | None:
    """This rank's part of the gradient of a tensor, cut like the tensor; None if there is none.

    A DTensor's gradient may be placed otherwise, or still be a sum over ranks; then it is first brought into place,
    which is a collective over its mesh.
    """
    gradient = tensor.grad
    if gradient is None or type(gradient) is Tensor or not is_placed(gradient):
        return gradient
    placements = tensor._spec.placements  # type: ignore[attr-defined]  # only DTensors have such gradients
    if gradient._spec.placements == placements:
        return gradient._local_tensor
    tensor.grad = gradient.redistribute(placements=placements)
    return local_part(tensor.grad)


def local_gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that there are."""
    return [gradient for tensor in tensors if (gradient := local_gradient(tensor)) is not None]


def is_in_place(tensor: Tensor) -> bool:
    """Whether the gradient that a tensor has is cut like the tensor."""
    gradient = tensor.grad
    return not is_placed(tensor) or not is_placed(gradient) or gradient.placements == tensor.placements
