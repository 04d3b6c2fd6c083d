"""The adapter of a run: made from options, and what a checkpoint holds of it."""

from importlib import import_module
from typing import Any

from torch import nn

from par_checkpoint import Format

from ...strategy.pretrained.adapters import FILE, adapter_tensors
from ..options import Options
from .folder import ModelFolder


def lora_config(options: Options, folder: ModelFolder) -> Any:
    """The `LoraConfig` of peft that the options describe; None: no adapter is trained.

    Args:
        options: The options of the run.
        folder: The model, whose place the config notes.
    """
    adapter = options.adapter
    if not adapter.rank:
        return None
    return import_module("peft").LoraConfig(
        r=adapter.rank,
        lora_alpha=2 * adapter.rank if adapter.alpha == "auto" else adapter.alpha,
        target_modules=list(adapter.targets) or "all-linear",
        lora_dropout=adapter.dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder.path.resolve()),
    )


def adapter_parts(model: nn.Module) -> dict[str, Any]:
    """The keywords with which par-checkpoint saves or loads the adapter of a model, under the names of peft's files.

    Args:
        model: Shard of the model on this rank.
    """
    in_files = {id(tensor): name for name, tensor in adapter_tensors(model).items()}
    named = model.state_dict(keep_vars=True).items()
    own = {name: tensor for name, tensor in named if id(tensor) in in_files}
    names = {name: in_files[id(tensor)] for name, tensor in own.items()}
    return {"model": own, "format": Format(names=names, stem=FILE)}
