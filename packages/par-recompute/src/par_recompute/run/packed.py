"""What stands for a saved tensor until backward asks for it."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from .._torch_private import negated, version_of


class Geometry(NamedTuple):
    """How a tensor lies in its storage, and how its elements are read: complex ones as conjugates, or negated."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """How this one does."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )


class Kept:
    """A saved tensor that is kept, here or by the hooks around the layer.

    Args:
        value: The tensor, or what the hooks around the layer have made of it.
        unpack: Gets the tensor back from them; None if it is kept here.
        version: The tensor's version when it was saved.
        layer: Name of the layer, for errors.
    """

    __slots__ = ("_layer", "_left", "_loaded", "_unpack", "_value", "_version", "uses")

    def __init__(self, value: Any, unpack: Callable[[Any], Tensor] | None, version: int, layer: str) -> None:
        self._value, self._unpack, self._version, self._layer = value, unpack, version, layer
        self.uses = self._left = 0
        self._loaded: Tensor | None = None

    def take(self) -> Tensor:
        """The tensor. What hooks bring back is asked for once, and stays until the last of its uses.

        Raises:
            RuntimeError: It was changed in place since.
        """
        if self._unpack is None:
            tensor: Tensor = self._value
            if version_of(tensor) != self._version:
                changed_since(tensor, self._version, f"layer {self._layer!r}")
            return tensor
        if self._loaded is None:
            self._loaded, self._left = self._unpack(self._value), self.uses
        tensor, self._left = self._loaded, self._left - 1
        if self._left <= 0:
            self._loaded = None
        return tensor


class Source(Protocol):
    """What a tensor is taken from, as often as it was used."""

    uses: int

    def take(self) -> Tensor:
        """The tensor."""


class Part:
    """A tensor in the storage of another one.

    Args:
        source: What gives the other one.
        geometry: How the tensor lies in its storage.
    """

    __slots__ = ("_geometry", "source")

    def __init__(self, source: Source, geometry: Geometry) -> None:
        self.source, self._geometry = source, geometry

    def take(self) -> Tensor:
        """The tensor, as it was."""
        _, size, stride, offset, is_conj, is_neg = self._geometry
        part = self.source.take().as_strided(size, stride, offset)
        if part.is_conj() != is_conj:
            part = part.conj()
        return part if part.is_neg() == is_neg else negated(part)


Packed = Kept | Part


def take(packed: Packed) -> Tensor:
    """The tensor that this stands for."""
    return packed.take()


def use(packed: Packed, count: int = 1) -> Packed:
    """Notes that backward will ask for a tensor so many times more."""
    (packed.source if isinstance(packed, Part) else packed).uses += count
    return packed


def changed_since(tensor: Tensor, version: int, where: str) -> NoReturn:
    """Raises what autograd raises, with the place."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{list(tensor.shape)}, saved in {where}, is at version {version_of(tensor)}; expected version {version} "
        "instead. Change it before it is used, or change a copy"
    )
