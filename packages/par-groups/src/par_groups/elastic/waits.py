"""Waits for gloo that end with the epoch of the group.

When a connection ends, gloo forgets the buffer of which it has sent or received a part, or which it has queued: its
`Pair::signalException` leaves out `tx_` and `rx_` (torch 2.11 to 2.13). The call of this buffer ends only with its
timeout. A rank that is lost within a large broadcast, all-to-all or message nearly always leaves such a call behind,
within a small one seldom. No function of torch ends it, so the wait has to end without it.
"""

import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist

from .._torch_private import is_message

_LOOK = timedelta(seconds=0.2)
"""Time between two looks whether the epoch has ended."""

_SHORTEST = timedelta(milliseconds=1)  # a timeout of 0 means none

_WITHOUT_END = timedelta(0)

_OWN_REFERENCES = 3
"""References of `free_groups` to a group that it looks at: the list, the name, and the argument of `getrefcount`."""

_Wait = Callable[[Any, timedelta], bool]


def let_waits_end(epoch: Callable[[], int | None]) -> None:
    """Let the waits for collectives and messages in this process raise an error once the epoch has ended.

    It replaces `torch.distributed.Work.wait`, because torch's own functions call it. While an epoch lasts, it behaves
    like torch's; a message costs some 20 us more. Waits within C++ are not replaced: those of DistributedDataParallel,
    of functional collectives and of futures.

    Args:
        epoch: Function that returns the number of the present epoch; None after its end.
    """
    wait, idle = dist.Work.wait, list[_MessageWaiter]()

    @wraps(wait)
    def wait_for(work: dist.Work, timeout: timedelta | float = _WITHOUT_END) -> bool:
        begun, span = epoch(), timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)

        def has_ended() -> bool:
            return begun is None or epoch() != begun

        if not is_message(work):
            return _wait_for_collective(wait, work, span, has_ended)
        waiter = idle.pop() if idle else _MessageWaiter(wait)
        try:
            return waiter.wait_for(work, span, has_ended)
        finally:
            if waiter.is_idle:  # and has not been left behind with a message
                idle.append(waiter)

    dist.Work.wait = wait_for  # type: ignore[method-assign, assignment]


def _wait_for_collective(wait: _Wait, work: dist.Work, timeout: timedelta, has_ended: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + timeout.total_seconds() if timeout else math.inf
    while True:
        left = deadline - time.monotonic()
        try:
            return wait(work, _LOOK if left > _LOOK.total_seconds() else max(timedelta(seconds=left), _SHORTEST))
        except RuntimeError:
            if work.is_completed():
                return wait(work, timeout)  # it has failed itself, or has ended a moment ago
            if time.monotonic() >= deadline:
                raise
            if has_ended():
                raise _left_error() from None


class _MessageWaiter:
    """A thread that waits for messages: gloo closes the connections if the wait for one has a timeout that ends.

    Args:
        wait: torch's function.

    Attributes:
        is_idle: Whether the thread waits for no message.
    """

    def __init__(self, wait: _Wait) -> None:
        self._wait, self.is_idle = wait, True
        self._asked: queue.SimpleQueue[tuple[dist.Work, timedelta]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[bool | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="par_groups-messages").start()

    def wait_for(self, work: dist.Work, timeout: timedelta, has_ended: Callable[[], bool]) -> bool:
        self.is_idle = False
        self._asked.put((work, timeout))
        while True:
            with suppress(queue.Empty):
                result = self._results.get(timeout=_LOOK.total_seconds())
                self.is_idle = True
                if isinstance(result, BaseException):
                    raise result
                return result
            if has_ended():
                raise _left_error()

    def _serve(self) -> None:
        while True:
            work, timeout = self._asked.get()
            try:
                self._results.put(self._wait(work, timeout))
            except BaseException as error:
                self._results.put(error)
            del work  # its buffer would stay until the next message


def _left_error() -> RuntimeError:
    return dist.DistNetworkError(
        "the epoch of this call has ended, because a rank is lost or this rank has left; call Members.form()"
    )


def free_groups(ended: "queue.SimpleQueue[list[dist.ProcessGroup]]") -> None:
    """Release groups that have ended, each one once nobody else refers to it. It never returns: it is a thread's work.

    The destructor of a gloo group waits for its calls, so the thread of the program must not be the last one that
    refers to it.

    Args:
        ended: Lists of groups, to which nobody else refers.
    """
    groups: list[dist.ProcessGroup] = []
    while True:
        with suppress(queue.Empty):
            groups += ended.get(timeout=1 if groups else None)
        free = [group for group in groups if sys.getrefcount(group) <= _OWN_REFERENCES]
        groups = [group for group in groups if not any(group is each for each in free)]
        while free:
            # One thread for each, as one destructor may take as long as the timeout of its group.
            last = threading.Thread(target=[free.pop()].clear, daemon=True, name="par_groups-group")
            try:
                last.start()
            except RuntimeError:  # the interpreter ends, and the groups with it
                return
