"""LoRA adapters of peft around the linears of a model: injection, initial values, names in files, and refusals.

A wrapper of peft holds `base_layer`, and in `lora_A` and `lora_B` the two matrices of each adapter, by its name.
"""

import copy
import math
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from par_groups import sharding_of

from .._initialize import seed_of
from .._initialize_existing import fill_shard_
from ..models.adapters import kind_of
from .causal import pretrained_of

PREFIX = "base_model.model."
"""Prefix that peft puts before the names of a model's modules."""

CONFIG = "adapter_config.json"
"""The file of a LoraConfig in a folder of peft's."""

_TRAINED_IN_FULL = re.compile(r"(?:base_model\.model\.)?(.+)\.modules_to_save\.[^.]+\.(.+)")
"""Name of a parameter of a module that peft trains in full, such as the head of a classifier."""

_REFUSED = {
    "modules_to_save": "modules that are trained whole would need records of their own",
    "trainable_token_indices": "rows of an embedding are no linear's",
    "layer_replication": "layers that are there twice have no place in the files",
    "lora_bias": "a bias of B cannot be merged into a weight",
    "alora_invocation_tokens": "it looks at whole prompts",
    "use_qalora": "it pools the input of quantised weights",
    "arrow_config": "it mixes several adapters",
}
"""Options of a LoraConfig that change what an adapter computes, and the reason why each is not supported."""


def inject_adapters_(model: Any, adapter: Any) -> None:
    """Put adapters around linears of a transformers model, and freeze the rest of the model.

    Args:
        model: The model, on the meta device, on which the adapters are made, too.
        adapter: A LoraConfig of peft, or the folder of an adapter.

    Raises:
        ImportError: peft is not installed.
        TypeError: `adapter` is neither, or an adapter of a kind that cannot be sharded.
        ValueError: The folder has no adapter, or an option of the adapter is not supported for sharded models.
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
        # As transformers' add_adapter does. That method requires releases of peft that may not be out yet.
        peft.inject_adapter_in_model(config, model)
    model._hf_peft_config_loaded = True  # for transformers: the model has adapters of peft
    # Called only for the errors that it raises.
    adapters_in(model)


def draw_adapters_(part: nn.Module, seed: int, device: torch.device) -> None:
    """Fill adapters on the meta device as peft does: A is drawn by the seed and its name, B is zero.

    DoRA's magnitudes are zero until `measure_magnitudes_` or a folder of adapters fills them.

    Args:
        part: This rank's part of a model with adapters.
        seed: Seed of the run.
        device: Device of the filled parameters.
    """
    tensors = adapter_tensors(part)
    gaussian = bool(tensors) and config_of(part).init_lora_weights == "gaussian"
    for name, parameter in tensors.items():
        # Each rank draws the full matrix, so that its values do not depend on the number of ranks.
        full = torch.zeros(sharding_of(parameter).shape)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(seed_of(seed, name))
            if gaussian:
                nn.init.normal_(full, std=1 / len(full), generator=generator)
            else:
                nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)  # as torch draws a linear
        fill_shard_(parameter, full, device)


@torch.no_grad()
def measure_magnitudes_(part: nn.Module) -> None:
    """Set DoRA's magnitudes to the norms of the weights, as peft does. Collective over the tensor ranks.

    Args:
        part: This rank's part of a model with adapters, whose weights are loaded.
    """
    for module in adapters_in(part).values():
        for adapter, layer in module.lora_magnitude_vector.items():
            delta = module.lora_B[adapter].weight @ module.lora_A[adapter].weight
            norms = layer.get_weight_norm(module.base_layer.weight, delta, module.scaling[adapter])
            layer.weight.copy_(norms)


def adapters_in(model: nn.Module) -> dict[str, Any]:
    """Return the LoRA wrappers of a model, or of this rank's part, by the linear's name in the model without adapters.

    Raises:
        TypeError: An adapter is of another kind, or around another module than a linear.
        ValueError: A linear has several adapters, or its adapter is merged into its weight.
    """
    pretrained = pretrained_of(model)
    output = pretrained.get_output_embeddings() if hasattr(pretrained, "get_output_embeddings") else None
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        who = f"{name!r} ({type(module).__name__})"
        base = getattr(module, "base_layer", None)
        if not isinstance(base, nn.Module):
            continue
        pairs: Any = getattr(module, "lora_A", None)
        if not isinstance(pairs, nn.ModuleDict) or getattr(module, "lora_embedding_A", None):
            raise TypeError(
                f"{who} is no LoRA around a linear, and no other adapter is loaded, saved or merged here; use LoRA, or "
                "call the model's save_pretrained within par_zero.summon(model)"
            )
        if getattr(module, "lora_variant", None) and not getattr(module, "lora_magnitude_vector", None):
            raise TypeError(f"{who} is a variant of LoRA other than DoRA; use plain LoRA, rsLoRA or DoRA")
        if module is output or base is output:
            raise TypeError(f"{who} is around the output embedding; choose target_modules among the layers' linears")
        # A bare parameter, such as those of packed experts, or transformers' Conv1D.
        is_known = isinstance(base, nn.Linear) or hasattr(base, "nf") or hasattr(module, "parameter_name")
        if not is_known:
            raise TypeError(f"{who} is around a {type(base).__name__}; choose linears or packed experts")
        if len(pairs) != 1:
            raise ValueError(f"{who} has the adapters {list(pairs)}; one is trained and saved: delete the others")
        if getattr(module, "merged_adapters", None):
            raise ValueError(f"{who} has its adapter merged into its weight; call unmerge_adapter() before")
        found[name.removeprefix(PREFIX)] = module
    return found


def check_adapter(model: Any, *, replicas: int, frees: bool) -> None:
    """Check that an adapter of a PeftModel computes on several data-parallel ranks what it computes on one.

    Args:
        model: A PeftModel, or any other model.
        replicas: Number of ranks that see different rows of a batch.
        frees: Whether parameters are freed outside of the forward of their module, as at stage 3.

    Raises:
        TypeError: It does not.
    """
    kind, who = kind_of(model), type(model).__name__
    if kind == "CPT":
        raise TypeError(
            f"this {who} has an adapter of the kind CPT, which gives its parameters other memory in each forward, "
            "where the optimizer would not reach them; use prompt tuning"
        )
    if kind == "LILY" and replicas > 1:
        raise TypeError(
            f"this {who} has an adapter of the kind LILY, which mixes its matrices by an average over all tokens of a "
            f"batch, of which each of the {replicas} data-parallel ranks sees some; use LoRA"
        )
    if kind == "CARTRIDGE" and frees and model.active_peft_config.num_frozen_tokens:
        raise TypeError(
            f"this {who} has an adapter of the kind CARTRIDGE, whose frozen tokens are read outside of their module, "
            "where ZeRO 3 frees them; use a stage below 3, or num_frozen_tokens=0"
        )


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model, or this rank's part of one, has adapters of peft, of any kind."""
    return bool(getattr(pretrained_of(model), "peft_config", None))


