"""A scratch file on a disk: read and written past the kernel's cache, by threads, and mapped into memory for others.

The file has no name, so it is gone when the process is, however that ends. It has all of its room from the beginning: a
full disk is an error then, and not in the middle of a step. The kernel keeps what is mapped and what is read and
written directly alike.
"""

import errno
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from par_groups import format_bytes

from .pieces import PAGE, StateBlock, pages
from .staging import StagingBuffer

_CALL = 2**22
"""Bytes of a read or a write; two threads with such calls reach a disk's limit."""

_STACK = 2**18
"""Bytes of a thread's stack; by default it is 8 MiB, which a limit of memory would count."""

_IN_MEMORY = ("tmpfs", "ramfs")


class DiskHandle:
    """Handle of asynchronous reads or writes on a disk.

    Args:
        futures: The futures of the read or write calls.
    """

    def __init__(self, futures: Iterable[Future[None]] = ()) -> None:
        self._futures = tuple(futures)

    def __add__(self, other: "DiskHandle") -> "DiskHandle":
        """Return a handle that is over when both handles are over."""
        return DiskHandle((*self._futures, *other._futures))

    def wait(self) -> None:
        """Waits until all bytes are read or written.

        Raises:
            OSError: A read or write failed.
        """
        error = self.error()
        if error is not None:
            raise error

    def is_over(self) -> bool:
        """Whether all calls have ended, with or without an error."""
        return all(future.done() for future in self._futures)

    def error(self) -> BaseException | None:
        """Waits until all calls have ended, and returns their first error, or None."""
        errors = [future.exception() for future in self._futures]
        return next((error for error in errors if error is not None), None)


class Disk:
    """A file without a name, in a folder on a disk.

    Args:
        folder: The folder.
        size: Number of bytes, all of which get their room here.
        threads: Number of threads that read, and of threads that write. A pool for both would let reads wait behind
            writes.

    Raises:
        ValueError: The folder is none, is in memory, or its disk has too little room.
        OSError: The file cannot be made.
    """

    def __init__(self, folder: str, size: int, threads: int) -> None:
        self.folder = folder
        size = max(pages(size), PAGE)
        check_room(folder, size)
        self._file = _open(folder)
        finalize(self, os.close, self._file)
        try:
            os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise _too_small(folder, size) from error
        self._cached = _opened_again(self._file)
        self._is_direct = self._cached is not None and _make_direct(self._file)
        if self._cached is not None:
            finalize(self, os.close, self._cached)
        self._memory = mmap.mmap(self._file, size)
        self._readers, self._writers = (start_threads(threads) for _ in range(2))

    def tensor(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """(count) elements of the file, as a tensor with a storage of its own that lies in the file."""
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)

    def read(self, start: int, into: memoryview, after: DiskHandle | None = None) -> DiskHandle:
        """Begins to read.

        Args:
            start: First byte in the file, a multiple of 4096.
            into: Memory that begins on a page, of a multiple of 4096 bytes.
            after: What must be over before, as it uses that memory. Where it has failed, nothing is read.
        """

        def call(offset: int, part: memoryview) -> None:
            if after is None or after.error() is None:
                _whole(os.preadv, self._file, part, offset)
                self._forget(offset, len(part))

        return _begin(self._readers, call, start, into)

    def write(self, start: int, source: memoryview) -> DiskHandle:
        """Begins to write.

        A page of which others write a part goes through the kernel's cache, which puts the parts together.

        Args:
            start: First byte in the file.
            source: Memory whose place within a page is that of the bytes in the file.
        """

        def call(offset: int, part: memoryview) -> None:
            _whole(os.pwritev, self._file, part, offset)
            self._forget(offset, len(part))

        def call_for_edge(offset: int, part: memoryview) -> None:
            _whole(os.pwritev, self._file if self._cached is None else self._cached, part, offset)

        first = min(-start % PAGE, len(source))
        last = max(first, len(source) - (start + len(source)) % PAGE)
        writes = _begin(self._writers, call, start + first, source[first:last])
        for begin, end in ((0, first), (last, len(source))):
            writes += _begin(self._writers, call_for_edge, start + begin, source[begin:end])
        return writes

    def _forget(self, start: int, size: int) -> None:
        """Without direct access, asks the kernel not to keep a copy."""
        if not self._is_direct:
            os.posix_fadvise(self._file, start, size, os.POSIX_FADV_DONTNEED)


def tensors_in(disk: Disk, block: StateBlock) -> dict[str, torch.Tensor]:
    """By slot of a block, the tensor that lies in the file."""
    return {slot.name: disk.tensor(block.start + slot.start, slot.dtype, slot.count) for slot in block.slots}


def check_room(folder: str, size: int) -> None:
    """Checks that a folder lies on a disk that has that many bytes free.

    Raises:
        ValueError: It does not.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 - a text in every message
        raise ValueError(f"path {folder!r} is no folder; give a folder on a local disk")
    kind = _file_system(folder)
    if kind in _IN_MEMORY:
        raise ValueError(f"path {folder!r} is in memory ({kind}), so nothing would be saved; give a folder on a disk")
    if not hasattr(os, "posix_fallocate"):
        raise ValueError(
            f"offload folder {folder!r}: this system cannot reserve the bytes of a file; use Linux, or offload to the "
            "host's memory"
        )
    if shutil.disk_usage(folder).free < size:
        raise _too_small(folder, size)


def _too_small(folder: str, size: int) -> ValueError:
    free = shutil.disk_usage(folder).free
    return ValueError(
        f"the disk at {folder!r} has {format_bytes(free)} free and {format_bytes(size)} are needed; free some, or "
        "offload less"
    )


def _file_system(folder: str) -> str:
    """The file system that a folder lies on, such as "ext4"; empty where the kernel does not list them."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return ""
    device = Path(folder).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def _open(folder: str) -> int:
    """A file without a name. Where the file system makes none, one whose name is taken away at once."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
    number, name = tempfile.mkstemp(dir=folder, prefix=".par-zero-")
    os.unlink(name)  # noqa: PTH108 - beside the file's number
    return number


def _opened_again(file: int) -> int | None:
    """Another way into a file, which goes on through the kernel's cache; None where the kernel has none."""
    place = Path(f"/proc/self/fd/{file}")
    return os.open(place, os.O_RDWR | os.O_CLOEXEC) if place.exists() else None


def _make_direct(file: int) -> bool:
    """Has a file read and written past the kernel's cache; False where its file system has no such way (EINVAL)."""
    import fcntl  # noqa: PLC0415 - Windows has none, and imports this package for its arithmetic

    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct)
        os.preadv(file, [StagingBuffer(PAGE).bytes], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return bool(direct)


def start_threads(count: int) -> ThreadPoolExecutor:
    """A pool whose threads run already, with small stacks."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="par-zero-disk")
    before = threading.stack_size(_STACK)
    try:
        barrier = threading.Barrier(count + 1)
        for _ in range(count):
            pool.submit(barrier.wait)
        barrier.wait()
    finally:
        threading.stack_size(before)
    return pool


def _begin(
    pool: ThreadPoolExecutor, call: Callable[[int, memoryview], None], start: int, memory: memoryview
) -> DiskHandle:
    """Begins the calls of one read or write."""
    return DiskHandle(
        [pool.submit(call, start + first, memory[first : first + _CALL]) for first in range(0, len(memory), _CALL)]
    )


def _whole(move: Callable[[int, Sequence[Any], int], int], file: int, memory: memoryview, start: int) -> None:
    """Moves all bytes, of which one call of the kernel may move fewer."""
    done = 0
    while done < len(memory):
        count = move(file, [memory[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends too early")
        done += count
