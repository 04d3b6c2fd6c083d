"""Data loader workers that survive the stop signals, so that a job can finish its step and save.

torchrun, `timeout`, scancel and a terminal send a signal to every process of a job. A worker would die of it, and torch
would raise that in the middle of the step. While this process handles the signals, its workers ignore them.

- A worker starts with the signals blocked, installs handlers that ignore them, and unblocks them.
- The server of the start method "forkserver" imports a module that installs such handlers.
- multiprocessing's resource tracker ("spawn" and "forkserver") starts with the signals blocked, and keeps them blocked.

A worker still ends when this process terminates it with SIGTERM. By then this process handles no signals any more, and
the worker reads that from memory that both share.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_bool
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from par_groups import STOP_SIGNALS, block_stop_signals

from .._torch_private import preload_forkserver


class WorkerSignals:
    """Whether this process handles the stop signals itself, shared with the workers that it starts."""

    def __init__(self) -> None:
        self._caught = RawValue(c_bool, False)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Mark the signals as handled by this process: workers that start inside ignore them."""
        self._caught.value = True
        try:
            yield
        finally:
            self._caught.value = False

    @contextmanager
    def starting(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Let `iter(loader)` start workers that ignore the signals, if this process handles them now."""
        if not (self._caught.value and loader.num_workers):
            yield
            return
        method = (loader.multiprocessing_context or multiprocessing).get_start_method()
        if method != "fork":
            # In a block of its own: starting the tracker unblocks SIGTERM and SIGINT in this thread again.
            with block_stop_signals():
                resource_tracker.ensure_running()
        if method == "forkserver":
            preload_forkserver("par_data._forkserver")
        # Restored afterwards: the loader may be the user's, and later iterations may need no handlers.
        before = loader.worker_init_fn
        loader.worker_init_fn = partial(_ignore_signals, before, self._caught)
        try:
            with block_stop_signals():
                yield
        finally:
            loader.worker_init_fn = before


def _ignore_signals(user: Callable[[int], None] | None, caught: Any, worker: int) -> None:
    """Initialize a worker: ignore the signals, then call the user's own function."""
    for number in STOP_SIGNALS:
        signal.signal(number, partial(_ignore, caught))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if user is not None:
        user(worker)


def _ignore(caught: Any, number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's signature
    if not caught.value:
        # Torch's own handler, which this one replaces, exits with 0. The loader would report any other code as a
        # failure of the worker.
        os._exit(0)
