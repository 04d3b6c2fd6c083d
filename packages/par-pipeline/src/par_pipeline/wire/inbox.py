"""Messages that a rank receives from one neighbour.

All receives of a step are posted in the order in which the peer sends, within a budget of bytes. Each further receive
is posted when an earlier message has arrived.

The receives are posted at the end of a step, for a next step like it, because no rank sends at that time. Gloo's thread
spins for a connection while a rank sends or posts on it, and for milliseconds if the thread has moved to the rank's
core. This happened in every step when receives were posted during the first sends. The next messages fill the buffers
in their order, even if an evaluation follows a training step. Both ranks therefore compute the size of each buffer.

A rank that waits polls for a while before it sleeps, and yields its core to other threads. A wake-up takes longer than
a tiny action, and the rank often wakes up on another core with cold caches.

`Apart` receives tensors that are sent separately.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import PeerFailed
from .._program import ExpectedMessage, Message
from .apart import Apart
from .lanes import FIRST, REST, Lane
from .message import Contents, Expectations, Header, MessageKind

_AWAKE = 2e-3  # seconds in which a rank that waits does not sleep; other threads of its process need the interpreter
_let_others_run = getattr(os, "sched_yield", partial(time.sleep, 0))  # Windows has no sched_yield


class Posted(NamedTuple):
    """Posted receive.

    Args:
        buffer: Buffer for the message.
        first: First byte of the buffer; it changes when the message arrives.
        work: Work object for `Lane.wait`.
    """

    buffer: Tensor
    first: Tensor
    work: Any


class Inbox:
    """Receiving end of the messages from one neighbour.

    Args:
        lane: Lane from the peer.
        device: Device on which tensors arrive.
        budget: Limit for receives posted ahead, in bytes.
        settle: Function that is called with the index of each action that the peer has reached.
        are_apart: Whether tensors are sent separately from headers.
        peer: Global rank of the neighbour, for diagnosis.
    """

    def __init__(
        self,
        lane: Lane,
        device: torch.device,
        budget: int,
        settle: Callable[[int], None],
        *,
        are_apart: bool,
        peer: int,
    ) -> None:
        self._peer = peer
        self._lane, self._settle = lane, settle
        self._expected = Expectations()  # of this rank
        self._apart = Apart(lane, device, budget) if are_apart else None
        self._coming: deque[ExpectedMessage] = deque()
        self._posted: deque[Posted] = deque()  # buffers for what comes first, and ...
        self._planned: deque[int] = deque()  # ... bytes of those for what comes then
        self._budget = budget
        self._knows_failure = False

    def par_waits_for(self) -> tuple[int, ...]:
        """Return the global rank whose messages this object receives; see `par_groups.attributes.WAITS_FOR`."""
        return (self._peer,)

    def plan(self, arrivals: tuple[ExpectedMessage, ...]) -> None:
        """Plan the buffers for a step. The peer's `Outbox` computes the same sizes at the same point."""
        have_buffers = len(self._posted) + len(self._planned)
        coming = [arrival.message for arrival in (*self._coming, *arrivals)]
        # Buffers that are posted but not filled yet, such as those of a step that did not happen, serve the next
        # messages in order, whatever step these belong to.
        without_buffer = coming[have_buffers:]
        are_apart = self._apart is not None
        self._planned.extend(self._expected.room_for(message, are_apart=are_apart) for message in without_buffer)

    def begin(self, arrivals: tuple[ExpectedMessage, ...]) -> None:
        """Begin a step, in which the peer sends these messages in this order."""
        self.plan(arrivals)
        # A lower rank may finish its step before a higher rank's status arrives, so that status is read in the next
        # step.
        self._late = len(self._coming)  # a higher rank's status of the last step, which comes before all else
        self._coming.extend(arrivals)
        self._arrived: dict[Message, Contents] = {}
        if self._apart is not None:
            plan = ((arrival.after, self._expected.bytes_ahead(arrival.message)) for arrival in arrivals)
            self._apart.begin((after, ahead) for after, ahead in plan if ahead != 0)  # nothing comes apart of 0 bytes

    def prepare(self, arrivals: tuple[ExpectedMessage, ...]) -> None:
        """Post the receives of a possible next step."""
        self.plan(arrivals)
        with suppress(ConnectionError):  # a rank that is done may have left
            self._post_ahead()

    def expect(self) -> None:
        """Post the first receive, if none is posted yet."""
        if not self._posted:
            self._post()

    def hear(self) -> None:
        """Read the peer's status of the last step, if it has arrived, and post the first receive of separate tensors.

        Raises:
            PeerFailed: The peer reports that the last step failed.
        """
        # The first byte is polled instead of waited for: a status that has not arrived yet is read later, with the
        # first message.
        while self._late and self._posted and self._posted[0].first.item() != MessageKind.UNWRITTEN:
            self._receive()
            self._late -= 1
        if self._apart is not None:
            self._apart.post()

    def take(self, message: Message) -> Contents:
        """Wait for a message, and for all messages that were sent before it.

        Raises:
            PeerFailed: The peer reports that the step failed.
            ConnectionError: The peer is gone, or does not answer.
        """
        # A receive must always be posted before the peer sends, so the next one is posted before this message is
        # processed.
        self._post_ahead()  # it would wait anyway
        while message not in self._arrived:
            arrival, header = self._receive()
            if self._late:
                self._late -= 1
                continue
            contents = self._arrived[arrival.message] = self._contents(arrival.message, header)
            self._expected.note(arrival.message, contents[0])
            # A message proves that the peer has reached the action that sent it, and so has taken all messages which
            # that action needed. Their send buffers are free.
            self._settle(arrival.position)
        if self._apart is not None:
            self._apart.taken()
        return self._arrived.pop(message)

    def drain(self) -> bool:
        """Receive and drop messages until the peer has received the failure: it confirms this, or ends its step.

        Returns:
            Whether this point was reached. After an out-of-memory failure, a rank may have no memory for the remaining
            messages. It then stops and raises the original error.
        """
        try:
            # The peer stops sending after it has learned of the failure, so only what it sent before is received here.
            while self._coming and self._posted and not self._knows_failure:
                arrival, header = self._receive()
                if self._late:
                    self._late -= 1
                else:
                    self._contents(arrival.message, header)
        except (ConnectionError, PeerFailed):  # it is gone, or says so
            return True
        except (RuntimeError, MemoryError):
            return False
        return True

    def close(self) -> None:
        """Release the lane and the posted receives."""
        self._posted.clear()
        self._apart = None
        self._lane.close()

    def _post_ahead(self) -> None:
        """Post receives within the budget, and always at least one."""
        while self._planned and (not self._posted or self._budget > 0):
            self._post()

    def _post(self) -> None:
        """Post the next receive."""
        size = self._planned[0]
        # The buffer is new for each message, because the received tensors share its memory and live as long as their
        # activations.
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        first = buffer[0].fill_(MessageKind.UNWRITTEN)
        self._posted.append(Posted(buffer, first, self._lane.receive(buffer, FIRST)))
        self._planned.popleft()
        self._budget -= size

    def _receive(self) -> tuple[ExpectedMessage, Header]:
        """Receive the peer's next message, and return its place in the plan and its header.

        Raises:
            PeerFailed: The peer reports that the step failed.
        """
        buffer, first, work = self._posted.popleft()
        until = time.perf_counter() + _AWAKE
        # The first byte may arrive before the rest of the message, so the wait below is still needed.
        while first.item() == MessageKind.UNWRITTEN and time.perf_counter() < until:
            _let_others_run()
        self._lane.wait(work, FIRST)
        self._budget += buffer.nbytes
        header = Header(buffer, first.item())
        if header.failure is not None:
            self._knows_failure = True
            raise PeerFailed(header.failure)
        self._post_ahead()
        return self._coming.popleft(), header

    def _contents(self, message: Message, header: Header) -> Contents:
        """Return the contents of a message after all its parts have arrived."""
        expected = self._expected.signatures.get(message)
        tensors: Tensor | None = None
        # The transfer of separate tensors may begin without the header if both ends know its size from the last step.
        if self._apart is not None and (ahead := self._expected.bytes_ahead(message)) != 0:
            size = header.body if header.follows or expected is None else expected.size
            tensors = self._apart.receive(size if ahead is None else ahead)
        if not header.follows:
            return header.decode(expected, apart=tensors)
        # The receive that was posted ahead is too small if the tensors have grown since the last step. The sender then
        # puts them into the second part.
        if tensors is None or header.body > len(tensors):  # so they are behind the description
            return header.decode(expected, self._rest(header.description + header.body))
        return header.decode(expected, self._rest(header.description), tensors)

    def _rest(self, size: int) -> Tensor:
        """Receive the second part of a message, which its header announces."""
        rest = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._lane.wait(self._lane.receive(rest, REST), REST)
        return rest
