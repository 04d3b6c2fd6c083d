"""How a module was when it ran, so that it runs again as it did then."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import version_of
from ..observe.observer import is_plain
from .packed import changed_since


class Then:
    """The mode of a module and of the modules below it, and the parameters and buffers that they had.

    Args:
        module: The module.
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
        """Compares shapes and versions of parameters and buffers with those of then.

        Args:
            where: What had them, for the error.

        Raises:
            RuntimeError: One was changed in place since, or is not there as a whole.
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
        """A context in which the module is as it was, also when others have put tensors in the place of its own.

        So does `torch.func.functional_call` for the time of a forward. Parameters that are gathered and cut have other
        shapes meanwhile, or are no plain tensors: they are left to whoever does so.
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
