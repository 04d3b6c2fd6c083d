"""The content of a checkpoint without the tensors' data. One rank reads and checks it, and broadcasts it."""

from collections.abc import Container, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load as from_safetensors

from .._errors import CheckpointError, CorruptError, corrupt
from ..format.header import decode_header
from ..format.manifest import (
    MANIFEST,
    OBJECTS,
    SIDE_FILE,
    STEMS,
    FileRecord,
    Manifest,
    check_optimizer,
    decode_manifest,
    index_of,
)
from ..format.pickled import flat_tensors, load_outline, load_pickle, place_of
from ..format.tagged import decode, split_ranks
from .directory import Directory, StoredTensor, check_index, check_linked, read_directory, read_small
from .folder import Folder


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Content of a checkpoint, without the data of its tensors.

    Args:
        manifest: Our manifest; None in a folder that another program wrote.
        directories: Location of each tensor of "model" and "optimizer", for the requested sections.
        side: Tensors in scheduler, extra and param groups, by the names that the manifest refers to.
    """

    manifest: Manifest | None
    directories: Mapping[str, Directory] = field(default_factory=dict)
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def places(self, section: str) -> Mapping[str, StoredTensor]:
        """Return the location of each tensor of "model" or "optimizer", by name."""
        return self.directories[section].places if section in self.directories else {}

    def digest(self) -> bytes:
        """Return 32 bytes that identify the location of every tensor, and the block size of its file."""
        files = {} if self.manifest is None else self.manifest.files
        records = [(name, record.size, record.data_begin, record.block) for name, record in sorted(files.items())]
        return sha256(
            repr((records, [sorted(each.places.items()) for each in self.directories.values()])).encode()
        ).digest()

    @property
    def pickled(self) -> Mapping[str, tuple[str, ...]]:
        """The files that torch.load must map from a local disk, by section; of no section where blocks can be read."""
        return {section: each.pickles for section, each in self.directories.items() if each.pickles}

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of tensors that are not stored, and the name of the stored tensor that each of them shares."""
        return {} if self.manifest is None else self.manifest.tied

    def part(self, name: str) -> Any:
        """Return the decoded "model", "scheduler" or "extra"; None if it is missing."""
        encoded = None if self.manifest is None else getattr(self.manifest, name)
        return None if encoded is None else decode(encoded, self.side)

    def extra_of_ranks(self) -> tuple[Any, ...] | None:
        """Return the value of `extra` of each rank, or None if the ranks had equal values."""
        encoded = None if self.manifest is None else split_ranks(self.manifest.extra)
        return None if encoded is None else tuple(decode(one, self.side) for one in encoded)

    def objects(self) -> dict[str, Any]:
        """Return the entries of the model's state dict other than tensors, such as extra state.

        Empty if the model is not loaded.
        """
        return (self.part("model") or {}) if "model" in self.directories else {}

    def check_state(self) -> None:
        """Check what is no tensor before anything takes it for what it should be: strangers may have written it.

        Raises:
            CorruptError: State of another shape than a save writes.
        """
        if not isinstance(self.part("model") or {}, dict):
            raise corrupt(MANIFEST, "has a state of the model that is no mapping")
        if self.manifest is None or self.manifest.optimizer is None:
            return
        check_optimizer(self.manifest.optimizer)
        for _, options in self.groups():
            wrong = "params" if isinstance(options, dict) and "params" in options else ""
            if wrong or not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
                raise corrupt(
                    MANIFEST, f"has options of a param group that are none: {wrong or type(options).__name__}"
                )
        # Decoding raises for invalid content, so it happens here, before a load has changed anything.
        self.slots()
        self.own()

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Return the parameter names and options of each saved param group."""
        optimizer = None if self.manifest is None else self.manifest.optimizer
        groups = [] if optimizer is None else optimizer["groups"]
        return [(group["params"], decode(group["options"], self.side)) for group in groups]  # type: ignore[misc]

    def own(self) -> list[dict[str, object]]:
        """Return the entries of each optimizer's state dict besides state and param groups."""
        optimizer = None if self.manifest is None else self.manifest.optimizer
        own = decode((optimizer or {}).get("own", []), self.side)
        if not isinstance(own, list) or not all(isinstance(entries, dict) for entries in own):
            raise corrupt(MANIFEST, f"has {own!r:.40} beside the optimizer's groups and slots, not lists of entries")
        return own

    def slots(self) -> dict[str, object]:
        """Return the slots of the optimizer that are not tensors, by "<parameter>.<slot>"."""
        optimizer = None if self.manifest is None else self.manifest.optimizer
        return {} if optimizer is None else {key: decode(slot, self.side) for key, slot in optimizer["slots"].items()}


