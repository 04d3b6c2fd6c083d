"""What a Hugging Face folder holds: which tensor lies where, checked before a byte of it is trusted."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from crc32c import crc32c

from .._errors import CheckpointError
from ..format.header import Header, corrupt, decode_header
from ..format.index import decode_index, is_base_name
from ..format.manifest import MANIFEST, FileRecord, Manifest, record_of


class _Readable(Protocol):
    """A folder that can be read."""

    @property
    def url(self) -> str: ...

    def sizes(self) -> dict[str, int]: ...

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes: ...


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Args:
        file: Relative to the folder.
        dtype: Of its elements.
        shape: The whole tensor's, row-major.
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
    """What a folder holds.

    Args:
        places: By tensor name; of safetensors files only.
        pickles: Files of torch.save instead, relative to the folder.
        headers: By file; of safetensors files only.
        index: The index, if there is one.
    """

    places: Mapping[str, Place]
    pickles: tuple[str, ...]
    headers: Mapping[str, Header]
    index: str | None


@dataclass(frozen=True, kw_only=True)
class _Form:
    """One way to store a model: in a single file, or in several with an index; a way without an index has "" there."""

    single: str
    index: str = ""
    pickled: bool = False

    def among(self, names: Collection[str]) -> list[str]:
        return [name for name in (self.single, self.index) if name in names]


def read_directory(
    folder: _Readable, *, stem: str = "model", variant: str | None = None, manifest: Manifest | None = None
) -> Directory:
    """Finds the files, reads their headers, and checks that all of it agrees.

    Args:
        folder: Where to look.
        stem: What the files' names begin with, "optimizer/optimizer" for an optimizer.
        variant: Read model.<variant>.safetensors and its like instead.
        manifest: The folder's, if it has one: sizes, headers and index are checked against it before they are used.

    Raises:
        CheckpointError: No weights, or two sets of them.
        CorruptError: A file that is missing, truncated, changed, or at odds with another.
        ValueError: A variant that cannot be part of a file's name.
    """
    found = _Found(folder, manifest)
    form, name = found.choose(_forms(stem, variant))
    if name == form.single:
        found.size(name)
        files, weight_map = [name], None
    else:
        base = name.rpartition("/")[0]
        weight_map = {
            key: f"{base}/{file}" if base else file
            for key, file in decode_index(found.small(name), found.path(name)).items()
        }
        files = sorted(set(weight_map.values()))
        for file in files:
            found.size(file)
    index = name if weight_map is not None else None
    if form.pickled:
        return Directory({}, tuple(files), {}, index)
    headers = {file: found.header(file) for file in files}
    if weight_map is not None:
        check_index(weight_map, {file: header.tensors for file, header in headers.items()}, found.path(name))
    return Directory(_places(headers), (), headers, index)


def _forms(stem: str, variant: str | None) -> list[_Form]:
    """The ways to look for, the preferred one first."""
    if variant is not None and not is_base_name(variant):
        raise ValueError(f"variant {variant!r} cannot be part of a file's name; give a word such as 'fp16'")
    tag = "" if variant is None else f".{variant}"
    forms = [_Form(single=f"{stem}{tag}.safetensors", index=f"{stem}.safetensors.index{tag}.json")]
    if stem == "model":
        index = f"pytorch_model.bin.index{tag}.json"
        forms.append(_Form(single=f"pytorch_model{tag}.bin", index=index, pickled=True))
        forms.append(_Form(single=f"model{tag}.pt", pickled=True))
    return forms


class _Found:
    """A folder's files, each looked at only once the manifest has agreed to it."""

    def __init__(self, folder: _Readable, manifest: Manifest | None) -> None:
        self._folder = folder
        self._sizes = folder.sizes()
        self._records: Mapping[str, FileRecord] = {} if manifest is None else manifest.files

    def path(self, name: str) -> str:
        """A file's name for messages."""
        return f"{self._folder.url}/{name}"

    def choose(self, forms: list[_Form]) -> tuple[_Form, str]:
        """The first form that is there, and its file: what the manifest lists counts, if it lists any of them."""
        for names in (self._records, self._sizes):
            for form in forms:
                present = form.among(names)
                if len(present) == 2:
                    raise CheckpointError(
                        f"{self._folder.url} has both {form.single} and {form.index}, and one is stale; remove that one"
                    )
                if present:
                    return form, present[0]
        wanted = ", ".join(name for form in forms for name in (form.single, form.index) if name)
        raise CheckpointError(
            f"{self._folder.url} has no weights under any of these names: {wanted}. It has: "
            f"{', '.join(sorted(self._sizes)) or 'nothing'}. Give the folder of the weights, or their variant"
        )

    def size(self, name: str) -> int:
        """Bytes of a file, which must be there, and as many as the manifest says."""
        if name not in self._sizes:
            raise corrupt(self.path(name), "is missing, but the index or the manifest lists it")
        size = self._sizes[name]
        record = self._records.get(name)
        if record is not None and record.size != size:
            raise corrupt(self.path(name), f"has {size} bytes, but {MANIFEST} says {record.size}")
        return size

    def small(self, name: str) -> bytes:
        """The bytes of a small file."""
        size = self.size(name)
        data = self._folder.read(name, 0, size)
        record = self._records.get(name)
        if record is not None and record != record_of(data, record.block):
            raise corrupt(self.path(name), f"does not match its checksum in {MANIFEST}")
        return data

    def header(self, name: str) -> Header:
        """The header of a safetensors file."""
        size = self.size(name)
        record = self._records.get(name)
        if record is None:
            return decode_header(lambda begin, end: self._folder.read(name, begin, end), size, self.path(name))
        first = self._folder.read(name, 0, record.data_begin)
        if len(first) != record.data_begin or crc32c(first) != record.header_crc:
            raise corrupt(self.path(name), f"has a header that does not match its checksum in {MANIFEST}")
        header = decode_header(lambda begin, end: first[begin:end], size, self.path(name))
        if header.data_begin != record.data_begin:
            raise corrupt(self.path(name), f"has data from byte {header.data_begin} on, not {record.data_begin}")
        return header


def check_index(weight_map: Mapping[str, str], names: Mapping[str, Collection[str]], index: str) -> None:
    """Raises CorruptError unless an index says of every tensor in which file it is.

    Args:
        weight_map: The index.
        names: By file, the tensors in it.
        index: The index's name, for messages.
    """
    for key, file in weight_map.items():
        if key not in names[file]:
            raise corrupt(index, f"says that {key!r} is in {file}, but it is not there")
    for file, keys in names.items():
        for key in keys:
            if weight_map.get(key) != file:
                raise corrupt(index, f"does not say that {key!r} is in {file}, where it is: one of the two is stale")


def _places(headers: Mapping[str, Header]) -> dict[str, Place]:
    places = {}
    for file, header in headers.items():
        for key, stored in header.tensors.items():
            begin = header.data_begin + stored.begin
            places[key] = Place(file, stored.dtype, stored.shape, begin, header.data_begin + stored.end)
    return places
