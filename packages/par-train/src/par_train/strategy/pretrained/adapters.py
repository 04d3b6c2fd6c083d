"""LoRA adapters of peft around the linears of a model: put there, found again, and what is refused of them.

A wrapper of peft holds `base_layer`, and in `lora_A` and `lora_B` the two matrices of each adapter, by its name.
"""

import copy
import math
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from par_checkpoint import Format, load
from par_data import derive_seed
from par_groups import sharding_of
from par_layers import fill_shard_

from .causal import PathLike, pretrained_of

PREFIX = "base_model.model."
"""What peft puts before the names of a model's modules."""

FILE, CONFIG = "adapter_model", "adapter_config.json"

_REFUSED = {
    "use_dora": "DoRA's magnitudes are norms of whole weights, of which ranks have parts",
    "modules_to_save": "modules that are trained whole would need records of their own",
    "target_parameters": "packed experts have no linear to be put around",
    "trainable_token_indices": "rows of an embedding are no linear's",
    "layer_replication": "layers that are there twice have no place in the files",
    "lora_bias": "a bias of B cannot be merged into a weight",
    "alora_invocation_tokens": "it looks at whole prompts",
    "use_qalora": "it pools the input of quantised weights",
    "arrow_config": "it mixes several adapters",
}
"""Options of a LoraConfig that change what an adapter computes, and why they are refused."""


def put_around_(model: Any, adapter: Any) -> None:
    """Puts adapters around linears of a model of transformers; the rest of it is frozen.

    Args:
        model: The model, on the meta device, where the adapters are made too.
        adapter: A LoraConfig of peft, or the folder of an adapter.

    Raises:
        ImportError: peft is not installed.
        TypeError: It is neither, or of a kind that cannot be trained here.
        ValueError: The folder holds no adapter, or one of its options is not for models that are cut.
    """
    try:
        peft = import_module("peft")
    except ImportError:
        raise ImportError("adapters are peft's, which is not installed; pip install peft") from None
    if isinstance(adapter, str | os.PathLike):
        if not Path(adapter, CONFIG).is_file():
            raise ValueError(f"{os.fspath(adapter)!r} holds no {CONFIG}; give the folder of an adapter that peft wrote")
        config = peft.PeftConfig.from_pretrained(os.fspath(adapter))
    else:
        config = copy.deepcopy(adapter)
    if not isinstance(config, peft.LoraConfig):
        raise TypeError(f"adapter is a {type(config).__name__}; give a LoraConfig, or the folder of a LoRA adapter")
    for option, why in _REFUSED.items():
        if getattr(config, option, None):
            raise ValueError(f"adapter has {option}={getattr(config, option)!r}: {why}; leave it out")
    if config.bias != "none":
        raise ValueError(f"adapter has bias={config.bias!r}, which trains biases of the model; use 'none'")
    if config.init_lora_weights not in (True, "gaussian"):
        raise ValueError(
            f"adapter has init_lora_weights={config.init_lora_weights!r}, which looks at whole weights or draws B; use "
            "True or 'gaussian'"
        )
    config.inference_mode = False
    with torch.device("meta"):
        # What transformers' add_adapter does; that one asks for releases of peft that may not be out yet.
        peft.inject_adapter_in_model(config, model)
    model._hf_peft_config_loaded = True  # for transformers: the model has adapters of peft
    adapters_in(model)


def fill_adapters_(part: nn.Module, adapter: Any, seed: int, device: torch.device) -> None:
    """Gives adapters on the meta device their values: those of a folder, or A drawn by seed and name, and B zero.

    Args:
        part: What this rank has of the model.
        adapter: What `put_around_` was given.
        seed: The seed of the run.
        device: Where they are to lie.
    """
    tensors = adapter_tensors(part)
    gaussian = bool(tensors) and config_of(part).init_lora_weights == "gaussian"
    for name, parameter in tensors.items():
        if ".lora_A." in name:
            _draw_adapter_(parameter, name, seed, device, gaussian=gaussian)
        else:
            fill_shard_(parameter, torch.zeros(sharding_of(parameter).shape), device)
    if isinstance(adapter, str | os.PathLike):
        read_(tensors, adapter)


