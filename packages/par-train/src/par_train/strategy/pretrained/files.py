"""The files of a model with adapters: only the adapters, as peft writes them, or a model that they are merged into."""

import inspect
import os
import sys
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from par_checkpoint import Format, load, save
from par_groups import attributes, together
from par_layers.pretrained import (
    adapter_tensors,
    adapters_in,
    check_all_saved,
    has_adapters,
    merged_tensors,
    pretrained_of,
    write_config,
)

PathLike = str | os.PathLike[str]

FILE = "adapter_model"
"""The name of peft's files of matrices, without its suffix."""


def adapter_parts(model: nn.Module, form: Format) -> tuple[dict[str, Tensor], Format]:
    """Return the tensors of adapters by their names in the model, and the format that writes them as peft's files.

    Args:
        model: This rank's part of the model.
        form: Format with the other fields.
    """
    in_files = {id(tensor): name for name, tensor in adapter_tensors(model).items()}
    named = model.state_dict(keep_vars=True).items()
    own = {name: tensor for name, tensor in named if id(tensor) in in_files}
    names = {name: in_files[id(tensor)] for name, tensor in own.items()}
    return own, replace(form, names=names, stem=FILE)


def save_adapters(model: nn.Module, path: PathLike) -> None:
    """Write the adapters, and their config beside them, as `PeftModel.from_pretrained` opens them. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        with together("adapters", None):
            adapters_in(model)
            check_all_saved(model)
            write_config(model, folder)
        tensors = adapter_tensors(model)
        files = Format(stem=FILE, assets=[*Path(folder).iterdir()], max_shard_size=sys.maxsize)
        save(path, model=tensors, overwrite=True, format=files)


def load_adapters(model: nn.Module, path: PathLike) -> None:
    """Fill adapters from a folder of `save_adapters` or of peft, in whatever dtype its files are. Collective."""
    tensors = adapter_tensors(model)
    dtype = next((tensor.dtype for tensor in tensors.values()), None)
    load(path, model=tensors, dtype=dtype, format=Format(stem=FILE))


def save_merged(model: nn.Module, path: PathLike, size: int, device: torch.device) -> None:
    """Write a model without adapters that computes the same: W + scaling B A replaces W. Collective.

    The model does not change. While the call runs, this rank's shards of the weights that change exist twice.

    Args:
        model: The model, or this rank's part of it.
        path: The folder.
        size: Largest size of a file in bytes.
        device: Device from which ranks send their shards.
    """
    save(path, model=_Merged(merged_tensors(model, device), model), overwrite=True, format=Format(max_shard_size=size))


def guard_saves_(model: nn.Module) -> None:
    """Let methods of transformers and peft that write a model raise an error while ZeRO 3 has freed its parameters.

    safetensors reads the memory of a tensor past torch, and would write what lies behind this rank's shard.

    Args:
        model: Sharded model. The methods are replaced on it and on the models within it.
    """
    for module in model.modules():
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(type(module), name) and name not in module.__dict__:
                module.__dict__[name] = _WholeSave(module, name)


class _WholeSave:
    """Replacement of a method that writes the full parameters of a module.

    Args:
        module: A model of transformers or peft.
        name: Name of the method.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        # The module has this object as an attribute, and a reference cycle would keep its weights after its last use.
        self._module, self._name = weakref.ref(module), name

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the method if this rank has the full parameters, as within `par_zero.summon`.

        Raises:
            RuntimeError: A parameter is freed.
        """
        module = self._module()
        assert module is not None  # noqa: S101 - the caller has found this object on the module
        method = getattr(type(module), self._name)
        bound = inspect.signature(method).bind(module, *args, **keywords)
        # Transformers names the argument `state_dict`, and peft takes it as one of any keywords.
        given: Mapping[str, Any] | None = {**bound.arguments, **bound.kwargs}.get("state_dict")
        tensors = given or dict(module.named_parameters())
        freed = next((name for name, tensor in tensors.items() if attributes.PART.of(tensor) is not None), None)
        if freed is not None:
            plan = ", plan='peft'" if has_adapters(module) else ""
            raise RuntimeError(
                f"{self._name} needs full parameters, and ZeRO 3 keeps a part of {freed!r} on each rank; use "
                f"Strategy.save(model, path{plan}), or call {self._name} within par_zero.summon(model)"
            )
        return method(module, *args, **keywords)


class _Merged(nn.Module):
    """Tensors as a module, so that par-checkpoint writes them with the names and the config of a transformers model.

    Args:
        tensors: The tensors, by name.
        model: The model of which they are the tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
        super().__init__()
        self.__dict__["tensors"] = tensors
        attributes.PRETRAINED.set(self, pretrained_of(model))  # par-checkpoint writes its config

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """Return the tensors."""
        del args, keywords
        return dict(self.__dict__["tensors"])
