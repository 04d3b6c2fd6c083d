"""A scratch file on a disk: threads read and write it without the page cache, and tensors map it for all other code.

Linux keeps mapped pages and direct reads and writes of one file coherent, so both may be used on the same bytes.
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
"""Bytes of one read or write call. Two threads with calls of this size reach a disk's transfer rate."""

_STACK = 2**18
"""Bytes of a thread's stack. The default of 8 MiB would count against a memory limit of the process."""

_IN_MEMORY = ("tmpfs", "ramfs")


class DiskHandle:
    """Handle of reads or writes in progress.

    Args:
        futures: The futures of the read or write calls.
    """

    def __init__(self, futures: Iterable[Future[None]] = ()) -> None:
        self._futures = tuple(futures)

    def __add__(self, other: "DiskHandle") -> "DiskHandle":
        """Return a handle that is over when both handles are over."""
        return DiskHandle((*self._futures, *other._futures))

    def wait(self) -> None:
        """Wait until all bytes are read or written.

        Raises:
            OSError: A read or write failed.
        """
        error = self.error()
        if error is not None:
            raise error

    def is_over(self) -> bool:
        """Return whether all calls have ended, with or without an error."""
        return all(future.done() for future in self._futures)

    def error(self) -> BaseException | None:
        """Wait until all calls have ended, and return their first error, or None."""
        errors = [future.exception() for future in self._futures]
        return next((error for error in errors if error is not None), None)


class Disk:
    """A file without a name, in a folder on a disk. It disappears with the process, however that ends.

    Args:
        folder: The folder.
        size: Number of bytes.
        threads: Number of threads that read, and of threads that write.

    Raises:
        ValueError: The folder does not exist or is in memory, or its disk has too little free space.
        OSError: The file cannot be created.
    """

    def __init__(self, folder: str, size: int, threads: int) -> None:
        self.folder = folder
        size = max(pages(size), PAGE)
        check_room(folder, size)
        self._file = _open(folder)
        finalize(self, os.close, self._file)
        try:
            # A full disk is an error here, and not in the middle of a step.
            os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise _too_small(folder, size) from error
        # A write of a part of a page is not possible without the cache, so the file is open in both ways.
        self._cached = _open_again(self._file)
        self._is_direct = self._cached is not None and _make_direct(self._file)
        if self._cached is not None:
            finalize(self, os.close, self._cached)
        self._memory = mmap.mmap(self._file, size)
        # Two pools, because reads that a step waits for would queue behind writes that nobody waits for.
        self._readers, self._writers = (start_threads(threads) for _ in range(2))

    def tensor(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return a tensor of `count` elements that begins at byte `start` and shares memory with the file."""
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)

    def read(self, start: int, into: memoryview, after: DiskHandle | None = None) -> DiskHandle:
        """Start to read.

        Args:
            start: First byte in the file, a multiple of 4096.
            into: Page-aligned memory of a multiple of 4096 bytes.
            after: Writes from the same memory, which must end first. If they fail, nothing is read, so that the memory
                still holds what could not be written.
        """

        def call(offset: int, part: memoryview) -> None:
            # Writes have threads of their own, so this wait cannot keep them from ending.
            if after is None or after.error() is None:
                _whole(os.preadv, self._file, part, offset)
                self._forget(offset, len(part))

        return _begin(self._readers, call, start, into)

    def write(self, start: int, source: memoryview) -> DiskHandle:
        """Start to write.

        Args:
            start: First byte in the file.
            source: Memory whose offset within a page is the same as that of `start`.
        """

        def call(offset: int, part: memoryview) -> None:
            _whole(os.pwritev, self._file, part, offset)
            self._forget(offset, len(part))

        def call_for_edge(offset: int, part: memoryview) -> None:
            _whole(os.pwritev, self._file if self._cached is None else self._cached, part, offset)

        # Neighbours may write the other part of the first and of the last page, and the cache merges the parts.
        first = min(-start % PAGE, len(source))
        last = max(first, len(source) - (start + len(source)) % PAGE)
        writes = _begin(self._writers, call, start + first, source[first:last])
        for begin, end in ((0, first), (last, len(source))):
            writes += _begin(self._writers, call_for_edge, start + begin, source[begin:end])
        return writes

    def _forget(self, start: int, size: int) -> None:
        """Ask the kernel not to cache bytes, if the file system has no direct access."""
        if not self._is_direct:
            os.posix_fadvise(self._file, start, size, os.POSIX_FADV_DONTNEED)


def tensors_in(disk: Disk, block: StateBlock) -> dict[str, torch.Tensor]:
    """Return tensors that share memory with the file, by slot of a block."""
    return {slot.name: disk.tensor(block.start + slot.start, slot.dtype, slot.count) for slot in block.slots}


def check_room(folder: str, size: int) -> None:
    """Check that a folder is on a disk with `size` free bytes.

    Raises:
        ValueError: It is not.
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
    """Return the file system of a folder, such as "ext4"; "" if the kernel does not list file systems."""
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
    """Return the descriptor of a new file without a name."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
    # File systems without O_TMPFILE, such as NFS: the name exists for a moment.
    number, name = tempfile.mkstemp(dir=folder, prefix=".par-zero-")
    os.unlink(name)  # noqa: PTH108 - beside the file's number
    return number


def _open_again(file: int) -> int | None:
    """Return another descriptor of an open file, which keeps using the page cache; None if the kernel has none."""
    place = Path(f"/proc/self/fd/{file}")
    return os.open(place, os.O_RDWR | os.O_CLOEXEC) if place.exists() else None


def _make_direct(file: int) -> bool:
    """Bypass the page cache for a descriptor, and return whether its file system supports that."""
    import fcntl  # noqa: PLC0415 - Windows has none, and imports this package for its arithmetic

    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        # Some file systems accept the flag and reject the first read, so one page is read.
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct)
        os.preadv(file, [StagingBuffer(PAGE).bytes], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return bool(direct)


def start_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool whose threads run already, with small stacks."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="par-zero-disk")
    # The stack size is a setting of the process, so all threads start before it is restored.
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
    """Start the calls of one read or write."""
    return DiskHandle(
        [pool.submit(call, start + first, memory[first : first + _CALL]) for first in range(0, len(memory), _CALL)]
    )


def _whole(move: Callable[[int, Sequence[Any], int], int], file: int, memory: memoryview, start: int) -> None:
    """Read or write all bytes."""
    done = 0
    # One call of the kernel may transfer fewer bytes than asked for, such as after a signal.
    while done < len(memory):
        count = move(file, [memory[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends too early")
        done += count
