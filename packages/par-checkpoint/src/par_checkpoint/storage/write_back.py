"""What is written begins its way to the disk at once, and leaves the page cache once it is there.

So fsync finds little left, a save needs few new pages, which may cost more time than the disk, and it pushes nobody
else's files out of memory.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable

_WORTH = 1 << 20
"""Bytes of a write that is worth the system calls."""
_UNDER_WAY = 16
"""Such writes to a file that may be on their way; the next one waits for the oldest."""
_WAIT_BEFORE, _WRITE = 1, 2
"""Flags of Linux' sync_file_range."""


class WriteBack:
    """Of one file; threads may tell of their writes at once. Elsewhere than on Linux it does nothing.

    Args:
        file: Its descriptor. What fails here is left for fsync to tell.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._sync = _sync_file_range()
        self._under_way: deque[tuple[int, int]] = deque()

    def wrote(self, begin: int, size: int) -> None:
        """Some bytes were written, in the units of pwrite."""
        if self._sync is None or size < _WORTH:
            return
        self._sync(self._file, begin, size, _WRITE)
        self._under_way.append((begin, size))
        if len(self._under_way) > _UNDER_WAY:
            begin, size = self._under_way.popleft()
            self._sync(self._file, begin, size, _WAIT_BEFORE)
            os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_DONTNEED)


def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call