def config_of(model: nn.Module) -> Any:
    """Return the LoraConfig of a model with adapters."""
    (config,) = pretrained_of(model).peft_config.values()
    return config


def write_config(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write adapter_config.json as peft does."""
    config = copy.copy(config_of(model))
    config.inference_mode = True  # peft then opens the adapter frozen, unless the caller asks to train it
    config.save_pretrained(folder)


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the tensors of adapters of which this rank has shards, by their names in peft's files."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {key: tensor for name, tensor in state.items() if (key := _name_in_files(name)) is not None}


def check_all_saved(model: nn.Module) -> None:
    """Check that the files of adapters hold everything that is trained.

    Raises:
        ValueError: A parameter that is trained is no adapter, as with bias="all" of a LoraConfig.
    """
    saved = {id(each) for each in adapter_tensors(model).values()}
    lost = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in saved]
    if lost:
        raise ValueError(
            f"plan='peft': it saves adapters, and {len(lost)} other parameters are trained, such as {lost[0]!r}; "
            "freeze them, or use bias='none' and no modules_to_save in the LoraConfig"
        )


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all other tensors, by their names in the model without adapters."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {base_name(name): tensor for name, tensor in state.items() if _name_in_files(name) is None}


def base_name(name: str) -> str:
    """Return the name that a parameter inside wrappers has in the model without adapters; adapters keep their names."""
    if _name_in_files(name) is not None:
        return name
    # Wrappers of several parameters of one module, such as packed experts, are nested.
    return re.sub(r"(\.base_layer|\.original_module)+\.", ".", name.removeprefix(PREFIX))


def _name_in_files(name: str) -> str | None:
    """Return the name of an adapter's tensor in peft's files, which omit the adapter's name; None for other tensors.

    The files hold modules that are trained in full next to the adapters, too.
    """
    full = _TRAINED_IN_FULL.fullmatch(name)
    if full is not None:
        return f"{PREFIX}{full[1]}.{full[2]}"
    found = re.fullmatch(r"(?:base_model\.model\.)?(.+\.lora_(A|B|magnitude_vector))\.[^.]+\.(weight|bias)", name)
    if found is None:
        return None
    return f"{PREFIX}{found[1]}" + ("" if found[2] == "magnitude_vector" else f".{found[3]}")
