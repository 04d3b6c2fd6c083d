"""`inspect`: what a checkpoint holds, without its tensors' data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from par_groups import Box

from ..storage.consistent import read_consistently
from ..storage.directory import StoredTensor
from ..storage.folder import Folder
from ..storage.outline import read_outline
from ..tiers.gathered import GatheredFolder, HostShard, open_checkpoint


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Content of a checkpoint.

    Args:
        path: Folder of the checkpoint.
        style: "huggingface" or "torch"; "foreign" if it was not saved here.
        step: Value of `step` in `save`.
        tensors: dtype, shape and file of the model's tensors, by name.
        optimizer: dtype, shape and file of the optimizer's tensors, by "<parameter>.<slot>".
        tied: Names of tensors that are not stored, and the name of the stored tensor that each of them shares.
        files: Size of each file in bytes, by name.
        groups: Parameter names and options of each of the optimizer's param groups.
        scheduler: State of the scheduler, or a list of states.
        extra: Value of `extra` in `save`.
        parts: Inspected parts of hosts (see `copies` of `save`), including copies and broken parts.
        boxes: Rectangles of each tensor of the model or the optimizer in these parts, by name.
    """

    path: str
    style: str
    step: int | None
    tensors: Mapping[str, StoredTensor]
    optimizer: Mapping[str, StoredTensor]
    tied: Mapping[str, str]
    files: Mapping[str, int]
    groups: tuple[tuple[list[str], dict[str, Any]], ...]
    scheduler: Any
    extra: Any
    parts: tuple[HostShard, ...] = ()
    boxes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of elements of all the model's tensors."""
        return sum(math.prod(place.shape) for place in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def inspect(path: str | PathLike[str] | Sequence[str | PathLike[str]]) -> CheckpointInfo:
    """Looks at what a checkpoint holds, without its tensors' data. No process group is needed.

    Args:
        path: The checkpoint's folder or its URL; it may be any Hugging Face folder. Or the folders of hosts that hold
            its parts (see `copies` of `save`), one or several.

    Raises:
        ValueError: Several folders of which none holds parts.
        CheckpointError: There is no checkpoint.
        CorruptError: Headers, index or manifest are not what was written.
        ReplacedError: Other checkpoints took its place again and again while it was read.
    """
    folder = open_checkpoint(path)
    return read_consistently(folder, lambda: _contents(folder))


def _contents(folder: Folder) -> CheckpointInfo:
    outline = read_outline(folder)
    manifest = outline.manifest
    parts = folder if isinstance(folder, GatheredFolder) else None
    places = {**outline.places("optimizer"), **outline.places("model")}
    return CheckpointInfo(
        path=folder.url if parts is None else parts.names,
        style="foreign" if manifest is None else manifest.style,
        step=None if manifest is None else manifest.step,
        tensors=outline.places("model"),
        optimizer=outline.places("optimizer"),
        tied=outline.tied,
        files=folder.sizes(),
        groups=tuple(outline.groups()),
        scheduler=outline.part("scheduler"),
        extra=outline.part("extra"),
        parts=() if parts is None else tuple(parts.parts),
        boxes={} if parts is None else parts.boxes(places),
    )
