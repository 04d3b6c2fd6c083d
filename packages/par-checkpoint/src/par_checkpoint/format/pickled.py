"""Files of torch.save, which are never trusted more than `weights_only` asks for."""

import errno
import io
import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from crc32c import crc32c

from .._errors import CheckpointError, CorruptError, corrupt, corrupt_block
from .._torch_private import checkpoint_offset
from .bytes import other_kind
from .manifest import BLOCK, FileRecord

_SHARED = 8  # tensors that share a byte, at most, such as the three parts of a fused projection beside the whole
_ZIP = b"PK\x03\x04"


class ReadableFile(Protocol):
    """A file of `size` bytes that is read anywhere."""

    size: int

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fill the view with the bytes from `begin` on."""


def load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a model's file; those of a zip file stay on disk until they are touched.

    The extra state of modules, which may be anything, is left out.

    Args:
        path: A file of torch.save, of today or of before torch 1.6.

    Raises:
        CheckpointError: Something else than a flat dict of tensors, what weights_only refuses, or deflated data.
        CorruptError: A broken file.
    """
    tensors = flat_tensors(load_object(path), str(path))
    check_whole(tensors, str(path))
    return tensors


def flat_tensors(saved: object, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, without the extra state of modules.

    Args:
        saved: Content of a file.
        path: Name of the file, for messages.

    Raises:
        CheckpointError: The content is not a dict of tensors by name.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} holds a {type(saved).__name__}, not a dict of tensors; save model.state_dict()")
    tensors = {name: value for name, value in saved.items() if not is_extra_state(str(name))}
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} holds a {type(value).__name__} under {name!r:.80}, not a tensor under a name; load it with "
                "torch.load and save the state dict alone"
            )
    return tensors


