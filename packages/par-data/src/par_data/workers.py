"""Workers of data loaders outlive the signals that ask a run to leave, so that it can finish its step and save.

torchrun, `timeout`, scancel and a terminal send a signal to all processes of a job. A worker would die of it, and torch
would raise that in the middle of the step. While this process catches the signals itself, its workers ignore them:

    fork, spawn     a worker starts with the signals blocked, sets handlers that ignore them, and opens itself to them
    forkserver      the same; the server gets such handlers by a module that it imports at its start
    spawn, forkserver   multiprocessing's tracker of resources starts with the signals blocked, and stays so

A worker still ends when this process terminates it, which it does with SIGTERM: by then it catches no signals any more,
and the worker reads that from memory that both share.
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

from ._torch_private import preload_forkserver


class WorkerSignals:
    """Whether this process catches the signals, for the workers that it starts in the meantime."""

    def __init__(self) -> None:
        self._caught = RawValue(c_bool, False)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Inside, this process catches the signals itself: workers that start here ignore them."""
        self._caught.value = True
        try:
            yield
        finally:
            self._caught.value = False

    @contextmanager
    def starting(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Inside, `iter(loader)` starts workers that ignore the signals, if this process catches them now."""
        if not (self._caught.value and loader.num_workers):
            yield
            return
        method = (loader.multiprocessing_context or multiprocessing).get_start_method()
        if method != "fork":
            with block_stop_signals():  # one of its own, as this opens the thread to SIGTERM and SIGINT again
                resource_tracker.ensure_running()
        if method == "forkserver":
            preload_forkserver("par_data._forkserver")
        before = loader.worker_init_fn
        loader.worker_init_fn = partial(_begin, before, self._caught)
        try:
            with block_stop_signals():
                yield
        finally:
            loader.worker_init_fn = before


def _begin(user: Callable[[int], None] | None, caught: Any, worker: int) -> None:
    """The beginning of a worker."""
    for number in STOP_SIGNALS:
        signal.signal(number, partial(_ignore, caught))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if user is not None:
        user(worker)


def _ignore(caught: Any, number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's signature
    if not caught.value:
        # As torch's own handler does, which this one replaces: with another code the loader would report a failure.
        os._exit(0)
