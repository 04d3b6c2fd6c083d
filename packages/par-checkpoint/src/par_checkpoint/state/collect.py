"""What this rank brings to a save: entries of model and optimizer, and the encoded rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from crc32c import crc32c
from torch import nn
from torch.optim import Optimizer

from par_groups import Segment, Sharding

from .._options import SaveOptions
from ..format.bytes import bytes_of
from ..format.dtypes import safetensors_name
from ..plan.entry import Entry, key_of
from .conversion import Convert, split
from .model import local_of, model_state, sharding_in, unwrapped
from .names import rename
from .optimizer import Naming, optimizer_state
from .state import State, encode_state
from .transformers import conversion_of

Model = nn.Module | Mapping[str, torch.Tensor]
LayoutNames = tuple[list[str], list[str]]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # what torch's BatchNorm calls its buffers
_SAMPLE = 256  # elements of a tensor that are compared between replicas without a record


@dataclass(frozen=True, kw_only=True)
class Content:
    """What this rank brings.

    Args:
        entries: The tensors that go into safetensors files.
        tied: Names in the files that are not stored, and the stored name.
        state: Everything else.
        samples: Key and checksum of the first elements of each tensor that has no record.
        config: What to write as config.json, or None.
    """

    entries: list[Entry]
    tied: Mapping[str, str]
    state: State
    samples: list[tuple[str, int]]
    config: Any


def collect(
    *, model: Model | None, optimizer: Optimizer | None, scheduler: object, extra: object, options: SaveOptions
) -> Content:
    """Looks at model, optimizer and the rest; copies nothing but small state.

    Raises:
        ValueError, TypeError: What cannot be saved, by name.
    """
    found = model_state({} if model is None else model)
    in_module = isinstance(model, nn.Module)
    layout = options.layout or {}
    every = [*found.tensors, *found.tied]
    names = rename(options.names, every)
    shardings = {name: sharding_in(name, tensor, layout) for name, tensor in found.tensors.items()}
    shapes = {name: tuple(each.shape) for name, each in shardings.items()}
    convert = options.convert or usual_conversion(model, shapes)
    entries = [
        Entry(key=key, dtype=dtype, sharding=each.sharding, local=local_of(tensor), steady=steady, may_differ=loose)
        for name, tensor in found.tensors.items()
        for dtype in [_dtype_on_disk(name, tensor, options.dtype)]
        for steady in [tensor if tensor.requires_grad else None]  # a forward pass may change a buffer
        for each in segments_on_disk(name, shardings[name], convert, names[name])
        for key in [key_of("model", each.name)]
        for loose in [_is_loose_buffer(name, tensor, in_module=in_module)]
    ]
    slots = None
    if optimizer is not None:
        slots = optimizer_state(optimizer, Naming(model, names, layout))
        entries += slots.entries
    for entry in entries:
        safetensors_name(entry.dtype, entry.name)
    return Content(
        entries=entries,
        tied={names[name]: names[stored] for name, stored in found.tied.items() if names[name] != names[stored]},
        state=encode_state(objects=found.objects, optimizer=slots, scheduler=scheduler, extra=extra),
        samples=[
            _sample(name, each)
            for name, each in found.tensors.items()
            if name not in layout and not _has_record(each) and not _is_loose_buffer(name, each, in_module=in_module)
        ],
        config=_config(options.config),
    )


def segments_on_disk(name: str, sharding: Sharding, convert: Convert | None, key: str) -> list[Segment]:
    """What a tensor in memory is on disk: itself under its name there, or the parts that `convert` says.

    Args:
        name: The model's key.
        sharding: Its record.
        convert: From the key and the global shape to parts, or None.
        key: Its name in the files, where it is not converted.
    """
    parts = None if convert is None else convert(name, tuple(sharding.shape))
    return [Segment(key, sharding)] if parts is None else split(sharding, parts)


def layout_names(layout: Mapping[str, Sharding] | None, model: Model | None) -> LayoutNames:
    """The names of a layout that this rank's model lacks, and those that it has."""
    if not layout:
        return [], []
    found = model_state({} if model is None else model)
    known = {*found.tensors, *found.tied}
    return sorted(set(layout) - known), sorted(set(layout) & known)


def check_layout(every: Sequence[LayoutNames]) -> None:
    """Checks that some rank's model has each name of a layout.

    Args:
        every: What `layout_names` gives, of all ranks.

    Raises:
        ValueError: Naming one that none has.
    """
    unknown = {name for lacking, _ in every for name in lacking} - {name for _, having in every for name in having}
    if unknown:
        raise ValueError(f"layout names {min(unknown)!r}, but the model has no such tensor; correct or remove it")


def usual_conversion(model: Model | None, shapes: Mapping[str, tuple[int, ...]]) -> Convert | None:
    """What transformers does to its own models' tensors between memory and files."""
    inner = None if model is None else unwrapped(model)
    return conversion_of(inner, shapes) if isinstance(inner, nn.Module) else None


def _dtype_on_disk(name: str, tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values to save; materialise the model first")
    return wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype


def _has_record(tensor: torch.Tensor) -> bool:
    """Whether a tensor says itself how it is cut; any other calls itself whole."""
    return hasattr(tensor, "par_sharding") or hasattr(tensor, "placements")


def _is_loose_buffer(name: str, tensor: torch.Tensor, *, in_module: bool) -> bool:
    """Whether nothing keeps a tensor alike on all ranks that have it: buffers, or of a mapping, BatchNorm's by name."""
    own = not isinstance(tensor, nn.Parameter) if in_module else name.rpartition(".")[2] in _STATISTICS
    return own and not _has_record(tensor)


def _sample(name: str, tensor: torch.Tensor) -> tuple[str, int]:
    first = tensor.detach()[(0,) * max(0, tensor.dim() - 1)].reshape(-1)[:_SAMPLE] if tensor.numel() else tensor
    return key_of("model", name), crc32c(bytes_of(first.cpu().contiguous()))


def _config(config: Any) -> Any:
    """A config as a mapping of plain JSON."""
    to_dict = getattr(config, "to_dict", None)
    if to_dict is not None:
        return to_dict()
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config is a {type(config).__name__}; give a mapping, or an object with to_dict()")
    return config
