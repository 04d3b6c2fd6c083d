"""Tensors as bytes, without a copy and without NumPy."""

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous CPU tensor; the view keeps the tensor alive."""
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(b"")
    array = (ctypes.c_char * count).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # lives as long as any view of it
    return memoryview(array).cast("B")
