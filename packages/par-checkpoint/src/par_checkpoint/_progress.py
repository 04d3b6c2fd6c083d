"""A progress bar on rank 0, where somebody looks."""

import sys
import threading
from types import TracebackType
from typing import Any


class ProgressBar:
    """Shows the bytes that this rank has written or read, as its share of all.

    Args:
        what: "save" or "load".
        total: Bytes of the whole checkpoint.
        rank: This rank's number. Rank 0 shows its own progress, which is close to that of the other ranks.
        size: Number of ranks that take part.
        wanted: Whether to show a bar; None: if stderr is a terminal and tqdm is installed.
    """

    def __init__(self, what: str, total: int, rank: int, size: int, wanted: bool | None) -> None:
        self._lock = threading.Lock()  # the threads that write move the bar themselves
        self._bar: Any = None
        shown = sys.stderr.isatty() if wanted is None else wanted
        if rank == 0 and shown and (tqdm := _tqdm()) is not None:
            # The bar shows this rank's part of the bytes, because a common bar would need messages.
            self._bar = tqdm(total=total // size, desc=what, unit="B", unit_scale=True, leave=False)

    def add(self, count: int) -> None:
        """Move the bar by some bytes."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(count)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def check_progress(wanted: bool | None) -> None:
    """Raise ImportError if a bar is wanted, but tqdm is not installed."""
    if wanted and _tqdm() is None:
        raise ImportError("progress=True needs tqdm, which is not installed: pip install tqdm")


def _tqdm() -> Any:
    try:
        from tqdm import tqdm  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    return tqdm
