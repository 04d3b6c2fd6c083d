"""What a checkpoint's folder holds, as one rank sees it and tells the others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from crc32c import crc32c
from safetensors.torch import load as from_safetensors

from .._errors import CheckpointError, CorruptError
from .._torch_style import OBJECTS, read_places
from ..format.index import STEMS, decode_index
from ..format.manifest import MANIFEST, Manifest, blocks_of, decode_manifest
from ..format.pickled import load_pickle
from ..format.tagged import decode
from ..state.model import is_extra_state
from .commit import INDEX, SIDE_FILE
from .directory import Directory, Place, check_index, read_directory
from .storage import Folder


@dataclass(frozen=True, kw_only=True)
class Found:
    """The contents of a folder.

    Args:
        manifest: Ours; None in a folder of somebody else's.
        directories: By section: where its tensors lie.
        pickled: By section: others' files that torch.load maps, where there are no better ones.
        whole: By section: dtype and shape of the tensors in those.
        side: Tensors of scheduler, extra and param groups.
    """

    manifest: Manifest | None
    directories: Mapping[str, Directory] = field(default_factory=dict)
    pickled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: Mapping[str, Mapping[str, Place]] = field(default_factory=dict)
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def places(self, section: str) -> Mapping[str, Place]:
        """The tensors of a section by name."""
        if section in self.directories:
            return self.directories[section].places
        return self.whole.get(section, {})

    @property
    def tied(self) -> Mapping[str, str]:
        """Names that are not stored, and the stored one."""
        return {} if self.manifest is None else self.manifest.tied

    def part(self, name: str) -> Any:
        """The decoded "model", "scheduler" or "extra"; None where there is none."""
        encoded = None if self.manifest is None else getattr(self.manifest, name)
        return None if encoded is None else decode(encoded, self.side)

    def objects(self) -> dict[str, Any]:
        """The extra state of modules by name; nothing where the model is not wanted."""
        saved = (self.part("model") or {}) if "model" in self.directories else {}
        return {name: value for name, value in saved.items() if is_extra_state(name)}

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Names and options of the saved param groups."""
        optimizer = None if self.manifest is None else self.manifest.optimizer
        groups = [] if optimizer is None else optimizer["groups"]
        return [(each["params"], decode(each["options"], self.side)) for each in groups]  # type: ignore[misc]

    def slots(self) -> dict[str, object]:
        """Slots of the optimizer that are no tensors."""
        optimizer = None if self.manifest is None else self.manifest.optimizer
        return {} if optimizer is None else {key: decode(each, self.side) for key, each in optimizer["slots"].items()}


def look(
    folder: Folder, *, model: bool | None = None, optimizer: bool | None = None, variant: str | None = None
) -> Found:
    """Reads everything but the tensors, and checks it.

    Args:
        folder: The checkpoint's.
        model: Whether the model's files are wanted; None: if there are any.
        optimizer: Whether the optimizer's are; None: if there are any.
        variant: Of the files of others.

    Raises:
        CheckpointError: There is no checkpoint, or not what is wanted.
        CorruptError: Files that are missing, truncated or not what was written.
    """
    folder.recover()
    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder.url!r}; give the folder that holds the checkpoint")
    sizes = folder.sizes()
    manifest = decode_manifest(folder.read(MANIFEST)) if MANIFEST in sizes else None
    if manifest is not None:
        check_sizes(folder, manifest, sizes)
    if model is None:
        model = manifest is None or any(name.startswith(STEMS["model"]) for name in manifest.files)
    optimizer = _has_optimizer(folder, manifest, wanted=optimizer)
    side = _side(folder, manifest)
    if manifest is not None and manifest.style == "torch":
        wanted = [section for section, want in (("model", model), ("optimizer", optimizer)) if want]
        directories = {section: _read_object(folder, manifest, section) for section in wanted}
        return Found(manifest=manifest, directories=directories, side=side)
    directories = {}
    if model:
        directories["model"] = read_directory(folder, variant=variant, manifest=manifest)
    if optimizer and INDEX["optimizer"] in sizes:
        directories["optimizer"] = read_directory(folder, stem=STEMS["optimizer"], manifest=manifest)
    directories = {section: _outlined(folder, section, each) for section, each in directories.items()}
    _check_pickled(folder, directories.values())
    pickled = {section: each.pickles for section, each in directories.items() if each.pickles}
    for section in pickled:
        del directories[section]
    whole = {section: _whole(tensors_of(folder, names)) for section, names in pickled.items()}
    return Found(manifest=manifest, directories=directories, pickled=pickled, whole=whole, side=side)


