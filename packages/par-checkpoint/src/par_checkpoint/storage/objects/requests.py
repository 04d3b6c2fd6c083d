"""Number and kinds of the requests of a save to S3 and of a load from there, and their bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...format.manifest import FileRecord
from ..files import REACH

PAGE = 1000
"""Objects or parts in one answer that lists them, and in one order to delete some."""


@dataclass(frozen=True)
class Requests:
    """Requests of a save or a load to a store, of all ranks together.

    Args:
        by_kind: The number of requests of each kind, by S3's name for it.
        data: Bytes of the files that are sent or received; headers, indexes and side files count, manifests do not.
    """

    by_kind: Mapping[str, int]
    data: int


def save_requests(
    files: Mapping[str, FileRecord], *, beside: int = 0, model: bool = True, before: int = 0, replaced: int = 0
) -> Requests:
    """Return the requests of a save, by any number of ranks.

    Args:
        files: Files of the checkpoint, as its manifest names them.
        beside: Number of files without checksums: config, tokenizer and similar files.
        model: Whether the checkpoint has files of a model, so that the target gets an index for transformers.
        before: Number of objects in the target when the save begins.
        replaced: Number of these objects that belong to the replaced checkpoint; 0: none is replaced.
    """
    parts = [part_count(record) for record in files.values()]
    several = [count for count in parts if count > 1]
    counts = {
        "ListObjectsV2": _pages(before) + _pages(before + len(files) + beside),
        "GetObject": 1 if replaced else 0,  # the manifest; later the list tells that it is the same
        "ListMultipartUploads": 1,
        "CreateMultipartUpload": len(several),
        "UploadPart": sum(several),
        "ListParts": sum(map(_pages, several)),
        "CompleteMultipartUpload": len(several),
        "PutObject": len(parts) - len(several) + 2 * (beside + model) + 1,
        "DeleteObjects": -(-replaced // PAGE),
    }
    return Requests(
        {kind: count for kind, count in counts.items() if count}, sum(record.size for record in files.values())
    )


def load_requests(files: Mapping[str, FileRecord], *, window: int = REACH, objects: int = 0) -> Requests:
    """Return the requests of a load of everything, by ranks that all need all of it, or that each need some columns.

    Args:
        files: The files of the checkpoint, as its manifest names them.
        window: Bytes of a range that is asked for at a time, see `transfer.read.window_of`.
        objects: The number of objects in the target.
    """
    data = [record for record in files.values() if record.data_begin]
    ranges = sum(-(-(record.size - record.data_begin) // window) for record in data)
    small = len(files) - len(data)
    return Requests(
        {"GetObject": 1 + small + len(data) + ranges, "ListObjectsV2": _pages(objects)},
        sum(record.size for record in files.values()),
    )


def part_count(record: FileRecord) -> int:
    """Return the number of parts of a file; a file of one part is written by one request."""
    return max(1, -(-(record.size - record.data_begin) // record.block)) if record.data_begin else 1


def _pages(count: int) -> int:
    return max(1, -(-count // PAGE))
