"""What is written of a model with adapters: these alone, as peft has them, or a model that they are merged into."""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_checkpoint import Format, save
from par_groups import agree, attributes, set_sharding, sharding_of, together

from .adapters import (
    CONFIG,
    FILE,
    PREFIX,
    adapter_tensors,
    adapters_in,
    base_tensors,
    read_,
    write_config,
)
from .causal import PathLike, pretrained_of


def save_adapters(model: nn.Module, path: PathLike) -> None:
    """Writes the adapters, and their config beside them, as `PeftModel.from_pretrained` opens them. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        with together("adapters", None):
            adapters_in(model)
            write_config(model, folder)
        tensors = adapter_tensors(model)
        files = Format(stem=FILE, assets=[Path(folder, CONFIG)], max_shard_size=sys.maxsize)
        save(path, model=tensors, overwrite=True, format=files)


def load_adapters(model: nn.Module, path: PathLike) -> None:
    """Reads what `save_adapters` or peft wrote. Collective."""
    read_(adapter_tensors(model), path)


def save_merged(model: nn.Module, path: PathLike, size: int, device: torch.device) -> None:
    """Writes a model without adapters, which is that with adapters: W + scaling B A in the place of W. Collective.

    The model stays as it is: this rank's parts of the weights that change are there twice while they are written.

    Args:
        model: The model, or this rank's part of it.
        path: The folder.
        size: Largest size of a file in bytes.
        device: Where ranks tell each other of their parts.
    """
    save(path, model=_Merged(_merged(model, device), model), overwrite=True, format=Format(max_shard_size=size))


class _Merged(nn.Module):
    """Tensors as a module of transformers', with whose names and config they are written.

    Args:
        tensors: The tensors, by name.
        model: What they are of.
    """

    def __init__(self, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
        super().__init__()
        self.__dict__["tensors"] = tensors
        attributes.PRETRAINED.set(self, pretrained_of(model))  # where par-checkpoint looks for the config

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        """The tensors themselves."""
        del args, keywords
        return dict(self.__dict__["tensors"])


@torch.no_grad()
def _merged(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a model, its adapters merged into those that they are around.

    What a rank has of a weight are rectangles of it, and of each the product of a few rows of B and columns of A is
    added, however the weight is cut. So every rank needs both matrices whole, one adapter at a time.
    """
    layers, tensors, own = adapters_in(model), base_tensors(model), adapter_tensors(model)
    mine = {key: (tuple(sharding_of(tensor).shape), tensor.dtype) for key, tensor in own.items()}
    known = {key: of for theirs in agree(None, mine, None).values() for key, of in theirs.items()}
    for key in sorted(key for key in known if ".lora_A." in key):
        names = key, key.replace(".lora_A.", ".lora_B.")
        down, up = (_whole(own.get(name), *known[name], device) for name in names)
        linear = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if linear not in layers:  # it is on another stage
            continue
        layer, weight = layers[linear], tensors[f"{linear}.weight"]
        (scaling,) = layer.scaling.values()
        record, merged = sharding_of(weight), weight.detach().clone()
        for box in record.boxes:
            rows, columns = box.slices[::-1] if layer.fan_in_fan_out else box.slices
            delta = ((up[rows] @ down[:, columns]) * scaling).to(merged.device, known[key][1])
            box.of(merged).add_(delta.T if layer.fan_in_fan_out else delta)
        changed = nn.Parameter(merged, requires_grad=False)
        if attributes.SHARDING.is_on(weight):
            set_sharding(changed, record)
        tensors[f"{linear}.weight"] = changed
    return tensors


def _whole(part: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that ranks have parts or copies of, whole on every rank, in fp32 at least. Two all-reduces of its size.

    Args:
        part: What this rank has of it; None if it has nothing.
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        device: Where ranks send from.
    """
    rank = dist.get_rank()
    values = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
    holders = torch.full(shape, dist.get_world_size(), dtype=torch.int32, device=device)
    for box in () if part is None else sharding_of(part).boxes:
        values[box.slices] = box.of(part.detach()).to(values)  # type: ignore[union-attr]  # there are no boxes of None
        holders[box.slices] = rank
    dist.all_reduce(holders, op=dist.ReduceOp.MIN)  # of several copies, that of the first rank counts
    values.masked_fill_((holders != rank), 0.0)
    dist.all_reduce(values)
    return values
