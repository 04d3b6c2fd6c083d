"""SIGQUIT, received by a thread although the main thread is stuck."""

import os
import select
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any


class QuitSignal:
    """A pipe that receives one byte for each signal of the process.

    Python runs signal handlers in the main thread between two bytecodes, so a main thread that is stuck in C code never
    runs them. The C code of `signal.set_wakeup_fd` writes a byte to the pipe in any case.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        # A signal handler must never block, and Python refuses a descriptor that could.
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._before: tuple[Any, int] | None = None
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in this thread only

            def handler(number: int, frame: FrameType | None) -> None:
                """Do nothing: the byte in the pipe is what counts, and the default handler would end the process."""

            before = signal.signal(signal.SIGQUIT, handler)
            self._before = before, signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bool:
        """Wait for a signal and return whether SIGQUIT has arrived.

        Args:
            seconds: Longest time to wait.
        """
        ready, _, _ = select.select([self._read_end], [], [], seconds)
        received = b""
        if ready:
            with suppress(BlockingIOError):
                received = os.read(self._read_end, 4096)
        if received and self._before is not None and self._before[1] >= 0:
            os.write(self._before[1], received)  # the program's own event loop waits for these bytes
        return signal.SIGQUIT in received

    def wake(self) -> None:
        """End a running `wait`."""
        os.write(self._write_end, b"\0")

    def restore(self) -> None:
        """Put the previous handler back."""
        if self._before is not None:
            handler, descriptor = self._before
            signal.signal(signal.SIGQUIT, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(descriptor)
            self._before = None

    def close(self) -> None:
        """Close the pipe, after the last `wait` has returned."""
        os.close(self._read_end)
        os.close(self._write_end)
