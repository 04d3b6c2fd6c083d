"""Messages that a rank sends to one neighbour."""

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import Failure
from .._program import Message
from .lanes import FIRST, Lane
from .message import NOTHING, Contents, Expectations, encode, encode_apart, encode_failure

par_wait_axis = "pipeline"
"""See `par_groups.attributes.WAIT_AXIS`."""


class _Sent(NamedTuple):
    """Message in flight.

    Args:
        consumed: Index of the peer's action that takes the message.
        parts: Number, bytes and work object of each part; the bytes must live until they are sent.
    """

    consumed: int
    parts: list[tuple[int, Tensor, Any]]


class Outbox:
    """Sending end of the messages to one neighbour.

    The peer posts its receives before it has the sizes of the messages. The outbox computes the size of each of the
    peer's buffers, as the peer's `Inbox` does at the same point of the step.

    Args:
        lane: Lane to the peer.
        device: Device of the sent tensors.
        are_apart: Whether tensors are sent separately from headers.
    """

    def __init__(self, lane: Lane, device: torch.device, *, are_apart: bool) -> None:
        self._lane, self._device, self._are_apart = lane, device, are_apart
        self._expected = Expectations()  # of the peer
        self._rooms: deque[int] = deque()  # bytes of the peer's buffers, for what it is sent next
        self._unawaited: list[tuple[Tensor, Any]] = []  # statuses of earlier steps
        self._sending: deque[_Sent] = deque()
        self._word: tuple[Tensor, Any] | None = None  # of a failure

    def plan(self, departures: tuple[Message, ...]) -> None:
        """Compute the sizes of the peer's buffers for a step."""
        # `plan` may be called before `begin`, so only messages without a size are new here.
        without_room = departures[len(self._rooms) :]
        self._rooms.extend(self._expected.room_for(message, are_apart=self._are_apart) for message in without_room)

    def begin(self, departures: tuple[Message, ...], consumed: Mapping[Message, int]) -> None:
        """Begin a step.

        Args:
            departures: Messages to the peer, in order.
            consumed: Index of the receiver's action for each message; see `Program`.
        """
        self.plan(departures)
        self._consumed = consumed
        self._sending.clear()

    def give(self, message: Message, contents: Contents) -> None:
        """Begin to send a message."""
        signature, tensors = contents
        expected, room = self._expected.signatures.get(message), self._rooms.popleft()
        if self._are_apart:
            ahead = self._expected.bytes_ahead(message)
            parts = encode_apart(signature, tensors, expected, ahead, self._device)
        else:
            parts = encode(signature, tensors, expected, room)
        # The peer notes the same signature when it unpacks the message, so both compute equal sizes later.
        self._expected.note(message, signature)
        works = [(number, part, self._lane.send(part, number)) for number, part in parts]
        self._sending.append(_Sent(self._consumed[message], works))

    def settle(self, position: int) -> None:
        """Release the messages that the peer has taken before it reached the action at this index."""
        while self._sending and self._sending[0].consumed <= position:
            self._sending.popleft()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        while self._sending:
            for number, _, work in self._sending.popleft().parts:
                self._lane.wait(work, number)

    def give_status(self, *, awaited: bool) -> None:
        """Send the status that this rank has finished the step.

        Args:
            awaited: Whether the peer waits for the status in this step. If True, this rank waits until the status is
                sent, because it may exit afterwards. If False, the peer may have exited, and gloo does not report that
                to a rank that waits for a send.
        """
        self.finish()
        with suppress(ConnectionError):  # a rank that is done may have left
            for _, work in self._unawaited:
                self._lane.wait(work, FIRST)
            self._unawaited.clear()
            ((_, part),) = encode(NOTHING, [], NOTHING, self._rooms.popleft())
            work = self._lane.send(part, FIRST)
            if awaited:
                self._lane.wait(work, FIRST)
            else:
                self._unawaited.append((part, work))

    def give_failure(self, failure: Failure) -> None:
        """Begin to send a failure, once, in place of the next message."""
        # A rank may fail again while it reports a failure, and the peer receives only the first one.
        if self._word is None:
            buffer = encode_failure(failure)
            with suppress(ConnectionError):
                self._word = buffer, self._lane.send(buffer, FIRST)

    def let_failure_leave(self, until: float) -> None:
        """Wait until a failure, if any, is sent; a lane that ends earlier would drop it.

        Args:
            until: Deadline on the clock `time.monotonic`, in seconds.
        """
        if self._word is not None:
            with suppress(RuntimeError):  # the peer has left, or receives nothing any more
                self._word[1].wait(timedelta(seconds=max(0.0, until - time.monotonic())))

    def close(self, until: float) -> None:
        """Release the lane and the messages in flight, after a failure, if any, is sent.

        Args:
            until: Deadline for the failure on the clock `time.monotonic`, in seconds.
        """
        self.let_failure_leave(until)
        self._word = None
        self._unawaited.clear()
        self._sending.clear()
        self._lane.close()
