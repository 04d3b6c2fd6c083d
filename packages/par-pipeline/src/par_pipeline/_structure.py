"""Nested values (tuples, lists, dicts, None, numbers, ...) as a list of tensors and a signature of all the rest."""

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten

ALIGNMENT = 64  # bytes, so that a part of a message can be viewed as any dtype


class TensorSpec(NamedTuple):
    """Metadata of a tensor.

    Args:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        device: Type of its device, such as "cpu".
        requires_grad: Whether the tensor requires a gradient.
        sent: Dtype in which the tensor is sent.
        bytes: Size of its elements in the dtype `sent`, in bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    sent: torch.dtype
    bytes: int


class Plain(NamedTuple):
    """Pickled leaf that is not a tensor."""

    data: bytes


class Signature(NamedTuple):
    """Complete description of a nested value, without its tensors' elements.

    Args:
        structure: Description of the nesting. None: the value is its only leaf. A number: a plain tuple of so many
            leaves. Bytes: the pickled value with numbers in place of its leaves.
        leaves: Metadata of each leaf, in order.
        specs: Metadata of each tensor, in order.
        size: Size of all tensors, each aligned, in bytes.
    """

    structure: bytes | int | None
    leaves: tuple[TensorSpec | Plain, ...]
    specs: tuple[TensorSpec, ...]
    size: int

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Build the value with these tensors."""
        if self.structure is None and tensors:
            return tensors[0]
        remaining = iter(tensors)
        leaves = [
            next(remaining) if isinstance(leaf, TensorSpec) else pickle.loads(leaf.data)  # noqa: S301 - from a rank of ours
            for leaf in self.leaves
        ]
        if self.structure is None:
            return leaves[0]
        if isinstance(self.structure, int):
            return tuple(leaves)
        return tree_map(leaves.__getitem__, pickle.loads(self.structure))  # noqa: S301 - from a rank of ours


def flatten(
    value: Any, like: Signature | None = None, border: torch.dtype | None = None
) -> tuple[list[Tensor], Signature]:
    """Return a value's tensors, in order, and its signature.

    Args:
        value: Tensors, plain values and any nesting of them.
        like: Signature that the value probably has; the function compares it first, to save building a new one.
        border: Widest dtype in which real floating-point tensors are sent. None: they are sent in their own dtype.

    Raises:
        TypeError: An object in the value hides tensors in its attributes.
    """
    # Most messages have the shapes of the last step, and a comparison is faster than a new signature.
    if like is not None:
        if like.structure is None and _looks_like(value, like.leaves[0]):
            return [value], like
        if type(value) is tuple and like.structure == len(value) and all(map(_looks_like, value, like.leaves)):
            return list(value), like
    structure: bytes | int | None = None
    leaves: list[Any]
    if isinstance(value, Tensor):
        leaves = [value]
    elif type(value) is tuple and all(item is None or isinstance(item, Tensor) for item in value):
        leaves, structure = list(value), len(value)
    else:
        leaves, tree = tree_flatten(value)
        # torch's tree spec cannot be compared across processes, but a value with numbers as leaves can.
        structure = pickle.dumps(tree_unflatten(range(len(leaves)), tree))
    described: list[TensorSpec | Plain] = []
    tensors: list[Tensor] = []
    size = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            narrowed = border is not None and leaf.is_floating_point() and leaf.dtype.itemsize > border.itemsize
            sent = border if border is not None and narrowed else leaf.dtype
            bytes_sent = leaf.numel() * sent.itemsize
            described.append(
                TensorSpec(leaf.dtype, tuple(leaf.shape), leaf.device.type, leaf.requires_grad, sent, bytes_sent)
            )
            tensors.append(leaf)
            size += aligned(bytes_sent)
        else:
            described.append(Plain(_pickled(leaf)))
    specs = tuple(leaf for leaf in described if isinstance(leaf, TensorSpec))
    return tensors, Signature(structure, tuple(described), specs, size)


def _looks_like(value: Any, leaf: TensorSpec | Plain) -> bool:
    return (
        isinstance(value, Tensor)
        and isinstance(leaf, TensorSpec)
        and value.shape == leaf.shape
        and value.dtype == leaf.dtype
        and value.requires_grad == leaf.requires_grad
        and value.device.type == leaf.device
    )


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def aligned(size: int) -> int:
    """Return a size rounded up to a multiple of the alignment, in bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """Pickler that raises an error for tensors, because they would lose their gradients."""

    def reducer_override(self, value: Any) -> Any:
        """Raise TypeError if an object is a tensor; pickle calls this method for every object."""
        if isinstance(value, Tensor):
            raise TypeError(
                "an object with a tensor in it is passed between stages, which loses its gradient; pass tuples, lists "
                "and dicts, or register its type with torch.utils._pytree.register_pytree_node"
            )
        return NotImplemented


def _pickled(value: Any) -> bytes:
    # Plain values contain no tensors, so the fast pickler is enough.
    if value is None or type(value) in (bool, int, float, str):
        return pickle.dumps(value)
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
