"""What a rank receives from one neighbour.

All receives of a step are posted, in the order in which the peer sends, as far as a budget of bytes allows; each
further one when an earlier one has arrived.

They are posted at the end of a step, for one like it: nobody sends then. Gloo's thread spins for a connection that a
rank is sending or posting on, and for milliseconds if it has come to the rank's core meanwhile; that happened in every
step while receives were posted beside the first sends. Whatever a rank sends next takes the buffers in their order, so
both ranks reckon how large each is: what an evaluation sends may find those of a training step.

A rank that waits looks for a while before it sleeps, and lets others run meanwhile. Waking it up takes longer than a
tiny action, and as often as not it wakes up on another core, whose caches are cold.

Tensors that come apart are received by `Apart`.
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
from .._program import Arrival, Message
from .apart import Apart
from .lanes import FIRST, REST, Lane
from .message import Contents, Expectations, Header, Kind

_AWAKE = 2e-3  # seconds in which a rank that waits does not sleep; other threads of its process need the interpreter
_let_others_run = getattr(os, "sched_yield", partial(time.sleep, 0))  # Windows has no sched_yield


class Posted(NamedTuple):
    """A receive that waits for its message.

    Args:
        buffer: Where the message will be.
        first: The buffer's first byte, which tells that something has come.
        work: What the lane waits for.
    """

    buffer: Tensor
    first: Tensor
    work: Any


class Inbox:
    """What a rank receives from one neighbour.

    Args:
        lane: The lane from the peer.
        device: Where tensors arrive.
        budget: Bytes of receives that may be posted ahead.
        settle: Called with each place of the peer's actions that it has come to.
        are_apart: Whether tensors come apart.
        peer: The neighbour's global rank, for diagnosis.
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
        self._coming: deque[Arrival] = deque()
        self._posted: deque[Posted] = deque()  # buffers for what comes first, and ...
        self._planned: deque[int] = deque()  # ... bytes of those for what comes then
        self._budget = budget
        self._knows_failure = False

    def par_waits_for(self) -> tuple[int, ...]:
        """Return the global rank whose messages this object receives; see `par_groups.attributes.WAITS_FOR`."""
        return (self._peer,)

    def plan(self, arrivals: tuple[Arrival, ...]) -> None:
        """Sees to it that there are buffers for a step. The peer's `Outbox` reckons the same at the same point."""
        have_buffers = len(self._posted) + len(self._planned)
        coming = [arrival.message for arrival in (*self._coming, *arrivals)]
        without_buffer = coming[have_buffers:]
        are_apart = self._apart is not None
        self._planned.extend(self._expected.room_for(message, are_apart=are_apart) for message in without_buffer)

    def begin(self, arrivals: tuple[Arrival, ...]) -> None:
        """Begins a step, in which the peer sends these messages, in this order."""
        self.plan(arrivals)
        self._late = len(self._coming)  # a higher rank's status of the last step, which comes before all else
        self._coming.extend(arrivals)
        self._arrived: dict[Message, Contents] = {}
        if self._apart is not None:
            plan = ((arrival.after, self._expected.bytes_ahead(arrival.message)) for arrival in arrivals)
            self._apart.begin((after, ahead) for after, ahead in plan if ahead != 0)  # nothing comes apart of 0 bytes

    def prepare(self, arrivals: tuple[Arrival, ...]) -> None:
        """Posts the receives of a step that may come."""
        self.plan(arrivals)
        with suppress(ConnectionError):  # a rank that is done may have left
            self._post_ahead()

    def expect(self) -> None:
        """Posts the first receive, if none is posted yet."""
        if not self._posted:
            self._post()

    def hear(self) -> None:
        """Takes the word of the last step, if it has come meanwhile, and posts the first receive of tensors apart.

        Raises:
            PeerFailed: The peer says that the last step failed.
        """
        while self._late and self._posted and self._posted[0].first.item() != Kind.UNWRITTEN:
            self._receive()
            self._late -= 1
        if self._apart is not None:
            self._apart.post()

    def take(self, message: Message) -> Contents:
        """Waits for a message, and so for all that were sent before it.

        Raises:
            PeerFailed: The peer says that the step failed.
            ConnectionError: The peer is gone, or does not answer.
        """
        self._post_ahead()  # it would wait anyway
        while message not in self._arrived:
            arrival, header = self._receive()
            if self._late:
                self._late -= 1
                continue
            contents = self._arrived[arrival.message] = self._contents(arrival.message, header)
            self._expected.note(arrival.message, contents[0])
            self._settle(arrival.position)
        if self._apart is not None:
            self._apart.taken()
        return self._arrived.pop(message)

    def drain(self) -> bool:
        """Receives and drops until the peer knows of the failure: until it says so, or is done.

        Returns:
            Whether it got so far. The failure may be that memory has run out, and a rank that has none for what still
            comes stops here, and raises what it has to.
        """
        try:
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
        """Lets go of the lane, and of the receives that are posted."""
        self._posted.clear()
        self._apart = None
        self._lane.close()

    def _post_ahead(self) -> None:
        """Posts receives while there is room in the budget, and one always."""
        while self._planned and (not self._posted or self._budget > 0):
            self._post()

    def _post(self) -> None:
        """Posts the next receive."""
        size = self._planned[0]
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        first = buffer[0].fill_(Kind.UNWRITTEN)
        self._posted.append(Posted(buffer, first, self._lane.receive(buffer, FIRST)))
        self._planned.popleft()
        self._budget -= size

    def _receive(self) -> tuple[Arrival, Header]:
        """The next message that the peer sends: which one it is, and its header.

        Raises:
            PeerFailed: It says that the step failed.
        """
        buffer, first, work = self._posted.popleft()
        until = time.perf_counter() + _AWAKE
        while first.item() == Kind.UNWRITTEN and time.perf_counter() < until:
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
        """What a message brings, once all its parts are there."""
        expected = self._expected.signatures.get(message)
        tensors: Tensor | None = None
        if self._apart is not None and (ahead := self._expected.bytes_ahead(message)) != 0:
            size = header.body if header.follows or expected is None else expected.size
            tensors = self._apart.receive(size if ahead is None else ahead)
        if not header.follows:
            return header.decode(expected, apart=tensors)
        if tensors is None or header.body > len(tensors):  # so they are behind the description
            return header.decode(expected, self._rest(header.description + header.body))
        return header.decode(expected, self._rest(header.description), tensors)

    def _rest(self, size: int) -> Tensor:
        """The part that a header announces."""
        rest = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._lane.wait(self._lane.receive(rest, REST), REST)
        return rest
