"""Makes a process cheap to fork: its memory in pages of 2 MB, so that a fork copies few entries of the page table.

A forkserver that has imported torch holds some 300 MB, 75,000 pages of 4 KB. A fork copies an entry for each, and the
end of the fork takes them away again, which together was a quarter of what a rank with a small test took of a core.
"""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

HUGE = 2**21
"""Bytes of a huge page."""

_MADV_COLLAPSE = 25  # from <linux/mman.h>, since Linux 6.1


def collapse_into_huge_pages() -> int:
    """Asks the kernel to put this process's own memory into huge pages; where it cannot, memory stays as it is.

    A fork that writes to such a page gets a copy of 4 KB of it, as from a small one.

    Returns:
        The number of pages of 2 MB that were made, 0 where the kernel knows no such request.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    pages = (ctypes.c_void_p(start) for start in _pages_of_own_memory(Path("/proc/self/maps").read_text()))
    return sum(libc.madvise(page, ctypes.c_size_t(HUGE), _MADV_COLLAPSE) == 0 for page in pages)


def _pages_of_own_memory(maps: str) -> Iterator[int]:
    """The addresses of the huge pages that fit into writable memory without a file: the heap, and what was mapped."""
    for line in maps.splitlines():
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        if access.startswith("rw") and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield from range(-(-start // HUGE) * HUGE, end // HUGE * HUGE, HUGE)