def read_outline(
    folder: Folder,
    *,
    model: bool | None = None,
    optimizer: bool | None = None,
    variant: str | None = None,
    stem: str = "model",
) -> Outline:
    """Read everything but the tensors' data, and check that all of it agrees.

    Args:
        folder: The checkpoint's folder.
        model: Whether the model's files are wanted; None: if there are any.
        optimizer: Whether the optimizer's files are wanted; None: if there are any.
        variant: The variant of others' files to read, such as "fp16".
        stem: First part of the names of files that another program wrote, such as "adapter_model".

    Raises:
        CheckpointError: There is no checkpoint, or it does not hold what is wanted.
        CorruptError: Files that are missing, truncated or not what was written.
    """
    folder.recover()
    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder.url!r}; give the folder that holds the checkpoint")
    sizes = folder.sizes()
    check_linked(folder, MANIFEST)
    # Without a manifest, another program has written the folder, and only the weights can be read.
    manifest = decode_manifest(folder.read(MANIFEST)) if MANIFEST in sizes else None
    side = {}
    if manifest is not None:
        check_sizes(folder, manifest, sizes)
        # Param groups and schedulers refer to these tensors, so they are read before any state is decoded.
        if SIDE_FILE in manifest.files:
            side = side_tensors(read_small(folder, SIDE_FILE, manifest.files[SIDE_FILE]), f"{folder.url}/{SIDE_FILE}")
    if optimizer and manifest is None:
        raise CheckpointError(
            f"{folder.url!r} has no {MANIFEST}, so it was not saved here and has no optimizer state; pass no optimizer"
        )
    has_optimizer = manifest is not None and manifest.optimizer is not None
    if optimizer and not has_optimizer:
        raise CheckpointError(f"{folder.url!r} was saved without an optimizer; pass none")
    wanted = []
    if manifest is not None:
        stem = manifest.stem
    if model or (model is None and (manifest is None or any(name.startswith(stem) for name in manifest.files))):
        wanted.append("model")
    if has_optimizer and optimizer is not False:
        wanted.append("optimizer")
    directories = {}
    for section in wanted:
        if manifest is not None and manifest.style == "torch":
            beside = decode(manifest.model, side) if section == "model" and manifest.model is not None else ()
            directories[section] = _read_object(folder, manifest, section, cast("Container[object]", beside))
        elif section == "model" and manifest is not None and _is_empty(manifest):
            # A model without tensors has no file of weights, so a missing file is not an error.
            directories[section] = Directory({})
        elif section == "model":
            found = read_directory(folder, stem=stem, variant=variant, manifest=manifest)
            directories[section] = _with_pickles(folder, found)
        elif (index := index_of(STEMS[section])) in sizes:  # an optimizer that has not stepped has no tensors
            if manifest is not None and index not in manifest.files:
                raise corrupt(f"{folder.url}/{index}", f"belongs to a save, but {MANIFEST} does not list it")
            directories[section] = read_directory(folder, stem=STEMS[section], manifest=manifest)
    outline = Outline(manifest=manifest, directories=directories, side=side)
    outline.check_state()
    return outline


def _is_empty(manifest: Manifest) -> bool:
    """Return whether the saved model has no tensors."""
    weights = (name for name in manifest.files if name.endswith(".safetensors") and name != SIDE_FILE)
    return manifest.model is not None and all("/" in name for name in weights)


