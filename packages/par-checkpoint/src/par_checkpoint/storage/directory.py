"""Locations of the tensors in a Hugging Face folder, checked before any data is read."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from crc32c import crc32c

from .._errors import CheckpointError, CorruptError, corrupt
from ..format.header import SafetensorsHeader, decode_header
from ..format.manifest import MANIFEST, FileRecord, Manifest, decode_index, is_base_name, record_of

Argument = TypeVar("Argument")
Value = TypeVar("Value")


class ReadableFolder(Protocol):
    """A folder, as far as finding tensors in it needs one."""

    @property
    def url(self) -> str:
        """The folder's name for messages."""

    @property
    def in_flight(self) -> int:
        """Number of files to request concurrently."""

    @property
    def dangling(self) -> Collection[str]:
        """Names of links to files that are missing, as of the last look at sizes."""

    def sizes(self) -> dict[str, int]:
        """Return the size of every file, in bytes."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes begin .. end - 1 of a file."""


@dataclass(frozen=True)
class StoredTensor:
    """File and range of a stored tensor.

    Args:
        file: The file, relative to the folder.
        dtype: The dtype of its elements.
        shape: Shape of the full tensor, which is stored row-major.
        begin: First byte in the file.
        end: One past the last byte.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Directory:
    """Files and offsets of all tensors of a model or an optimizer.

    Args:
        places: Location of each tensor by name; at first only of tensors in safetensors files.
        pickles: Files of torch.save that hold the tensors instead, relative to the folder.
        index: Name of the index, if there is one.
        weight_map: Content of the index of such files: the file of each tensor, relative to the folder.
    """

    places: Mapping[str, StoredTensor]
    pickles: tuple[str, ...] = ()
    index: str | None = None
    weight_map: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class _Form:
    """One way to store a model: in a single file, or in several with an index ("" where this way has none)."""

    single: str
    index: str = ""
    pickled: bool = False


def read_directory(
    folder: ReadableFolder, *, stem: str = "model", variant: str | None = None, manifest: Manifest | None = None
) -> Directory:
    """Find the files, read the headers of safetensors files, and check that they are consistent.

    Args:
        folder: Folder to read.
        stem: First part of the files' names: "adapter_model" for a peft adapter, "optimizer/optimizer" for an
            optimizer. Default: "model".
        variant: Variant to read: model.<variant>.safetensors and similar names. Default: no variant.
        manifest: Manifest of the folder, if it has one; sizes, headers and index are checked against it before their
            use.

    Raises:
        CheckpointError: The folder has no weights, or two sets of weights.
        CorruptError: A file is missing, truncated or changed, or contradicts another file.
        ValueError: The variant cannot be part of a file's name.
    """
    sizes = folder.sizes()
    records = {} if manifest is None else manifest.files
    form, name = _choose(_forms(stem, variant), folder, sizes, records)
    index, weight_map = None, None
    if name == form.single:
        files = [name]
    else:
        _check_size(folder, name, sizes, records)
        data = read_small(folder, name, records[name]) if name in records else folder.read(name, 0, sizes[name])
        # An index names the files in its own folder.
        base = name[: name.rfind("/") + 1]
        index = name
        weight_map = {key: base + file for key, file in decode_index(data, f"{folder.url}/{name}").items()}
        files = sorted(set(weight_map.values()))
    for file in files:
        _check_size(folder, file, sizes, records)
        # Nothing would compare the bytes of such a file.
        if name in records and file not in records:
            raise corrupt(f"{folder.url}/{file}", f"is in {index}, but {MANIFEST} does not list it")
    # Only torch.load shows what is in such files, and where.
    if form.pickled:
        return Directory({}, tuple(files), index, weight_map)
    read = _for_each(lambda file: _read_header(folder, file, sizes[file], records.get(file)), files, folder.in_flight)
    headers = dict(zip(files, read, strict=True))
    if weight_map is not None:
        check_index(weight_map, {file: header.tensors for file, header in headers.items()}, f"{folder.url}/{index}")
    places = {}
    for file, header in headers.items():
        for key, stored in header.tensors.items():
            begin, end = header.data_begin + stored.begin, header.data_begin + stored.end
            places[key] = StoredTensor(file, stored.dtype, stored.shape, begin, end)
    return Directory(places, (), index)


def check_index(weight_map: Mapping[str, str], names: Mapping[str, Collection[str]], index: str) -> None:
    """Raise unless an index lists every tensor with the file that contains it.

    Args:
        weight_map: Content of the index: the file of each tensor.
        names: Names of the tensors in each file, by file.
        index: Name of the index, for messages.

    Raises:
        CorruptError: Index and files differ.
    """
    for key, file in weight_map.items():
        if key not in names[file]:
            raise corrupt(index, f"says that {key!r} is in {file}, but it is not there")
    for file, keys in names.items():
        for key in keys:
            if weight_map.get(key) != file:
                raise corrupt(index, f"does not say that {key!r} is in {file}, where it is: one of the two is stale")


def read_small(folder: ReadableFolder, name: str, record: FileRecord) -> bytes:
    """Return all bytes of a small file, after a comparison with its checksums.

    Raises:
        CorruptError: They do not.
    """
    data = folder.read(name, 0, record.size)
    if record != record_of(data, record.block):
        raise corrupt(f"{folder.url}/{name}", f"does not match its checksum in {MANIFEST}")
    return data


def _forms(stem: str, variant: str | None) -> list[_Form]:
    """Return the possible names of the files, the preferred ones first."""
    if variant is not None and not is_base_name(variant):
        raise ValueError(f"variant {variant!r} cannot be part of a file's name; give a word such as 'fp16'")
    tag = "" if variant is None else f".{variant}"
    forms = [_Form(single=f"{stem}{tag}.safetensors", index=f"{stem}.safetensors.index{tag}.json")]
    if stem == "adapter_model":
        forms.append(_Form(single=f"{stem}{tag}.bin", pickled=True))
    if stem == "model":
        index = f"pytorch_model.bin.index{tag}.json"
        forms.append(_Form(single=f"pytorch_model{tag}.bin", index=index, pickled=True))
        forms.append(_Form(single=f"model{tag}.pt", pickled=True))
    return forms


def _choose(
    forms: list[_Form], folder: ReadableFolder, sizes: Mapping[str, int], records: Mapping[str, FileRecord]
) -> tuple[_Form, str]:
    """Return the first form that exists, and its file. If the manifest lists any form, only the manifest counts."""
    for names in (records, sizes):
        for form in forms:
            present = [name for name in (form.single, form.index) if name in names]
            if len(present) == 2:
                raise CheckpointError(
                    f"{folder.url} has both {form.single} and {form.index}, and one is stale; remove that one"
                )
            if present:
                return form, present[0]
    looked_for = [name for form in forms for name in (form.single, form.index) if name]
    for name in looked_for:
        check_linked(folder, name)
    if any(name.endswith(".distcp") for name in sizes):
        raise CheckpointError(
            f"{folder.url} is a folder of torch.distributed.checkpoint. If it has its .metadata, use `par-checkpoint "
            "convert`; else its save has not ended, or the file is on another host: copy it here"
        )
    wanted = ", ".join(looked_for)
    raise CheckpointError(
        f"{folder.url} has no weights under any of these names: {wanted}. It has: "
        f"{', '.join(sorted(sizes)) or 'nothing'}. Give the folder of the weights, or their variant"
    )


def check_linked(folder: ReadableFolder, name: str) -> None:
    """Raise CorruptError if a file that is needed is a link to one that is missing."""
    if name in folder.dangling:
        raise CorruptError(f"{folder.url}/{name} is a link to a file that is missing: fetch it again")


def _check_size(folder: ReadableFolder, name: str, sizes: Mapping[str, int], records: Mapping[str, FileRecord]) -> None:
    path = f"{folder.url}/{name}"
    check_linked(folder, name)
    if name not in sizes:
        raise corrupt(path, "is missing, but the index or the manifest lists it")
    if name in records and records[name].size != sizes[name]:
        raise corrupt(path, f"has {sizes[name]} bytes, but {MANIFEST} says {records[name].size}")


def _read_header(folder: ReadableFolder, name: str, size: int, record: FileRecord | None) -> SafetensorsHeader:
    """Read the header of a safetensors file, after a check against its record if it has one."""
    path = f"{folder.url}/{name}"
    if record is None:
        return decode_header(lambda begin, end: folder.read(name, begin, end), size, path)
    # The record has the header's size, so one read replaces two, and the checksum is compared before anything is
    # parsed.
    first = folder.read(name, 0, record.data_begin)
    if len(first) != record.data_begin or crc32c(first) != record.header_crc:
        raise corrupt(path, f"has a header that does not match its checksum in {MANIFEST}")
    header = decode_header(lambda begin, end: first[begin:end], size, path)
    if header.data_begin != record.data_begin:
        raise corrupt(path, f"has data from byte {header.data_begin} on, not {record.data_begin}")
    return header


def _for_each(act: Callable[[Argument], Value], arguments: Sequence[Argument], at_a_time: int) -> list[Value]:
    """Call a function for each argument; return the results in order.

    Args:
        act: Function to call.
        arguments: Arguments, one for each call.
        at_a_time: Maximum number of concurrent calls; with more than one, a thread makes each call.
    """
    if min(at_a_time, len(arguments)) < 2:
        return [act(each) for each in arguments]
    with ThreadPoolExecutor(min(at_a_time, len(arguments)), thread_name_prefix="par-checkpoint-files") as pool:
        return list(pool.map(act, arguments))
