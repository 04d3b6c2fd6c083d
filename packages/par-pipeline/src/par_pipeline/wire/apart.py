"""Tensors from one neighbour that are received separately from their headers, over NCCL.

If a receive is posted only when a stage needs it, the stage waits for the complete transfer although the peer sent
early. A rank therefore posts the receive of its next message when it has taken the message before. Only this receive is
then in flight, and a rank needs one extra buffer for each neighbour. It needs two if a schedule takes a message before
an earlier message, as V schedules sometimes do.

More receives ahead do not help while a transfer is shorter than an action, and might do harm. On a GPU, a receive is a
kernel that starts after the kernel before it in its stream. A stream may share a device queue with other streams, and a
blocked kernel in the queue blocks all kernels behind it. A single receive is never behind another receive.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .lanes import APART, Lane


class Apart:
    """Receives of tensors that are sent separately from their headers.

    Args:
        lane: Lane from the peer.
        device: Device on which the tensors arrive.
        budget: Limit for posted receives, in bytes; above it, only one receive is posted ahead.
    """

    def __init__(self, lane: Lane, device: torch.device, budget: int) -> None:
        self._lane, self._device, self._budget = lane, device, budget
        self._planned: deque[tuple[int, int | None]] = deque()  # of the messages whose receives are not posted yet
        self._posted: deque[tuple[Tensor, Any]] = deque()
        self._taken = 0

    def begin(self, plan: Iterable[tuple[int, int | None]]) -> None:
        """Begin a step.

        Args:
            plan: Pair for each message with tensors: the number of messages taken when its receive is posted, and its
                size in bytes; None if only the header contains the size.
        """
        self._planned = deque(plan)
        self._taken = 0

    def post(self) -> None:
        """Post the receives that are due, in the order in which the peer sends, as far as their sizes are known."""
        while self._planned:
            after, size = self._planned[0]
            if size is None or after > self._taken or (self._posted and self._budget <= 0):
                return
            self._post(size)

    def taken(self) -> None:
        """Count a message that this rank has taken, and post the receives that are then due."""
        self._taken += 1
        self.post()

    def receive(self, size: int) -> Tensor:
        """Return the tensors of the next message, [bytes] of uint8, after they have arrived.

        Args:
            size: Size of the tensors in bytes, from the header or from the posted receive.
        """
        if not self._posted:
            self._post(size)
        buffer, work = self._posted.popleft()
        if work is not None:
            self._lane.wait(work, APART)
            self._budget += buffer.nbytes
        return buffer

    def _post(self, size: int) -> None:
        """Post the next receive; a message of no bytes has no transfer."""
        self._planned.popleft()
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._posted.append((buffer, self._lane.receive(buffer, APART) if size else None))
        self._budget -= size
