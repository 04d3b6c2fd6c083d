"""The shard of a checkpoint on one host: its blocks at their offsets in the full files, and the files of all shards.

    /dev/shm/run/step-100/part-00000-of-00002/
        model.safetensors.part         header and size of the full file, with data only in this part's blocks
        par_checkpoint.json.part       the manifest of the full checkpoint; every part has it, and the other small files
        par_checkpoint.part.json       number of the part and of the save, its host, and the part of each block

The blocks of other parts are zeros here. Therefore no file has a name that Transformers or a load would take for a full
file. A copy of a part on another host has the same bytes, except for the name of its host.
"""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from .._errors import CheckpointError, CorruptError, corrupt
from ..format.manifest import MANIFEST, Manifest, big_endian, decode_manifest, head_of, parse_sealed
from ..format.strict_json import is_count

RECORD = "par_checkpoint.part.json"
SUFFIX = ".part"

_FORMAT = 1
_FIELDS = {"checksum", "format", "part", "keeper", "written", "nonce", "hosts", "manifest", "homes"}
_NAME = re.compile("part-([0-9]{5,})-of-([0-9]{5,})")


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """Record of a shard.

    Args:
        part: Number of the part.
        keeper: Number of the host that stores it; it equals `part` except for a copy.
        written: Time of the save's commit in nanoseconds, by the first rank's clock; if the clock was set back, one
            more than the previous save under this name.
        nonce: Nonce of the save.
        hosts: Names of the hosts, by number of the part that each host wrote.
        manifest: crc32c of the manifest's bytes.
        homes: Part of each block, by name of the file.
    """

    part: int
    keeper: int
    written: int
    nonce: str
    hosts: tuple[str, ...]
    manifest: int
    homes: Mapping[str, Sequence[int]]

    @property
    def save(self) -> tuple[int, str]:
        """Save of the part; a later save is greater."""
        return self.written, self.nonce


def part_name(part: int, count: int) -> str:
    """Return the name of the folder of a part."""
    return f"part-{part:05d}-of-{count:05d}"


def part_of(name: str) -> tuple[int, int] | None:
    """Return the number of the part with a folder's name, and the count of parts; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def encode_part(record: PartRecord) -> bytes:
    """Return the bytes of a part's record."""
    fields = {
        "format": _FORMAT,
        "part": record.part,
        "keeper": record.keeper,
        "written": record.written,
        "nonce": record.nonce,
        "hosts": list(record.hosts),
        "manifest": record.manifest,
        "homes": {name: big_endian(array("H", homes)).tobytes().hex() for name, homes in record.homes.items()},
    }
    # The checksum comes first in the JSON object, so the other fields begin with a comma.
    data = b", " + json.dumps(fields).encode()[1:] + b"\n"
    return head_of(data) + data


def decode_part(data: bytes, where: str) -> PartRecord:
    """Read and check a part's record.

    Args:
        data: Bytes of the record.
        where: Name of the record, for messages.

    Raises:
        CorruptError: The record differs from what was written.
        CheckpointError: A later version wrote it.
    """
    fields = parse_sealed(data, where)
    # A later format may have other fields, so the format is checked first.
    if fields.get("format") != _FORMAT:
        raise CheckpointError(
            f"{where} has format {fields.get('format')!r}, and this version reads {_FORMAT}; install a later one"
        )
    part, keeper, written, nonce = (fields.get(name) for name in ("part", "keeper", "written", "nonce"))
    hosts, homes = fields.get("hosts"), fields.get("homes")
    if (
        set(fields) != _FIELDS
        or not all(map(is_count, (part, keeper, written, fields["manifest"])))
        or not isinstance(nonce, str)
        or not (isinstance(hosts, list) and all(isinstance(host, str) for host in hosts))
        or max(part, keeper) >= len(hosts)  # type: ignore[call-overload]
        or not isinstance(homes, dict)
    ):
        raise corrupt(where, "is no record of a part")
    decoded = {name: _decode_homes(text, len(hosts), where) for name, text in homes.items()}
    return PartRecord(
        part=part,  # type: ignore[arg-type]
        keeper=keeper,  # type: ignore[arg-type]
        written=written,  # type: ignore[arg-type]
        nonce=nonce,
        hosts=tuple(hosts),
        manifest=fields["manifest"],  # type: ignore[arg-type]
        homes=decoded,
    )


def read_part(folder: Path) -> tuple[PartRecord, Manifest]:
    """Read the record of a complete shard, and the manifest of the checkpoint.

    Raises:
        CorruptError: A file is missing, truncated or not what was written.
        CheckpointError: A later version wrote it.
    """
    try:
        record = decode_part((folder / RECORD).read_bytes(), str(folder / RECORD))
        data = (folder / f"{MANIFEST}{SUFFIX}").read_bytes()
        # The record knows its manifest by the checksum, so that files of two saves are never taken for one part.
        if crc32c(data) != record.manifest:
            raise corrupt(f"{folder}/{MANIFEST}{SUFFIX}", "is not the manifest of this part's save")
        manifest = decode_manifest(data)
        for name, file in manifest.files.items():
            size = (folder / f"{name}{SUFFIX}").stat().st_size
            if size != file.size:
                raise corrupt(f"{folder}/{name}{SUFFIX}", f"has {size} bytes, but {file.size} were written")
    except FileNotFoundError as error:
        raise CorruptError(f"{error.filename} is missing: the part is not whole") from error
    if part_of(folder.name) != (record.part, len(record.hosts)):
        raise corrupt(str(folder / RECORD), f"is of part {record.part} of {len(record.hosts)}")
    return record, manifest


def _decode_homes(text: object, parts: int, where: str) -> "array[int]":
    if not isinstance(text, str) or len(text) % 4 or re.fullmatch("[0-9a-f]*", text) is None:
        raise corrupt(where, f"{text!r:.40} is no row of parts")
    homes = big_endian(array("H", bytes.fromhex(text)))
    if homes and max(homes) >= parts:
        raise corrupt(where, f"names part {max(homes)} of {parts}")
    return homes
