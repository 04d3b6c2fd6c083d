"""What a rank sends to one neighbour."""

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
    """A message under way.

    Args:
        consumed: The place, in the peer's actions, of the action that takes it.
        parts: Numbers and bytes of its parts, which must live until they are sent, and what the lane waits for.
    """

    consumed: int
    parts: list[tuple[int, Tensor, Any]]


class Outbox:
    """What a rank sends to one neighbour.

    The peer posts its receives before it knows what comes. So the outbox reckons, as the peer's `Inbox` does at the
    same point of the step, how large each of the peer's buffers is.

    Args:
        lane: The lane to the peer.
        device: Where tensors are sent from.
        are_apart: Whether tensors come apart.
    """

    def __init__(self, lane: Lane, device: torch.device, *, are_apart: bool) -> None:
        self._lane, self._device, self._are_apart = lane, device, are_apart
        self._expected = Expectations()  # of the peer
        self._rooms: deque[int] = deque()  # bytes of the peer's buffers, for what it is sent next
        self._unawaited: list[tuple[Tensor, Any]] = []  # statuses of earlier steps
        self._sending: deque[_Sent] = deque()
        self._word: tuple[Tensor, Any] | None = None  # of a failure

    def plan(self, departures: tuple[Message, ...]) -> None:
        """Reckons which buffers the peer has for a step."""
        without_room = departures[len(self._rooms) :]
        self._rooms.extend(self._expected.room_for(message, are_apart=self._are_apart) for message in without_room)

    def begin(self, departures: tuple[Message, ...], consumed: Mapping[Message, int]) -> None:
        """Begins a step.

        Args:
            departures: What the peer is sent, in order.
            consumed: See `Program`.
        """
        self.plan(departures)
        self._consumed = consumed
        self._sending.clear()

    def give(self, message: Message, contents: Contents) -> None:
        """Begins to send a message."""
        signature, tensors = contents
        expected, room = self._expected.signatures.get(message), self._rooms.popleft()
        if self._are_apart:
            ahead = self._expected.bytes_ahead(message)
            parts = encode_apart(signature, tensors, expected, ahead, self._device)
        else:
            parts = encode(signature, tensors, expected, room)
        self._expected.note(message, signature)
        works = [(number, part, self._lane.send(part, number)) for number, part in parts]
        self._sending.append(_Sent(self._consumed[message], works))

    def settle(self, position: int) -> None:
        """The peer has come to this place of its actions, so what it needed up to there has arrived."""
        while self._sending and self._sending[0].consumed <= position:
            self._sending.popleft()

    def finish(self) -> None:
        """Waits until everything is sent."""
        while self._sending:
            for number, _, work in self._sending.popleft().parts:
                self._lane.wait(work, number)

    def give_status(self, *, awaited: bool) -> None:
        """Says that this rank is done with the step.

        Args:
            awaited: Whether the peer waits for the status in this step. This rank then stays until it is on its way; it
                may leave afterwards. A peer that does not wait may itself have left, and gloo would not tell who waits
                to send.
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
        """Begins to send word of a failure, once, in place of whatever would come next."""
        if self._word is None:
            buffer = encode_failure(failure)
            with suppress(ConnectionError):
                self._word = buffer, self._lane.send(buffer, FIRST)

    def let_failure_leave(self, until: float) -> None:
        """Waits until word of a failure, if there is one, is on its way: a lane that ends before would take it along.

        Args:
            until: When to wait no longer, by `time.monotonic`.
        """
        if self._word is not None:
            with suppress(RuntimeError):  # the peer has left, or receives nothing any more
                self._word[1].wait(timedelta(seconds=max(0.0, until - time.monotonic())))

    def close(self, until: float) -> None:
        """Lets go of the lane, and of what is under way; word of a failure may leave before.

        Args:
            until: When to wait no longer, by `time.monotonic`.
        """
        self.let_failure_leave(until)
        self._word = None
        self._unawaited.clear()
        self._sending.clear()
        self._lane.close()
