"""Which modules a call passes through: what a reader has to open to follow it."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def modules_called(*packages: str, handed: "torch.Tensor | None" = None) -> Iterator[list[str]]:
    """Records the modules of packages whose functions are called meanwhile, in this thread and in those it starts.

    Importing a module is no call of it, nor is the `__init__` that a dataclass gets: these say nothing of the way.

    Args:
        packages: Names of packages to look at, such as `par_checkpoint`; their sub-packages count too.
        handed: A tensor on the CPU whose first 32 bytes occur nowhere else. Only functions count whose arguments, or
            what their arguments hold directly, share its memory or have a copy of these bytes: the tensor's own way.
            None: every function counts.

    Yields:
        A list that is filled when the context ends: dotted names of modules, those of this thread in the order of their
        first call, then by name those that only threads called.
    """
    names: list[str] = []
    here: list[str] = []
    elsewhere: set[str] = set()
    main = threading.get_ident()
    sought = None if handed is None else (handed.untyped_storage().data_ptr(), _memory(handed)[:32])

    def record(frame: FrameType, event: str, argument: object) -> None:
        del argument
        name = frame.f_globals.get("__name__", "")
        if event != "call" or name.partition(".")[0] not in packages or name in here:
            return
        if frame.f_code.co_name == "<module>" or frame.f_code.co_filename.startswith("<"):
            return
        if sought is not None and not any(_holds(value, *sought, depth=1) for value in _arguments(frame)):
            return
        if threading.get_ident() == main:
            here.append(name)
        else:
            elsewhere.add(name)

    before = sys.getprofile()
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield names
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        names += [*here, *sorted(elsewhere.difference(here))]


def _arguments(frame: FrameType) -> list[object]:
    """What a function that is being called has been given."""
    code = frame.f_code
    further = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + further]
    return [frame.f_locals.get(name) for name in names]


def _holds(value: object, address: int, mark: bytes, *, depth: int) -> bool:
    """Whether a value is a tensor at this address, or bytes with this mark, or directly holds one."""
    import torch  # noqa: PLC0415 - pytest loads this package in every run

    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and (value.untyped_storage().data_ptr() == address or mark in _memory(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return mark in bytes(value)
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif is_dataclass(value):
        inner = [getattr(value, field.name, None) for field in fields(value)]
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    return any(_holds(each, address, mark, depth=depth - 1) for each in inner)


def _memory(tensor: "torch.Tensor") -> bytes:
    """All bytes of the memory in which a tensor on the CPU lies."""
    import torch  # noqa: PLC0415 - pytest loads this package in every run

    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
