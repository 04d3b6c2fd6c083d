"""Tensors from one neighbour that come apart from their headers, over NCCL.

A receive that is posted when a stage needs it begins then, though the peer has long sent, and the stage waits for the
whole transfer. So each is posted before: what this rank takes next, when it has taken the message before. It is then
the only one, and a rank has one buffer for each neighbour beyond what it has taken; two, where a schedule takes a
message before an earlier one, as those in a V do at times.

More would not help as long as a transfer is shorter than an action, and might do harm. On a GPU a receive is a kernel,
which begins when the one before it in its stream has ended; and a stream may share a queue of the device with others,
where what cannot begin holds up all that comes behind it. A receive that is alone can begin.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .lanes import APART, Lane


class Apart:
    """Receives tensors that come apart.

    Args:
        lane: The lane from the peer.
        device: Where the tensors arrive.
        budget: Bytes of receives beyond which only one is posted ahead.
    """

    def __init__(self, lane: Lane, device: torch.device, budget: int) -> None:
        self._lane, self._device, self._budget = lane, device, budget
        self._planned: deque[tuple[int, int | None]] = deque()  # of the messages whose receives are not posted yet
        self._posted: deque[tuple[Tensor, Any]] = deque()
        self._taken = 0

    def begin(self, plan: Iterable[tuple[int, int | None]]) -> None:
        """Begins a step.

        Args:
            plan: For each message with tensors, how many messages are taken when its receive is due, and the bytes that
                come whatever its header will say; None: it says it.
        """
        self._planned = deque(plan)
        self._taken = 0

    def post(self) -> None:
        """Posts the receives that are due, in the order in which the peer sends, as far as their sizes are known."""
        while self._planned:
            after, size = self._planned[0]
            if size is None or after > self._taken or (self._posted and self._budget <= 0):
                return
            self._post(size)

    def taken(self) -> None:
        """This rank has taken a message, and goes on to the next one."""
        self._taken += 1
        self.post()

    def receive(self, size: int) -> Tensor:
        """The tensors of the next message, [bytes] of uint8, once they are there.

        Args:
            size: Their bytes, as its header says, or as many as were posted.
        """
        if not self._posted:
            self._post(size)
        buffer, work = self._posted.popleft()
        if work is not None:
            self._lane.wait(work, APART)
            self._budget += buffer.nbytes
        return buffer

    def _post(self, size: int) -> None:
        """Posts the next receive; nothing is sent for a message of no bytes."""
        self._planned.popleft()
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._posted.append((buffer, self._lane.receive(buffer, APART) if size else None))
        self._budget -= size