def tensors_of(folder: Folder, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the tensors in a model's files that torch.load opens, mapped from disk if possible.

    Args:
        folder: A local folder.
        names: The files.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors.update(load_pickle(_local_path(folder, name)))
    return tensors


def side_tensors(data: bytes, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a small safetensors file, from all of its bytes.

    Raises:
        CorruptError: It is none.
    """
    decode_header(lambda begin, end: data[begin:end], len(data), path)
    try:
        return from_safetensors(data)
    except Exception as error:  # of a class of its own, which safetensors does not export from there
        raise corrupt(path, f"cannot be read ({error})") from error


def check_sizes(folder: Folder, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Raise unless every file of the manifest exists and has its recorded size.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        sizes: Size of each existing file, in bytes.

    Raises:
        CorruptError: A file is missing, truncated or longer.
    """
    for name, record in manifest.files.items():
        text = wrong_size(folder, name, record, sizes)
        if text is not None:
            raise CorruptError(text)


def wrong_size(folder: Folder, name: str, record: FileRecord, sizes: Mapping[str, int]) -> str | None:
    """Describe how a file differs from its record, without reading it; return None if it does not."""
    if name in folder.dangling:
        return f"{folder.url}/{name} is a link to a file that is missing: fetch it again"
    if name not in sizes:
        return f"{folder.url}/{name} is missing; bring it back, or take another checkpoint"
    if sizes[name] != record.size:
        return (
            f"{folder.url}/{name} has {sizes[name]} bytes, but {record.size} were written; it is truncated or was "
            "replaced: take another checkpoint"
        )
    return None


def _read_object(folder: Folder, manifest: Manifest, section: str, beside: Container[object]) -> Directory:
    """Return the location of a section's tensors in its one file in torch style, and its other content."""
    name = OBJECTS[section]
    if name not in manifest.files:
        raise CheckpointError(f"{folder.url!r} has no {name}; it was saved without it")
    places = _places_in_pickle(folder, section, name, manifest.files[name], beside)
    # A file in torch style repeats tied tensors, and the directory names each tensor once.
    return Directory({key: place for key, place in places.items() if key not in manifest.tied})


def _with_pickles(folder: Folder, directory: Directory) -> Directory:
    """Return a directory with the tensors in other programs' pickles.

    On local disks torch.load maps these files, whatever they hold; elsewhere their tensors are read from their places.
    """
    if not directory.pickles:
        return directory
    local = "://" not in folder.url.removeprefix("file://")
    by_file: dict[str, dict[str, StoredTensor]] = {}
    for name in directory.pickles:
        if local:
            # torch maps local files, so a tensor takes no memory until it is read.
            tensors = load_pickle(_local_path(folder, name))
            by_file[name] = {
                key: StoredTensor("", each.dtype, tuple(each.shape), 0, 0) for key, each in tensors.items()
            }
        else:
            by_file[name] = _places_in_pickle(folder, "model", name, None)
    if directory.weight_map is not None:
        check_index(directory.weight_map, by_file, f"{folder.url}/{directory.index}")
    places = {key: place for file in by_file.values() for key, place in file.items()}
    return Directory(places, directory.pickles if local else (), directory.index)


def _places_in_pickle(
    folder: Folder, section: str, name: str, record: FileRecord | None, beside: Container[object] = ()
) -> dict[str, StoredTensor]:
    """Locate the tensors of a section in a file of torch.save, without reading their data.

    Args:
        folder: The checkpoint's folder.
        section: "model" or "optimizer".
        name: The file.
        record: Manifest record of the file; None for a file of another program.
        beside: Names of what the model's state dict has beside tensors.

    Raises:
        CheckpointError, CorruptError: It is not what was written.
    """
    path = f"{folder.url}/{name}"
    with closing(folder.open(name)) as source:
        saved, size = load_outline(source, record, path), source.size
    if section == "model" and isinstance(saved, dict):
        saved = {key: value for key, value in saved.items() if key not in beside}
    tensors = flat_tensors(saved, path) if section == "model" else _slots_in(saved, path)
    return {
        key: StoredTensor(name, each.dtype, tuple(each.shape), *place_of(each, size, path))
        for key, each in tensors.items()
    }


def _slots_in(saved: object, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state dict that has names in place of numbers."""
    state = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} is no optimizer's state: it has no mapping 'state'; take another checkpoint")
    return {
        f"{parameter}.{slot}": value
        for parameter, slots in state.items()
        if isinstance(slots, Mapping)  # else it is of the optimizer as a whole
        for slot, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


def _local_path(folder: Folder, name: str) -> Path:
    return Path(folder.url.removeprefix("file://")) / name
