"""Transformers models on the meta device, as the config in a folder describes them."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .causal import sees_later_tokens


def make_on_meta(path: str, dtype: str | torch.dtype, attention: str | None) -> Any:
    """Make a causal language model on the meta device, as the config in a folder describes it.

    Args:
        path: A folder with config.json.
        dtype: The dtype of the weights; "auto" for the config's.
        attention: The name of an attention implementation of transformers, such as "sdpa"; None for its default.

    Raises:
        ImportError: transformers is not installed.
        ValueError: The folder has no config, or the model is no causal one.
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ImportError(
            "from_pretrained() makes models of transformers, which is not installed; pip install transformers jinja2"
        ) from None
    if not Path(path, "config.json").is_file():
        raise ValueError(f"{path!r} has no config.json; pass the folder of a model, as save_pretrained writes it")
    config = transformers.AutoConfig.from_pretrained(path)
    chosen = {} if attention is None else {"attn_implementation": attention}
    own = config.dtype or torch.float32 if dtype == "auto" else dtype
    # A model with images is in another table, and the usual one may have its text model only.
    seeing = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    name = seeing[type(config)].__name__ if type(config) in seeing else ""
    has_images = name and name in (config.architectures or [name])
    auto: Any = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=own, **chosen)
    _widen_(model, own)
    if (later := sees_later_tokens(model)) is not None:
        made = " ".join(getattr(config, "architectures", None) or []) or config.model_type
        raise ValueError(
            f"{path!r} holds {made}: {later!r} of a {type(model).__name__} made from it lets each token attend to "
            "later tokens, so a causal loss would be meaningless; set is_decoder=True in its config.json to train a "
            "decoder, or load it with transformers, pass the model to initialize(), and use a criterion of your own"
        )
    if Path(path, "generation_config.json").is_file():  # it has the tokens that end a text
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.eval()  # as transformers' own from_pretrained returns it


def check_floating(path: str) -> None:
    """Raise if the config in a folder says that its weights are quantized.

    Args:
        path: A folder with config.json.

    Raises:
        ValueError: They are.
    """
    found = Path(path, "config.json")
    quantized = json.loads(found.read_text()).get("quantization_config") if found.is_file() else None
    if quantized:
        raise ValueError(
            f"{path!r} holds weights quantized by {quantized.get('quant_method', 'an unknown method')}, which are not "
            "sharded; for QLoRA up to ZeRO 2, load the folder with transformers, add the adapter with peft, and pass "
            "the PeftModel to initialize(); or pass the folder of the model before quantization"
        )


def _widen_(model: Any, dtype: Any) -> None:
    """Widen the tensors that transformers keeps in fp32 when it loads a model in half precision, such as router biases.

    Args:
        model: The model, on the meta device.
        dtype: The dtype that the caller requested.
    """
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype in (torch.float16, "float16"):
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    elif dtype not in (torch.bfloat16, "bfloat16"):
        return
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]  # as transformers reads them
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                full = f"{path}.{name}" if path else name
                if tensor is None or not tensor.is_floating_point() or not any(each.search(full) for each in kept):
                    continue
                wide = tensor.detach().float()
                tensors[name] = nn.Parameter(wide, tensor.requires_grad) if tensors is module._parameters else wide