def _draw_adapter_(part: nn.Parameter, name: str, seed: int, device: torch.device, *, gaussian: bool) -> None:
    """Draw this rank's shard of the matrix A [rank, features] of an adapter as peft does, by the seed and its name.

    Args:
        part: This rank's shard of the matrix.
        name: Its name in peft's files.
        seed: Seed of the run.
        device: Device of the matrix.
        gaussian: Whether it is normal, with a deviation of 1 / rank; else it is uniform, as torch draws a linear.
    """
    whole = torch.empty(sharding_of(part).shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    if gaussian:
        nn.init.normal_(whole, std=1 / len(whole), generator=generator)
    else:
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    fill_shard_(part, whole, device)


def read_(tensors: Mapping[str, nn.Parameter], path: PathLike) -> None:
    """Fills matrices of adapters from a folder of peft's, in whatever dtype the files are. Collective."""
    dtype = next((tensor.dtype for tensor in tensors.values()), None)
    load(path, model=tensors, dtype=dtype, format=Format(stem=FILE))


def adapters_in(model: nn.Module) -> dict[str, Any]:
    """The wrappers with LoRA in a model, or in this rank's part of one, by the name of the linear in the model alone.

    Raises:
        ValueError, TypeError: It has adapters of another kind, or around something else than a linear; or several.
    """
    pretrained = pretrained_of(model)
    output = pretrained.get_output_embeddings() if hasattr(pretrained, "get_output_embeddings") else None
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        who = f"{name!r} ({type(module).__name__})"
        if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            raise TypeError(f"{who} is trained whole beside its adapters (modules_to_save); leave that out")
        base = getattr(module, "base_layer", None)
        if not isinstance(base, nn.Module):
            continue
        pairs: Any = getattr(module, "lora_A", None)
        if not isinstance(pairs, nn.ModuleDict) or getattr(module, "lora_embedding_A", None):
            raise TypeError(f"{who} is no LoRA around a linear, which alone can be trained and saved here; use that")
        if getattr(module, "lora_variant", None) or getattr(module, "lora_magnitude_vector", None):
            raise TypeError(f"{who} is a variant of LoRA, such as DoRA; use plain LoRA, or rsLoRA")
        if module is output or base is output:
            raise TypeError(f"{who} is around the output embedding; choose target_modules among the layers' linears")
        if not isinstance(base, nn.Linear) and not hasattr(base, "nf"):  # transformers' Conv1D
            raise TypeError(f"{who} is around a {type(base).__name__}, such as packed experts; choose linears")
        if len(pairs) != 1:
            raise ValueError(f"{who} has the adapters {list(pairs)}; one is trained and saved: delete the others")
        if getattr(module, "merged_adapters", None):
            raise ValueError(f"{who} has its adapter merged into its weight; call unmerge_adapter() before")
        found[name.removeprefix(PREFIX)] = module
    return found


def has_adapters(model: nn.Module) -> bool:
    """Whether a model, or a part of one, has adapters of any kind of peft's."""
    return bool(getattr(pretrained_of(model), "peft_config", None))


def config_of(model: nn.Module) -> Any:
    """The LoraConfig of a model with adapters."""
    (config,) = pretrained_of(model).peft_config.values()
    return config


def write_config(model: nn.Module, folder: PathLike) -> None:
    """Writes adapter_config.json as peft does, so that who opens it does not train it by accident."""
    config = copy.copy(config_of(model))
    config.inference_mode = True
    config.save_pretrained(folder)


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of the adapters that this rank has parts of, by their names in peft's files."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {key: tensor for name, tensor in state.items() if (key := _name_in_files(name)) is not None}


def adapter_parts(model: nn.Module) -> dict[str, Any]:
    """Return the keywords with which par-checkpoint saves or loads an adapter, under the names of peft's files.

    Args:
        model: This rank's part of the model.
    """
    in_files = {id(tensor): name for name, tensor in adapter_tensors(model).items()}
    named = model.state_dict(keep_vars=True).items()
    own = {name: tensor for name, tensor in named if id(tensor) in in_files}
    names = {name: in_files[id(tensor)] for name, tensor in own.items()}
    return {"model": own, "format": Format(names=names, stem=FILE)}


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The other tensors, by the names that they have in the model without adapters."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {base_name(name): tensor for name, tensor in state.items() if _name_in_files(name) is None}


def base_name(name: str) -> str:
    """The name that a parameter inside a wrapper has in the model without adapters."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def _name_in_files(name: str) -> str | None:
    """The name of an adapter's matrix in peft's files, which leave out the adapter's name; None for other tensors."""
    found = re.fullmatch(r"(?:base_model\.model\.)?(.+\.lora_[AB])\.[^.]+\.weight", name)
    return None if found is None else f"{PREFIX}{found[1]}.weight"
