"""Packed forms of saved tensors, from forward until backward unpacks them."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from .._torch_private import negated, version_of


class Geometry(NamedTuple):
    """Layout of a tensor in its storage, and how its elements are read: complex ones as conjugates, or negated."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """Return the geometry of a tensor."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )


class Kept:
    """Saved tensor, stored here or by the hooks around the layer.

    Args:
        value: Tensor, or the packed value that the hooks around the layer returned for it.
        unpack: Unpack function of the hooks around the layer; None if the tensor is stored here.
        version: Version of the tensor when it was saved.
        layer: Name of the layer, for errors.
    """

    __slots__ = ("_layer", "_left", "_loaded", "_unpack", "_value", "_version", "uses")

    def __init__(self, value: Any, unpack: Callable[[Any], Tensor] | None, version: int, layer: str) -> None:
        self._value, self._unpack, self._version, self._layer = value, unpack, version, layer
        self.uses = self._left = 0
        self._loaded: Tensor | None = None

    def take(self) -> Tensor:
        """Return the tensor. The first use unpacks it from the outer hooks, and the last use releases it.

        Raises:
            RuntimeError: The tensor was changed in place since.
        """
        if self._unpack is None:
            tensor: Tensor = self._value
            if version_of(tensor) != self._version:
                changed_since(tensor, self._version, f"layer {self._layer!r}")
            return tensor
        # The outer hooks may copy from the host or a disk, so several tensors in one storage unpack it once.
        if self._loaded is None:
            self._loaded, self._left = self._unpack(self._value), self.uses
        tensor, self._left = self._loaded, self._left - 1
        # The next backward of a graph that is kept finds nothing here, and unpacks again.
        if self._left <= 0:
            self._loaded = None
        return tensor


class StorageOwner(Protocol):
    """Owner of a storage that serves as many `take` calls as it has uses."""

    uses: int

    def take(self) -> Tensor:
        """Return the tensor."""


class Part:
    """Tensor in the storage of another tensor.

    Args:
        source: Owner of the other tensor.
        geometry: Layout of the tensor in the storage.
    """

    __slots__ = ("_geometry", "source")

    def __init__(self, source: StorageOwner, geometry: Geometry) -> None:
        self.source, self._geometry = source, geometry

    def take(self) -> Tensor:
        """Return the tensor with its original layout."""
        _, size, stride, offset, is_conj, is_neg = self._geometry
        # A dropped tensor is a view of a recomputed one: the view is rebuilt from its layout, without a copy.
        part = self.source.take().as_strided(size, stride, offset)
        if part.is_conj() != is_conj:
            part = part.conj()
        return part if part.is_neg() == is_neg else negated(part)


Packed = Kept | Part


def take(packed: Packed) -> Tensor:
    """Return the tensor of a packed form."""
    return packed.take()


def use(packed: Packed, count: int = 1) -> Packed:
    """Add `count` to the number of times that backward unpacks a tensor."""
    (packed.source if isinstance(packed, Part) else packed).uses += count
    return packed


def changed_since(tensor: Tensor, version: int, where: str) -> NoReturn:
    """Raise autograd's error for an in-place change, with the place where the tensor was saved."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{list(tensor.shape)}, saved in {where}, is at version {version_of(tensor)}; expected version {version} "
        "instead. Change it before it is used, or change a copy"
    )
