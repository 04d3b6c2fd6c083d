"""The messages of one `batch_isend_irecv`, which NCCL runs as one operation."""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from .player import StrictError, StrictWork

if TYPE_CHECKING:
    from .operation import Part


class MessageBatch:
    """Messages that are collected until the last one of their batch is issued."""

    def __init__(self) -> None:
        self.parts: list[tuple[Part, Tensor]] = []
        self.work: StrictWork | None = None


class BatchedMessage(dist.Work):
    """One message of a batch, which completes when the whole batch does."""

    def __init__(self, batch: MessageBatch) -> None:
        super().__init__()
        self._batch = batch

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - as torch calls it
        """Wait for the whole batch."""
        if self._batch.work is None:
            raise StrictError("a message of a batch was waited for before the batch was complete")
        return self._batch.work.wait()

    def is_completed(self) -> bool:
        """Return whether the batch is complete."""
        return self._batch.work is not None and self._batch.work.is_completed()
