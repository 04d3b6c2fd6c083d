"""Copies of elements and of bytes between tensors, and what the first bytes of a file say about it."""

import ctypes
from collections.abc import Iterable

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def join_(into: torch.Tensor, runs: Iterable[torch.Tensor]) -> None:
    """Copy contiguous runs of bytes one after the other, in this thread alone and without Python's lock."""
    begin = into.data_ptr()
    for run in runs:
        ctypes.memmove(begin, run.data_ptr(), run.numel())
        begin += run.numel()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Views elements as integers of their size: every dtype copies alike, float8 and NaN payloads included."""
    return tensor.view(_INTEGER[tensor.element_size()])


def copy_elements_(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of one shape: bit by bit where the dtypes are equal, else with torch's cast."""
    if into.dtype == source.dtype and into.element_size() in _INTEGER:
        as_integers(into).copy_(as_integers(source))
    else:
        into.copy_(source)


_OTHERS = {
    b"version https://git-lfs": "a pointer of Git LFS to weights; use `git lfs pull` in its folder, with git-lfs",
    b"<!doctype html": "a web page, such as a login or an error; use another address to download it again",
    b"<html": "a web page, such as a login or an error; use another address to download it again",
}


def other_kind(first: bytes) -> str | None:
    """Describe a file that replaced weights, such as a Git LFS pointer, and the fix; return None for an unknown file.

    Args:
        first: First bytes of the file, 8 or more.
    """
    first = first.lower()
    return next((text for start, text in _OTHERS.items() if first.startswith(start[: len(first)])), None)
