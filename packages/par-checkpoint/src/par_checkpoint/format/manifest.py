"""The two JSON files that describe a checkpoint: our manifest, and the index that transformers reads.

`par_checkpoint.json`, the manifest, holds the state that is no tensor and the checksums of all other files. It begins
with a checksum of all bytes that follow, so that a change to any of its bytes is found. The index of a model in several
files maps each tensor to its file.
"""

import json
import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crc32c import crc32c

from .._errors import CheckpointError, corrupt
from .header import MAX_HEADER
from .strict_json import is_count, parse_object, text_map

MANIFEST = "par_checkpoint.json"

SIDE_FILE = "par_checkpoint.safetensors"
"""The tensors of scheduler, extra and param groups."""

CONFIG = "config.json"
"""The model's config."""

GENERATION_CONFIG = "generation_config.json"
"""The model's settings for text generation."""

OBJECTS = {"model": "model.pt", "optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "extra": "extra.pt"}
"""Name of each section's file in torch style."""

STEMS = {"model": "model", "optimizer": "optimizer/optimizer"}
"""First part of the file names, by section. `Format(stem=...)` replaces the model's."""

OPTIMIZER, TEMPLATES = "optimizer/", "additional_chat_templates/"
"""Subfolders of a checkpoint, for the optimizer's files and for a tokenizer's additional chat templates."""

BLOCK = 4 << 20
"""Bytes of a block, the unit that is checksummed, written and read."""

GENERATION = re.compile("generation-[0-9A-Za-z]+")
"""The names of folders that hold the files of one save, on stores where nothing can be renamed."""

_FORMAT = 1
_MOST = 1 << 62  # bytes of a file or a block: planning counts in 64 bits
_HEAD = b'{"checksum": "%08x"'
_HEAD_SIZE = len(_HEAD % 0)
_VALUES = ("model", "optimizer", "scheduler", "extra")
_FIELDS = {"checksum", "format", "par_checkpoint", "style", "step", "tied", "files", "beside", *_VALUES}
_HEX = re.compile("[0-9a-f]*")
_SHARD = re.compile(r"(\w+)(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksums of one file.

    Args:
        size: Bytes of the whole file.
        data_begin: First byte of a safetensors file's data; 0 in other files.
        header_crc: crc32c of the bytes before `data_begin`.
        block: Bytes of a block, from `data_begin` on; the last block may be shorter.
        crcs: crc32c of each block; kept as an array.
    """

    size: int
    data_begin: int
    header_crc: int
    block: int
    crcs: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "crcs", array("I", self.crcs))  # four bytes each: there are millions


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `par_checkpoint.json`.

    Args:
        style: Format of the tensors' files: "huggingface" or "torch".
        files: Every other file that is ours, by its name relative to the folder.
        tied: Name of the stored tensor, by name of a tensor that is not stored because it has the same values.
        model: State of the model that is no tensor, as tagged JSON; None if there is none.
        optimizer: Param groups of the optimizer, and its state that is no tensor; None without an optimizer.
        scheduler: State of the scheduler, or a list of states; None without one.
        extra: The `extra` that the caller passed to the save.
        step: The training step, if the caller gave one.
        beside: Records of files that users may edit, such as config.json and a tokenizer's, by name; None for a file
            whose name only an earlier version has recorded. A load reads no such file, and `verify` reports changes.
        version: The version of par-checkpoint that wrote the manifest. An older version names it in its error.
        generation: Subfolder of the files on an object store; "" if they are in the folder itself.
    """

    style: str
    files: Mapping[str, FileRecord]
    tied: Mapping[str, str]
    model: Any
    optimizer: Any
    scheduler: Any
    extra: Any
    step: int | None = None
    beside: Mapping[str, FileRecord | None] = field(default_factory=dict)
    version: str = ""
    generation: str = ""

    @property
    def stem(self) -> str:
        """Return the first part of the names of the model's safetensors files, or "model" without such files."""
        matches = (_SHARD.fullmatch(name) for name in self.files if name != SIDE_FILE)
        return next((match[1] for match in matches if match is not None), "model")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest."""
    fields = {
        "format": _FORMAT,
        "par_checkpoint": manifest.version,
        "style": manifest.style,
        "step": manifest.step,
        "tied": dict(manifest.tied),
        "files": None,
        "beside": {name: record and _encode_record(record) for name, record in manifest.beside.items()},
        **{name: getattr(manifest, name) for name in _VALUES},
    }
    if manifest.generation:
        fields["generation"] = manifest.generation
    # The checksums of a large model take many megabytes. One growing buffer holds them once, and `json.dumps` of all
    # fields together would hold them several times.
    data = bytearray(_HEAD_SIZE)
    for name, value in fields.items():
        data += f",\n{json.dumps(name)}: ".encode()
        if name != "files":
            data += json.dumps(value, allow_nan=False).encode()
            continue
        data += b"{"
        for number, (file, record) in enumerate(manifest.files.items()):
            data += f"{', ' if number else ''}{json.dumps(file)}: {json.dumps(_encode_record(record))}".encode()
        data += b"}"
    data += b"}\n"
    with memoryview(data) as view:
        head = head_of(view[_HEAD_SIZE:])
    data[:_HEAD_SIZE] = head
    return bytes(data)


def decode_manifest(data: bytes) -> Manifest:
    """Read and check a manifest.

    Raises:
        CorruptError: A byte differs from the bytes that were written, or a field is invalid.
        CheckpointError: A later version wrote the manifest.
    """
    fields = parse_sealed(data, MANIFEST)
    # A later format may have other fields, so the format is checked first. The error then names the version to install
    # instead of reporting a corrupt file.
    if fields.get("format") != _FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {fields.get('format')!r}, and this version reads {_FORMAT}; install par-checkpoint "
            f"{fields.get('par_checkpoint')} or later"
        )
    # Only checkpoints on object stores have one.
    generation = fields.pop("generation", "")
    if set(fields) != _FIELDS:
        raise corrupt(MANIFEST, f"has not exactly its fields: {sorted(set(fields) ^ _FIELDS)}")
    if generation != "" and not (isinstance(generation, str) and GENERATION.fullmatch(generation)):
        raise corrupt(MANIFEST, f"generation {generation!r:.40} is no name of one")
    step, style, files, version = fields["step"], fields["style"], fields["files"], fields["par_checkpoint"]
    if not isinstance(style, str) or not isinstance(version, str):
        raise corrupt(MANIFEST, f"style {style!r:.40} or version {version!r:.40} is no text")
    if not (step is None or type(step) is int) or not isinstance(files, dict):
        raise corrupt(MANIFEST, f"step {step!r:.40} is no whole number, or its files are no mapping")
    return Manifest(
        style=style,
        step=step,
        files=_files(files),
        tied=_tied(fields["tied"]),
        beside=_beside(fields["beside"]),
        version=version,
        generation=generation,
        **{name: fields[name] for name in _VALUES},
    )


def check_optimizer(optimizer: object) -> None:
    """Check that the entry of an optimizer in a manifest has the structure that a save writes.

    Raises:
        CorruptError: It has another one.
    """
    if not isinstance(optimizer, dict) or set(optimizer) - {"own"} != {"groups", "slots"}:
        raise corrupt(MANIFEST, f"optimizer is {optimizer!r:.80}, not groups and slots")
    groups, slots = optimizer["groups"], optimizer["slots"]
    if not isinstance(groups, list) or not isinstance(slots, dict):
        raise corrupt(MANIFEST, f"optimizer has {groups!r:.40} as groups, or {slots!r:.40} as slots")
    for group in groups:
        if not isinstance(group, dict) or set(group) != {"params", "options"}:
            raise corrupt(MANIFEST, f"optimizer has the group {group!r:.80}, not params and options")
        names = group["params"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise corrupt(MANIFEST, f"optimizer has a group of {names!r:.80}, not of names")


def head_of(rest: bytes | memoryview) -> bytes:
    """Return the beginning of a sealed JSON object, which contains the checksum of all bytes after it."""
    return _HEAD % crc32c(rest)


def parse_sealed(data: bytes, file: str) -> dict[str, object]:
    """Read a JSON object that begins with `head_of` the rest of its bytes.

    Raises:
        CorruptError: A byte differs from the bytes that were written. The message names `file`.
    """
    if data[:_HEAD_SIZE] != head_of(data[_HEAD_SIZE:]):
        raise corrupt(file, "does not match its own checksum")
    return parse_object(data, file)


def generation_in(data: bytes) -> str | None:
    """Return the generation that the bytes of a manifest name: "" without one, None if the manifest is corrupt."""
    try:
        return decode_manifest(data).generation if data else ""
    except CheckpointError:
        return None


def beside_in(data: bytes) -> set[str]:
    """Return the names in the `beside` of a manifest, or an empty set if the manifest is corrupt."""
    try:
        return set(decode_manifest(data).beside)
    except CheckpointError:
        return set()


def record_of(data: bytes, block: int) -> FileRecord:
    """Return the record of a file that is not in safetensors.

    Args:
        data: All bytes of the file.
        block: Bytes of a block.
    """
    crcs = tuple(crc32c(data[begin:end]) for begin, end in block_ranges(len(data), 0, block))
    return FileRecord(size=len(data), data_begin=0, header_crc=0, block=block, crcs=crcs)


def block_ranges(size: int, data_begin: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the end of each block of a file.

    Args:
        size: Bytes of the file.
        data_begin: First byte of the first block.
        block: Bytes of a block; the last one may be shorter.
    """
    return ((begin, min(begin + block, size)) for begin in range(data_begin, size, block))


def _encode_record(record: FileRecord) -> dict[str, object]:
    return {
        "size": record.size,
        "data_begin": record.data_begin,
        "header_crc": f"{record.header_crc:08x}",
        "block": record.block,
        "crcs": big_endian(array("I", record.crcs)).tobytes().hex(),
    }


def _files(value: Mapping[str, object]) -> dict[str, FileRecord]:
    for name in value:
        if not is_base_name(name.removeprefix(OPTIMIZER)):
            raise corrupt(f"{MANIFEST}, file {name!r:.80}", "is no plain name in the folder or in its optimizer/")
    return {name: _decode_record(name, record) for name, record in value.items()}


def _decode_record(name: str, value: object) -> FileRecord:
    where = f"{MANIFEST}, file {name!r:.80}"
    if not isinstance(value, dict) or sorted(value) != ["block", "crcs", "data_begin", "header_crc", "size"]:
        raise corrupt(where, f"{value!r:.80} is no record of a file")
    size, data_begin, block = value["size"], value["data_begin"], value["block"]
    if not (is_count(size) and is_count(data_begin) and is_count(block)):
        raise corrupt(
            where, f"size {size!r:.40}, data_begin {data_begin!r:.40}, block {block!r:.40}: not all are counts"
        )
    if block < 1 or data_begin > min(size, MAX_HEADER + 8) or max(size, block) > _MOST:
        raise corrupt(where, f"blocks of {block} bytes from {data_begin} on do not fit a file of {size}")
    crcs, header_crc = _checksums(value["crcs"], where), _checksums(value["header_crc"], where)
    if len(crcs) != -(-(size - data_begin) // block) or len(header_crc) != 1:
        raise corrupt(
            where, f"has {len(crcs)} checksums of blocks of {block} bytes for {size - data_begin} bytes of data"
        )
    return FileRecord(size=size, data_begin=data_begin, header_crc=header_crc[0], block=block, crcs=crcs)


def _checksums(text: object, where: str) -> "array[int]":
    if not isinstance(text, str) or len(text) % 8 or _HEX.fullmatch(text) is None:
        raise corrupt(where, f"{text!r:.40} is no row of checksums")
    return big_endian(array("I", bytes.fromhex(text)))


def big_endian(numbers: "array[int]") -> "array[int]":
    """Swap the bytes of each number on a little-endian machine, because files are big-endian; and back."""
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _tied(value: object) -> dict[str, str]:
    tied = text_map(value, f"{MANIFEST}, tied")
    for name, stored in tied.items():
        # A chain of ties might never end in a stored tensor.
        if stored in tied:
            raise corrupt(MANIFEST, f"ties {name!r} to {stored!r}, which is itself not stored")
    return tied


def _beside(value: object) -> dict[str, FileRecord | None]:
    if isinstance(value, list) and all(isinstance(name, str) and is_base_name(name) for name in value):
        return dict.fromkeys(value)  # an earlier version has recorded only the names
    if not isinstance(value, dict):
        raise corrupt(MANIFEST, f"beside is {value!r:.80}, neither a mapping nor a list of plain names")
    for name in value:
        if not is_base_name(name.removeprefix(TEMPLATES)):
            raise corrupt(MANIFEST, f"beside has {name!r:.80}, which is no plain name in the folder or in {TEMPLATES}")
    return {name: None if each is None else _decode_record(name, each) for name, each in value.items()}


def index_of(stem: str) -> str:
    """Return the name of the index for files whose names begin with a stem."""
    return f"{stem}.safetensors.index.json"


def encode_index(weight_map: Mapping[str, str], total_size: int, total_parameters: int) -> bytes:
    """Return the bytes of an index as transformers writes it.

    Args:
        weight_map: File name of each tensor, by the tensor's name.
        total_size: Bytes of all tensors together.
        total_parameters: Number of elements of all tensors together.
    """
    metadata = {"total_parameters": total_parameters, "total_size": total_size}
    index = {"metadata": metadata, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def decode_index(data: bytes, file: str) -> dict[str, str]:
    """Read and check an index.

    Args:
        data: Bytes of the index.
        file: Name of the index, for messages.

    Returns:
        File name of each tensor, by the tensor's name. All files are in the folder of the index.

    Raises:
        CorruptError: The bytes are not an index, or it names a file in another folder.
    """
    index = parse_object(data, file)
    if "weight_map" not in index:
        raise corrupt(file, f"has no weight_map, only {sorted(index)!r:.80}")
    weight_map = text_map(index["weight_map"], f"{file}, weight_map")
    # An index comes from strangers. A name such as "../../secret" would make a load read outside of the folder.
    for name in dict.fromkeys(weight_map.values()):
        if not is_base_name(name):
            raise corrupt(file, f"names the file {name!r:.80}, but only plain names in the same folder are opened")
    return weight_map


def is_base_name(name: str) -> bool:
    """Return whether a name can only refer to a visible file directly in a folder."""
    return name.isprintable() and not name.startswith(".") and not set(name) & {"/", "\\"} and name != ""
