"""Parameters and buffers whose dtype a cast of the model leaves unchanged, such as packed weights."""

import re
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

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


def packed_scales(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the scales of weights that bitsandbytes has packed in 4 bits. They are no buffers of a module.

    Args:
        weights: Parameters with their names; those that are not packed are skipped.
    """
    scales: dict[str, Tensor] = {}
    for name, weight in weights:
        state, level = getattr(weight, "quant_state", None), 0
        while state is not None:  # scales may be packed themselves, with scales of their own
            held = {"absmax": state.absmax, "offset": state.offset, "code": state.code}
            scales.update({f"{name}.{level}.{key}": each for key, each in held.items() if each is not None})
            state, level = state.state2, level + 1
    return scales


def keep_packed_weights_(module: nn.Module) -> None:
    """Let no forward replace weights that bitsandbytes has packed: a sharded weight must stay the same object.

    Two forwards do so on a CPU. `Linear4bit` in eval mode packs the codes again and rounds the scales, where the CPU
    has AVX-512 for bf16. DoRA of peft assigns `weight.to(weight.device)`, which is a new parameter.

    Args:
        module: Model, or a part of a model.
    """
    for owner in module.modules():
        for weight in owner._parameters.values():
            if hasattr(weight, "quant_state"):
                vars(owner)["support_avx512bf16_for_cpu"] = False
                vars(weight)["to"] = partial(_moved, ref(weight))  # weak: a cycle would be freed late


def _moved(reference: "ref[Any]", *args: Any, **options: Any) -> Any:
    """Return a packed weight itself if only its own device is requested, else what `to` returns."""
    weight: Any = reference()  # alive: this is its method
    stays = all(each in (None, False, True, weight.device) for each in (*args, *options.values()))
    return weight if stays else type(weight).to(weight, *args, **options)


def _pattern_of(model: Any, dtype: torch.dtype) -> "re.Pattern[str] | None":
    """Return the pattern of names of tensors that a Transformers model keeps in fp32; None if it keeps none."""
    names: list[str] = []
    if dtype in (torch.bfloat16, torch.float16):
        names += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype == torch.float16:
        names += getattr(model, "_keep_in_fp32_modules", None) or ()
    # Transformers searches for the same pattern when it loads a model.
    return re.compile("|".join(name.replace("*", ".*") for name in sorted(names))) if names else None