def check_whole(tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Check that tensors need about as many bytes in memory as in the file.

    Without this check, a small file could contain a tensor that `expand` has enlarged to terabytes.

    Args:
        tensors: Content of the file, as `torch.load` returns it.
        path: The file's name, for messages.

    Raises:
        CheckpointError: A tensor is expanded or not dense, or many tensors share the same bytes.
    """
    views: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], int] = {}
    storages: dict[int, int] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(
                f"{path}: {name!r:.80} is {tensor.layout} on {tensor.device}, not a dense tensor with values; save it "
                "dense"
            )
        if tensor.is_conj() or tensor.is_neg():  # its bytes are not its values
            raise CheckpointError(
                f"{path}: {name!r:.80} is conjugated or negated lazily; save it after .resolve_conj().resolve_neg()"
            )
        size, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()
        if size > storage.nbytes():
            raise CheckpointError(
                f"{path}: {name!r:.80} is expanded, {size} bytes of which {storage.nbytes()} are stored; call "
                ".contiguous() on it before torch.save"
            )
        storages[storage.data_ptr()] = storage.nbytes()
        # Equal views count once, because tied weights share their bytes on purpose.
        views[storage.data_ptr(), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()] = size
    # Different views of one storage may be many. A factor leaves room for models that store slices of one tensor.
    if sum(views.values()) > _SHARED * sum(storages.values()):
        raise CheckpointError(
            f"{path}: its tensors are views that share {sum(storages.values())} bytes, and would take "
            f"{sum(views.values())}; call .clone() on them before torch.save"
        )


def is_extra_state(name: str) -> bool:
    """Return whether a state dict's key belongs to a module's `get_extra_state`."""
    return name == "_extra_state" or name.endswith("._extra_state")


def load_object(path: Path) -> object:
    """Load anything that torch.save wrote and weights_only permits.

    Args:
        path: A file of torch.save, of today or of before torch 1.6.

    Raises:
        CheckpointError: `weights_only` rejects the content, or the data is deflated.
        CorruptError: A broken file.
    """
    try:
        with path.open("rb") as file:
            first = file.read(8)
            zipped = first.startswith(_ZIP)
            _check_kind(first, str(path))
            if zipped:
                _check_stored(file, str(path))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
            raise
        raise corrupt(str(path), f"cannot be opened ({error.strerror})") from error
    return _load(path, str(path), map_location="cpu", mmap=zipped)


def load_bytes(data: bytes, path: str) -> object:
    """Load what torch.save wrote into some bytes, and weights_only permits.

    Raises:
        CheckpointError: `weights_only` rejects the content, or the data is deflated.
        CorruptError: Broken bytes.
    """
    _check_stored(io.BytesIO(data), path)
    return _load(io.BytesIO(data), path, map_location="cpu")


def load_outline(source: ReadableFile, record: FileRecord | None, path: str) -> object:
    """Load what torch.save wrote into a zip file with all tensors on the meta device: none of their data is read.

    Args:
        source: The file.
        record: Manifest record of the file, to check each block that is read. None: others have written it.
        path: The file's name, for messages.

    Raises:
        CheckpointError: `weights_only` rejects the content, or the data is deflated.
        CorruptError: A broken file.
    """
    if record is not None and record.data_begin:
        raise corrupt(path, f"has no header, but its data is said to begin at byte {record.data_begin}")
    file = _Checked(source, record, path)
    if record is None:
        _check_readable_in_place(file, path)
    else:
        _check_stored(file, path)
    file.seek(0)
    return _load(file, path, map_location="meta")


def place_of(tensor: torch.Tensor, size: int, path: str) -> tuple[int, int]:
    """Return the range of a tensor's data in its file.

    Args:
        tensor: A tensor that `load_outline` gave.
        size: Bytes of the file.
        path: The file's name, for messages.

    Returns:
        First byte, and one past the last.

    Raises:
        CheckpointError: Its elements do not follow each other there.
        CorruptError: It leaves the file.
    """
    width, shape = tensor.element_size(), tuple(tensor.shape)
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise CheckpointError(f"{path} holds a tensor of shape {shape} that is not contiguous; save it anew")
    begin = checkpoint_offset(tensor) + int(tensor.storage_offset()) * width
    end = begin + tensor.numel() * width
    # A tensor is mapped at this place, so it must be aligned and inside the file.
    if begin % width or end > size:
        raise corrupt(path, f"has a tensor of shape {shape} at bytes {begin} to {end} of {size}")
    return begin, end


class _Checked(io.RawIOBase):
    """A file for `torch.load`, whose blocks are checked as they are read; the last three stay in memory.

    Args:
        source: Reads the file.
        record: Manifest record of the file; None: no checksums exist.
        path: The file's name, for messages.
    """

    def __init__(self, source: ReadableFile, record: FileRecord | None, path: str) -> None:
        self._source, self._path = source, path
        self._size, self._length = (source.size, BLOCK) if record is None else (record.size, record.block)
        self._crcs = None if record is None else record.crcs
        self._at = 0
        self._blocks: dict[int, memoryview] = {}

    def readable(self) -> bool:
        """Return True, as torch requires."""
        return True

    def seekable(self) -> bool:
        """Return True, as torch requires."""
        return True

    def tell(self) -> int:
        """Return the offset of the byte that is read next."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another byte."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the next bytes, or with fewer at the end."""
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view) and self._at < self._size:
            number, begin = divmod(self._at, self._length)
            part = self._block(number)[begin : begin + len(view) - done]
            view[done : done + len(part)] = part
            self._at, done = self._at + len(part), done + len(part)
        return done

    def _block(self, number: int) -> memoryview:
        if number not in self._blocks:
            begin = number * self._length
            block = memoryview(bytearray(min(self._length, self._size - begin)))
            self._source.read_into(begin, block)
            if self._crcs is not None and crc32c(block) != self._crcs[number]:
                raise CorruptError(corrupt_block(self._path, number, begin, []))
            # torch reads the directory at the end, then jumps between headers and data, so a few blocks are kept.
            self._blocks = {**dict(list(self._blocks.items())[-2:]), number: block}
        return self._blocks[number]


def _load(file: Path | IO[bytes] | io.RawIOBase, path: str, **options: Any) -> object:
    try:
        return torch.load(cast("IO[bytes]", file), weights_only=True, **options)
    except (OSError, MemoryError, CorruptError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is broken, or would run code when loaded, which is refused; where you trust it, load it with "
            f"torch.load(weights_only=False) and save its tensors anew"
        ) from error
    except Exception as error:  # a broken pickle can fail in any way
        raise corrupt(path, f"cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def _check_kind(first: bytes, path: str) -> None:
    """Raise CorruptError if a file's first bytes show what came in the place of weights."""
    if len(first) == 8 and (kind := other_kind(first)) is not None:
        raise CorruptError(f"{path} is {kind}")


def _check_stored(file: IO[bytes] | io.RawIOBase, path: str) -> None:
    """Refuses what would be more in memory than on disk."""
    try:
        with zipfile.ZipFile(cast("IO[bytes]", file)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise corrupt(path, f"is a broken zip file ({error})") from error
    for entry in entries:
        # A compressed entry could expand to far more memory than the file has bytes.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(
                f"{path}: entry {entry.filename!r} is compressed, {entry.file_size} bytes in {entry.compress_size}, "
                "which torch.save never does; save it anew with torch.save where you trust it"
            )
    # Entries that overlap would multiply the bytes of the file in memory.
    if sum(entry.file_size for entry in entries) > file.seek(0, io.SEEK_END):
        raise CheckpointError(f"{path}: its entries overlap, which torch.save never does; do not trust it")


def _check_readable_in_place(file: io.RawIOBase, path: str) -> None:
    """Raise for files whose tensors are stored differently than in memory.

    These are compressed files, files from before torch 1.6, and files from machines with another byte order.
    """
    first = file.read(8)
    _check_kind(first, path)
    if not first.startswith(_ZIP):
        raise CheckpointError(
            f"{path} is no zip file, as torch.save writes it, and is read from local disks only; copy it here"
        )
    _check_stored(file, path)
    with zipfile.ZipFile(cast("IO[bytes]", file)) as archive:
        orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
    if any(order != sys.byteorder.encode() for order in orders):
        raise CheckpointError(f"{path} has another byte order, and is read from local disks only; copy it here")
