"""Buffers whose dtype a cast of the model leaves alone."""

import torch
from torch import Tensor, nn

from par_groups import attributes


def kept_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers that keep their dtype when a model is cast.

    A module names them in its attribute `par_keep_dtype`, a tuple of names. Routers name their bias, because it changes
    by a thousandth in each step and bf16 would lose the change. The biases of routers in Hugging Face Transformers are
    found by their common name.

    Args:
        module: Model, or a part of a model.
    """
    return [tensor for _, _, tensor in _kept(module)]


def cast_(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters and buffers in place, but for `kept_buffers`."""
    kept = _kept(module)
    module.to(dtype)
    for buffers, name, tensor in kept:
        buffers[name] = tensor


_OF_ROUTERS = "e_score_correction_bias"
"""What every router of transformers calls the bias of its choice, which transformers itself keeps in fp32."""


def _kept(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    return [
        (part._buffers, name, tensor)
        for part in module.modules()
        for name in dict.fromkeys((*(attributes.KEEP_DTYPE.of(part) or ()), _OF_ROUTERS))
        if (tensor := part._buffers.get(name)) is not None
    ]
