"""Nested values (tuples, lists, dicts, None, numbers, ...) as a list of tensors and a signature of all the rest."""

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ALIGNMENT = 64  # bytes, so that a part of a message can be viewed as any dtype


class TensorSpec(NamedTuple):
    """What a tensor looks like.

    Args:
        dtype: Any.
        shape: Its sizes.
        device: The type of its device, such as "cpu".
        requires_grad: Whether a gradient is wanted for it.
        sent: The dtype in which it is sent.
        bytes: Of its elements in that dtype.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    sent: torch.dtype
    bytes: int


class Plain(NamedTuple):
    """Anything else, pickled."""

    data: bytes


class Signature(NamedTuple):
    """All of a value but its tensors' elements.

    Args:
        structure: None: the value is the only leaf. A number: a plain tuple of so many leaves. Bytes: the value with
            numbers in place of its leaves, pickled.
        leaves: In order.
        specs: Those of the tensors.
        size: Bytes of all tensors, each aligned.
    """

    structure: bytes | int | None
    leaves: tuple[TensorSpec | Plain, ...]
    specs: tuple[TensorSpec, ...]
    size: int

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value that has these tensors."""
        if self.structure is None and tensors:
            return tensors[0]
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else pickle.loads(leaf.data) for leaf in self.leaves]  # noqa: S301 - from a rank of ours
        if self.structure is None:
            return leaves[0]
        if isinstance(self.structure, int):
            return tuple(leaves)
        return pytree.tree_map(leaves.__getitem__, pickle.loads(self.structure))  # noqa: S301 - from a rank of ours


def flatten(
    value: Any, like: Signature | None = None, border: torch.dtype | None = None
) -> tuple[list[Tensor], Signature]:
    """The tensors of a value, in order, and its signature.

    Args:
        value: Any.
        like: A signature that it may have, which is then quicker.
        border: The widest dtype in which real floating-point tensors are sent; None: as they are.

    Raises:
        TypeError: An object that holds tensors where nobody can see them.
    """
    if like is not None:
        if like.structure is None and _looks_like(value, like.leaves[0]):
            return [value], like
        if type(value) is tuple and like.structure == len(value) and all(map(_looks_like, value, like.leaves)):
            return list(value), like
    structure: bytes | int | None = None
    leaves: list[Any]
    if isinstance(value, Tensor):
        leaves = [value]
    elif type(value) is tuple and all(each is None or isinstance(each, Tensor) for each in value):
        leaves, structure = list(value), len(value)
    else:
        leaves, tree = pytree.tree_flatten(value)
        structure = pickle.dumps(pytree.tree_unflatten(range(len(leaves)), tree))
    described: list[TensorSpec | Plain] = []
    tensors: list[Tensor] = []
    size = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            sent = border if border is not None and _is_wider(leaf.dtype, border) else leaf.dtype
            held = leaf.numel() * sent.itemsize
            described.append(
                TensorSpec(leaf.dtype, tuple(leaf.shape), leaf.device.type, leaf.requires_grad, sent, held)
            )
            tensors.append(leaf)
            size += aligned(held)
        else:
            described.append(Plain(_pickled(leaf)))
    specs = tuple(each for each in described if isinstance(each, TensorSpec))
    return tensors, Signature(structure, tuple(described), specs, size)


def _is_wider(dtype: torch.dtype, border: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > border.itemsize


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
    """The tensors of a value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """Refuses tensors: they would lose their gradients."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise TypeError(
                "an object with a tensor in it is passed between stages, which loses its gradient; pass tuples, lists "
                "and dicts, or register its type with torch.utils._pytree.register_pytree_node"
            )
        return NotImplemented


def _pickled(value: Any) -> bytes:
    if value is None or type(value) in (bool, int, float, str):
        return pickle.dumps(value)
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
