"""Computation in fp64 where Hugging Face Transformers casts to fp32."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def keep_fp64() -> Iterator[None]:
    """Keep fp64 tensors in fp64 where a model casts them to fp32: in norms, routers, attention and losses."""
    functions: list[tuple[Any, str]] = [
        (Tensor, "to"),
        (Tensor, "type"),
        (Tensor, "float"),
        (Tensor, "softmax"),
        (torch, "softmax"),
        (torch, "zeros_like"),
        (nn.functional, "softmax"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in functions]
    for owner, name, original in originals:
        setattr(owner, name, _method(original) if owner is Tensor else partial(_wide, original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _method(original: Any) -> Any:
    return lambda *args, **kwargs: _wide(original, *args, **kwargs)


def _wide(original: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if x.dtype != torch.float64:
        return original(x, *args, **kwargs)
    if original.__name__ == "float":
        return x
    wide = [torch.float64 if value is torch.float32 else value for value in args]
    return original(
        x, *wide, **{key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
    )