def _has_optimizer(folder: Folder, manifest: Manifest | None, *, wanted: bool | None) -> bool:
    """Whether the optimizer's files are to be read."""
    if wanted and manifest is None:
        raise CheckpointError(
            f"{folder.url!r} has no {MANIFEST}, so it was not saved here and has no optimizer state; pass no optimizer"
        )
    saved = manifest is not None and manifest.optimizer is not None
    if wanted and not saved:
        raise CheckpointError(f"{folder.url!r} was saved without an optimizer; pass none")
    return saved if wanted is None else wanted


def _outlined(folder: Folder, section: str, found: Directory) -> Directory:
    """The same, or, of others' pickles that cannot be mapped, where their tensors lie."""
    if not found.pickles or _is_local(folder):
        return found
    by_file = {name: read_places(folder, section, name, None) for name in found.pickles}
    if found.index is not None:
        path = f"{folder.url}/{found.index}"
        check_index(decode_index(folder.read(found.index), path), by_file, path)
    return Directory({key: place for places in by_file.values() for key, place in places.items()}, (), {}, found.index)


def _check_pickled(folder: Folder, directories: Iterable[Directory]) -> None:
    """Where there is an index, it agrees with the files that torch.load opens."""
    for each in directories:
        if each.pickles and each.index is not None:
            path = f"{folder.url}/{each.index}"
            names = {name: load_pickle(_local_path(folder, name)) for name in each.pickles}
            check_index(decode_index(folder.read(each.index), path), names, path)


def tensors_of(folder: Folder, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The tensors of a model's files that torch.load opens, mapped from disk where they can be.

    Args:
        folder: A local one.
        names: The files.
    """
    found: dict[str, torch.Tensor] = {}
    for name in names:
        found.update(load_pickle(_local_path(folder, name)))
    return found


def _read_object(folder: Folder, manifest: Manifest, section: str) -> Directory:
    """A section in torch style."""
    name = OBJECTS[section]
    if name not in manifest.files:
        raise CheckpointError(f"{folder.url!r} has no {name}; it was saved without it")
    places = read_places(folder, section, name, manifest.files[name])
    return Directory({key: place for key, place in places.items() if key not in manifest.tied}, (), {}, None)


def _whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    return {
        name: Place(file="", dtype=each.dtype, shape=tuple(each.shape), begin=0, end=0)
        for name, each in tensors.items()
    }


def _is_local(folder: Folder) -> bool:
    return "://" not in folder.url.removeprefix("file://")


def _local_path(folder: Folder, name: str) -> Path:
    return Path(folder.url.removeprefix("file://")) / name


def check_sizes(folder: Folder, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Every file of the manifest is there, and as long as it was."""
    for name, record in manifest.files.items():
        if name not in sizes:
            raise CorruptError(f"{folder.url}/{name} is missing; bring it back, or take another checkpoint")
        if sizes[name] != record.size:
            raise CorruptError(
                f"{folder.url}/{name} has {sizes[name]} bytes, but {record.size} were written; it is truncated or was "
                "replaced: take another checkpoint"
            )


def _side(folder: Folder, manifest: Manifest | None) -> dict[str, torch.Tensor]:
    if manifest is None or SIDE_FILE not in manifest.files:
        return {}
    data = folder.read(SIDE_FILE)
    record = manifest.files[SIDE_FILE]
    for number, (begin, end) in enumerate(blocks_of(record.size, record.data_begin, record.block)):
        if crc32c(data[begin:end]) != record.crcs[number]:
            raise CorruptError(f"block {number} of {folder.url}/{SIDE_FILE} is corrupt: its checksum is wrong")
    return from_safetensors(data)
