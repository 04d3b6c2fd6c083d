"""Parameters and buffers whose dtype a cast of the model leaves unchanged."""

import re
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import non_persistent_buffers
from .._wrappers import original_name
from ..attributes import KEEP_DTYPE, PRETRAINED

_OF_ROUTERS = "e_score_correction_bias"
"""Name of the bias of the routing decision in every router of Hugging Face Transformers."""

_ADAPTER = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)")
"""What adapters add to the names of the model's own parameters."""


def kept_tensors(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters and buffers, by name, that keep their dtype when a model is cast.

    They are:

    - What a module names in its attribute `par_keep_dtype`, a tuple of names of its own parameters and buffers.
    - The bias of the routing decision, `e_score_correction_bias`. It changes by a thousandth in each step, and half
      precision would lose the change.
    - `packed_weights`, because a cast changes their bits.
    - In a Hugging Face Transformers model: fp32 parameters and buffers that the model's `_keep_in_fp32_modules_strict`
      matches (for fp16 also `_keep_in_fp32_modules`), such as weights of routers. Buffers that it does not save, such
      as rotary frequencies.

    Args:
        module: Model, or a part of a model.
        dtype: dtype that the model is cast to.
    """
    kept: dict[str, Tensor] = {**packed_weights(module)}
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name in (*(KEEP_DTYPE.of(part) or ()), _OF_ROUTERS):
            tensor = part._parameters.get(name, part._buffers.get(name))
            if tensor is not None:
                kept[start + name] = tensor
        model = PRETRAINED.of(part) or part  # a pipeline stage has parameters of a model, but is none
        if not hasattr(model, "_keep_in_fp32_modules_strict"):
            continue
        declared = _pattern_of(model, dtype)
        for name, tensor in chain(part.named_parameters(), part.named_buffers()):
            own_name = _ADAPTER.sub("", original_name(name))
            if tensor.dtype == torch.float32 and declared is not None and declared.search(own_name):
                kept[start + name] = tensor
        for below, owner in part.named_modules():
            for name in non_persistent_buffers(owner):
                buffer = owner._buffers.get(name)
                if buffer is not None and buffer.is_floating_point():
                    kept[f"{start}{below}.{name}" if below else start + name] = buffer
    return kept


def packed_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights, by name, that bitsandbytes has packed: the bits of an element are codes of several weights.

    An element has any dtype, `bnb_4bit_quant_storage` of Hugging Face Transformers.

    Args:
        module: Model, or a part of a model.
    """
    # bitsandbytes' own code finds them by this attribute.
    return {name: each for name, each in module.named_parameters() if hasattr(each, "quant_state")}


def _pattern_of(model: Any, dtype: torch.dtype) -> "re.Pattern[str] | None":
    """Return the pattern of names of tensors that a Transformers model keeps in fp32; None if it keeps none."""
    names: list[str] = []
    if dtype in (torch.bfloat16, torch.float16):
        names += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype == torch.float16:
        names += getattr(model, "_keep_in_fp32_modules", None) or ()
    # Transformers searches for the same pattern when it loads a model.
    return re.compile("|".join(name.replace("*", ".*") for name in sorted(names))) if names else None
