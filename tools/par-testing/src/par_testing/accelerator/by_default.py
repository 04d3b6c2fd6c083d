"""The device as the default one, so that a rank test which names no device runs on it as it is."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors

from .options import NAME

_TORCH = str(Path(torch.__file__).parent)


class ByDefault(TorchFunctionMode):
    """Makes tensors on the device where a test names none, as `torch.set_default_device` does for every program.

    What a package makes stays where it makes it: it means its own numbers to be on the host, or on a device it names.
    With a generator of the CPU they are drawn there and moved, for a test seeds such a generator to have numbers of
    its own.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if named.get("device") is not None or func not in _device_constructors() or not _asked_by_test():
            return func(*args, **named)
        generator = named.get("generator")
        if generator is None or generator.device.type == NAME:
            return func(*args, **named | {"device": NAME})
        return func(*args, **named | {"device": "cpu"}).to(NAME)


def default_device_type() -> str:
    """Return the type of the device on which a test's tensors are made that name none: "cpu" or "strict".

    A test of DTensors makes its mesh of such devices.
    """
    modes = _get_current_function_mode_stack()
    return NAME if any(isinstance(mode, ByDefault) for mode in modes) else "cpu"


def _asked_by_test() -> bool:
    """Whether the innermost code outside of torch is a test's, or what a test calls of a library, and no package's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return "/src/" not in frame.f_code.co_filename
