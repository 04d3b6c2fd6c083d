"""Errors of one rank's disk, kept until all ranks raise them at the same place."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from par_groups import agree

from .._collectives import largest_of

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")
"""Parts of torch's messages where the host has no memory, ordinary or pinned."""


class DiskErrors:
    """Errors of a rank's disk.

    A disk fails on one rank, between collectives that the other ranks wait in. This rank therefore continues with NaN
    or with data in memory, and reports the error at the next place that all ranks reach.

    Args:
        folder: Folder of the file, for messages.
        groups: Process groups whose ranks raise together.
        device: Device of the all-reduces. On an accelerator, whose backend may have no CPU, the host waits for them.

    Attributes:
        on_lost: Called on all ranks before they raise, if any rank has computed with NaN.
    """

    def __init__(self, folder: str, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._folder, self._groups, self._device = folder, tuple(groups), device
        self.on_lost: Callable[[], None] = lambda: None
        self._error: Exception | None = None
        self._is_lost = False
        self._stopped: Exception | None = None

    def add_unread(self, error: BaseException) -> None:
        """Record that parameters or gradients could not be read, so that NaN was used in their place."""
        text = (
            f"parameters or gradients on the disk at {self._folder!r} cannot be read ({error}), so what was "
            "computed with them is NaN; load the latest checkpoint, and offload to another disk"
        )
        self._error, self._is_lost = OSError(getattr(error, "errno", None), text), True

    def add_unwritten(self, error: BaseException) -> None:
        """Record that data could not be written, and stays in memory."""
        text = (
            f"what was computed cannot be written to the disk at {self._folder!r} ({error}). It stays in memory, "
            "and nothing is lost; save a checkpoint, and offload to another disk"
        )
        self._error = self._error or OSError(getattr(error, "errno", None), text)  # a lost step is the worse news

    def add_stopped_step(self, error: Exception, *, is_late: bool) -> None:
        """Record that a step has stopped after some of its pieces.

        Args:
            error: Error of the disk or, in a thread, of the optimizer.
            is_late: Whether a thread has stopped, after the optimizer's own step had returned.
        """
        if isinstance(error, OSError):
            text = (
                f"what a step needs of the disk at {self._folder!r} cannot be read ({error}), so this "
                "step has stopped half-way; load the latest checkpoint, and offload to another disk"
            )
            error = OSError(error.errno, text)
        elif isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
            error = MemoryError(
                f"the host has no memory for a step of offloaded state ({error}), so this step has stopped half-way; "
                "load the latest checkpoint, and offload less to the host: a smaller part of the optimizer, such as "
                "optimizer={'host': 0.4, 'disk': 0.4}, a smaller piece=, or fewer ranks per host"
            )
        self._error = error
        if is_late:
            self._stopped = error

    def raise_stopped(self) -> None:
        """Raise the error that stopped a thread. It has not been raised on all ranks yet, and state is incomplete."""
        if self._stopped is not None:
            raise self._stopped

    def raise_together(self, *groups: dist.ProcessGroup) -> None:
        """Raise on all ranks if any rank has failed. Collective: an all-reduce of two int32 per group.

        Without any group, only this rank's own error is raised, and nothing is waited for.

        Args:
            groups: Process groups whose ranks take part. Default: all groups.

        Raises:
            OSError: A read or write failed on this rank or on another rank.
        """
        groups = groups or self._groups
        # Two numbers tell whether anything failed. Only then `agree` exchanges texts, which costs more messages.
        failed = [int(self._error is not None), int(self._is_lost)]
        if groups:
            failed = largest_of(failed, groups, self._device)
        if not any(failed):
            return
        error, self._error, self._stopped = self._error, None, None
        self._is_lost = False
        if failed[1]:
            self.on_lost()  # before the error, so that a program that catches it cannot step by NaN
        try:
            agree(error, None, *groups)
        except ValueError as other:  # `agree` gives ranks without an error a ValueError that names the failed rank
            raise OSError(str(other)) from None
