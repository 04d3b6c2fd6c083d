"""Where in the program an operation was asked for."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

SITES = 3
"""How many calls of the program an operation names."""

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def functions() -> Iterator[str]:
    """The functions of the program that are under way, innermost first, as "file.py:function"."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith((_TORCH, _OWN, "<frozen")):
            yield f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


def is_of_objects() -> bool:
    """Whether a collective of Python objects is under way, such as `all_gather_object`."""
    return any("_object" in frame.f_code.co_name and frame.f_code.co_filename.startswith(_TORCH) for frame in _frames())


def sites() -> tuple[str, ...]:
    """The innermost calls of the program, outside of torch and of this package."""
    found: list[str] = []
    for frame in _frames():
        path = frame.f_code.co_filename
        if path.startswith((_TORCH, _OWN, "<frozen")):
            continue
        found.append(f"{Path(path).name}:{frame.f_lineno}")
        if len(found) == SITES:
            break
    return tuple(found)


def batch_around() -> FrameType | None:
    """The frame of the `batch_isend_irecv` that a message belongs to, if it belongs to one."""
    return next((frame for frame in _frames() if frame.f_code.co_name == "batch_isend_irecv"), None)
