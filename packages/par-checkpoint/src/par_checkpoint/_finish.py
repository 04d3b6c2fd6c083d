"""The first and the last acts of a save, which one rank does: files of the right size, then index, manifest, commit."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import torch
from crc32c import crc32c
from safetensors.torch import save as to_safetensors

from .format.manifest import (
    BLOCK,
    MANIFEST,
    SIDE_FILE,
    STEMS,
    FileRecord,
    Manifest,
    encode_index,
    encode_manifest,
    index_of,
    record_of,
)
from .plan.claims import name_of, section_of
from .plan.files import File, join_crcs
from .plan.plan import Prepared
from .state.collect import Content
from .storage.folder import Staging


@dataclass(frozen=True, kw_only=True)
class Noted:
    """Arguments of `save` that the commit needs."""

    style: str
    step: int | None
    overwrite: bool


def needed_bytes(prepared: Prepared, content: Content) -> int:
    """Return the bytes of the checkpoint without indexes and manifest."""
    side = sum(tensor.numel() * tensor.element_size() for tensor in content.state.tensors.values())
    side += sum(map(len, content.beside.values()))
    return side + sum(file.size for file in prepared.files)


def place_files(staging: Staging, files: Sequence[File]) -> None:
    """Give every file its size, so that ranks can write into it anywhere; a stream needs none.

    The header goes with the first block, but a file without blocks is written here.
    """
    for file in files:
        # No block follows this header, so no writer would create the file.
        if file.size == len(file.header):
            staging.write(file.name, file.header)
        elif staging.positional:
            staging.allocate(file.name, file.size, head=file.data_begin, block=file.block)


def commit(
    staging: Staging,
    content: Content,
    files: Mapping[str, FileRecord],
    small: Mapping[str, bytes],
    noted: Noted,
    index: tuple[str, bytes] | None = None,
) -> None:
    """Write the small files, the manifest last, and publish the folder.

    Args:
        staging: Staging folder; its data is complete and on the disk.
        content: Content of the manifest.
        files: The data files.
        small: Further files, complete.
        noted: Options of the caller that the manifest records.
        index: Name and bytes of the index of all files, if they stay in a generation. Default: no index.
    """
    from . import __version__  # noqa: PLC0415 - it is not there yet while the package is being imported

    records = dict(files)
    for name, data in small.items():
        staging.write(name, data)
        records[name] = record_of(data, BLOCK)
    beside = {}
    for name, data in content.beside.items():
        staging.write(name, data)
        # People edit these files, such as a chat template, so only `verify` compares their checksums.
        beside[name] = record_of(data, BLOCK)
    manifest = Manifest(
        style=noted.style,
        files=records,
        tied=content.tied,
        model=content.state.parts["model"],
        optimizer=content.state.optimizer,
        scheduler=content.state.parts["scheduler"],
        extra=content.state.parts["extra"],
        step=noted.step,
        beside=beside,
        version=__version__,
        generation=staging.generation,
    )
    # The manifest comes last: a folder that has one is complete.
    staging.write(MANIFEST, encode_manifest(manifest))
    staging.publish(overwrite=noted.overwrite, index=index)


def records_of(files: Sequence[File], crcs: Iterable[torch.Tensor]) -> dict[str, FileRecord]:
    """Return the manifest's records of safetensors files.

    Args:
        files: All of them.
        crcs: Checksums of every block or of its parts, in any order, see `decode_crcs`.
    """
    return {
        file.name: FileRecord(
            size=file.size,
            data_begin=file.data_begin,
            header_crc=crc32c(file.header),
            block=file.block,
            crcs=blocks,
        )
        for file, blocks in zip(files, join_crcs(files, crcs), strict=True)
    }


def indexes(prepared: Prepared, stem: str) -> dict[str, bytes]:
    """Return the index of each section that needs one: of a section with several files, and always of the optimizer.

    Args:
        prepared: All tensors and files.
        stem: First part of the names of the model's files.
    """
    found = {}
    for section, prefix in {**STEMS, "model": stem}.items():
        files = sum(file.section == section for file in prepared.files)
        # A load finds the optimizer's files by their index alone.
        if files > 1 or (files and section == "optimizer"):
            found[index_of(prefix)] = _index(prepared, section, "")
    return found


def index_from_above(prepared: Prepared, stem: str, generation: str) -> tuple[str, bytes] | None:
    """Return the name and bytes of the index by which transformers finds the model's files in a generation; else None.

    Args:
        prepared: All tensors and files.
        stem: First part of the names of the model's files.
        generation: The folder that the files stay in; "": they lie where transformers looks for them.
    """
    if not generation or not any(file.section == "model" for file in prepared.files):
        return None
    return index_of(stem), _index(prepared, "model", f"{generation}/")


def _index(prepared: Prepared, section: str, folder: str) -> bytes:
    """Return the bytes of a section's index, which names its files below a folder."""
    files = [file for file in prepared.files if file.section == section]
    tensors = [tensor for tensor in prepared.tensors if section_of(tensor.key) == section]
    places = {
        name_of(prepared.tensors[number].key): folder + PurePosixPath(file.name).name
        for file in files
        for number, _, _ in file.placed
    }
    total = sum(file.size - file.data_begin for file in files)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    return encode_index({name_of(tensor.key): places[name_of(tensor.key)] for tensor in tensors}, total, parameters)


def side_files(content: Content) -> dict[str, bytes]:
    """Return the file with the tensors that are not in the model's or optimizer's files."""
    tensors = dict(content.state.tensors)
    return {SIDE_FILE: to_safetensors(tensors, {"format": "pt"})} if tensors else {}
