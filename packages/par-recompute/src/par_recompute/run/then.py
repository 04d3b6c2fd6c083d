"""Snapshot of a module's state at its forward, so that backward runs it again in that state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import version_of
from ..observe.observer import is_plain
from .packed import changed_since


class Then:
    """Snapshot of a module's training modes, parameters and buffers, including its submodules.

    Args:
        module: Module.
    """

    __slots__ = ("_modes", "_tensors")

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._modes = [(each, each.training) for each in modules]
        self._tensors: list[tuple[dict[str, Any], str, Tensor, torch.Size, int]] = [
            (own, name, tensor, tensor.shape, version_of(tensor))
            for each in modules
            for own in (each._parameters, each._buffers)
            for name, tensor in own.items()
            if tensor is not None
        ]

    def check(self, where: str) -> None:
        """Compare shapes and versions of parameters and buffers with the snapshot.

        Args:
            where: Name of the layer or module, for the error.

        Raises:
            RuntimeError: A tensor was changed in place since, or is sharded now.
        """
        for _, name, tensor, shape, version in self._tensors:
            if tensor.shape != shape:
                raise RuntimeError(
                    f"{where} is called again while its {name!r} is cut, of shape {list(tensor.shape)} instead of "
                    f"{list(shape)}: a module that is dropped needs its parameters until what uses its output has had "
                    "its backward; let units of parameters be whole layers, or use 'layers'"
                )
            if version_of(tensor) != version:
                changed_since(tensor, version, where)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the snapshot inside the context, including tensors that other code has replaced.

        `torch.func.functional_call` replaces tensors during a forward, for example. Sharded parameters that are not
        gathered have another shape or are not plain tensors. They stay unchanged: the sharding library gathers them.
        """
        modes = [(module, mode, module.training) for module, mode in self._modes if module.training != mode]
        swapped = [
            (own, name, then, own[name])
            for own, name, then, *_ in self._tensors
            if name in own
            and own[name] is not then
            and is_plain(then)
            and is_plain(own[name])
            and own[name].shape == then.shape
        ]
        for module, mode, _ in modes:
            module.training = mode
        for own, name, then, _ in swapped:
            own[name] = then
        try:
            yield
        finally:
            for own, name, _, now in swapped:
                own[name] = now
            for module, _, mode in modes:
                module.training = mode
