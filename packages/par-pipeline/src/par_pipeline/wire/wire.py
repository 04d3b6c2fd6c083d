"""A rank's connection with the other ranks of its pipeline."""

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from .._errors import Failure
from .._program import STATUS, Message, Program
from .inbox import Inbox
from .lanes import APART, Lanes, MakeLanes
from .meeting import Meeting
from .message import Contents
from .outbox import Outbox

WaitFor = Literal["lower", "all", "none"]

_TO_LEAVE = 1.0  # seconds for word of a failure to leave, before a connection ends
_PAUSE = 1e-3  # seconds between two looks at a GPU


class Wire:
    """A rank's connection with its peers.

    Args:
        group: The ranks of the pipeline.
        device: Where tensors are sent from: a GPU that the group has NCCL for, or the CPU.
        timeout: The longest wait for a message.
        ahead: Bytes of receives that may be posted ahead, from all neighbouring stages together.
        make_lanes: Makes the communicators.

    Attributes:
        are_apart: Whether tensors come apart, so that hosts do not wait for them.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, ahead: int, make_lanes: MakeLanes
    ) -> None:
        self.timeout = timeout
        self._group, self._device, self._ahead = group, device, ahead
        self._make_lanes = make_lanes
        self._rank = dist.get_rank(group)
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._lanes: Lanes | None = make_lanes(group, device, timeout)
        self.are_apart = self._lanes.are_apart
        self._peers: tuple[int, ...] = ()  # that tensors go to or come from
        self._last_step: torch.cuda.Event | None = None  # a GPU comes to it when it has done all steps that are over
        self._meeting = Meeting(group)

    def reset(self, timeout: timedelta) -> None:
        """Makes new connections: what was under way is forgotten. Collective over the group.

        The old ones end first, so that a rank that still waits for this one hears of it, and comes.

        Args:
            timeout: The longest wait for the others.

        Raises:
            ConnectionError: Other ranks do not come within the timeout.
        """
        self.close("reset() was called on it", is_idle=False)
        self._meeting.meet(timeout)
        self._lanes = self._make_lanes(self._group, self._device, self.timeout)
        self.connect(self._peers)

    def connect(self, peers: Iterable[int]) -> None:
        """Sends a byte to each peer, and receives one. Collective over the ranks that are peers of each other.

        NCCL connects two ranks when they first exchange anything, which lets their hosts meet. In a step that would
        be a wait that the schedule does not know of. All ranks go through their pairs in one order, so nobody waits for
        a rank that waits for it.

        Args:
            peers: The ranks that this one exchanges tensors with in a step.

        Raises:
            ConnectionError: A peer is gone.
        """
        self._peers = tuple(peers)
        if self._lanes is None or not self.are_apart:
            return
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for low, high in sorted((min(self._rank, peer), max(self._rank, peer)) for peer in self._peers):
            to_peer, from_peer = self._lanes.to(high if low == self._rank else low)
            for sends in (low == self._rank, high == self._rank):
                lane = to_peer if sends else from_peer
                lane.wait(lane.send(byte, APART) if sends else lane.receive(byte, APART), APART)

    def close(self, why: str, *, is_idle: bool) -> None:
        """Ends this rank's connections, and waits for nobody. A peer that waits for this rank hears why.

        Args:
            why: What the peers are told, unless they were told of a failure before.
            is_idle: Whether all steps have ended well, so that what a GPU still has to do for them ends, too.
        """
        if is_idle and self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
        self._abort()  # before the buffers go into which receives are posted
        failure = Failure(self._rank, f"rank {self._rank}, between two steps", "PipelineError", why)
        for outbox in self._outboxes.values():
            outbox.give_failure(failure)
        until = time.monotonic() + _TO_LEAVE
        for outbox in self._outboxes.values():
            outbox.close(until)
        for inbox in self._inboxes.values():
            inbox.close()
        self._outboxes, self._inboxes = {}, {}

    def who_says_so(self, word: bool, *, waits: bool) -> list[int]:
        """Tells the other ranks yes or no after a failure, which all of them hear of.

        Args:
            word: What this rank says.
            waits: Whether to wait for the words of the others; else nobody's is returned.

        Returns:
            The ranks that say yes within the timeout, ascending.
        """
        return self._meeting.who_says_so(word, self.timeout if waits else None)

    def begin(self, program: Program) -> None:
        """Begins a step.

        Raises:
            ConnectionError: A peer is gone.
            PeerFailed: The step before has failed on another rank, after this one was done with it.
        """
        if self._lanes is None:
            raise ConnectionError("the connections of the pipeline are closed")
        if self._device.type != "cpu":
            self._last_step = torch.cuda.current_stream(self._device).record_event()
        for peer, arrivals in program.arrivals.items():
            if peer not in self._inboxes:
                to_peer, from_peer = self._lanes.to(peer)
                outbox = self._outboxes[peer] = Outbox(to_peer, self._device, are_apart=self.are_apart)
                budget = self._ahead // max(1, program.neighbours)
                self._inboxes[peer] = Inbox(
                    from_peer,
                    self._device,
                    budget,
                    outbox.settle,
                    are_apart=self.are_apart,
                    peer=dist.get_global_rank(self._group, peer),
                )
            self._outboxes[peer].begin(program.departures[peer], program.consumed)
            self._inboxes[peer].begin(arrivals)
        for peer in program.arrivals:  # now that all have begun: word of a failure goes to every one
            self._inboxes[peer].expect()
        for peer in program.arrivals:
            self._inboxes[peer].hear()

    def take(self, message: Message, source: int) -> Contents:
        """Waits for a message from another rank.

        Raises:
            PeerFailed: The other rank says that the step failed.
            ConnectionError: The other rank is gone, or does not answer.
        """
        return self._inboxes[source].take(message)

    def give(self, message: Message, target: int, contents: Contents) -> None:
        """Begins to send a message to another rank."""
        self._outboxes[target].give(message, contents)

    def end(self, program: Program, wait_for: WaitFor) -> None:
        """Ends a step: tells the peers that this rank is done.

        That others are done, too, is heard in the next step, before anything else from them: the first rank may begin
        with the next batch while the last one is still busy with this one.

        Args:
            program: The program of the step; the next one may be the same.
            wait_for: The peers whose word is waited for now: the lower ones in training, all of them in an evaluation,
                which no gradients tie together, and none if they have given it before the loss.
        """
        lower = [peer for peer in program.arrivals if peer < self._rank]
        higher = [peer for peer in program.arrivals if peer > self._rank]
        if wait_for != "all":
            for peer in lower:
                self._outboxes[peer].give_status(awaited=False)
        if wait_for == "none":
            for peer in higher:
                self._outboxes[peer].give_status(awaited=False)
        else:
            for peer in lower:
                self._inboxes[peer].take(STATUS)
            for peer in higher:
                self._outboxes[peer].give_status(awaited=True)
        if wait_for == "all":
            for peer in higher:
                self._inboxes[peer].take(STATUS)
            for peer in lower:
                self._outboxes[peer].give_status(awaited=True)
        for peer, arrivals in program.arrivals.items():
            self._outboxes[peer].plan(program.departures[peer])
            self._inboxes[peer].prepare(arrivals)

    def fail(self, program: Program, failure: Failure) -> None:
        """Sends word of a failure in place of all that is owed, and waits until the peers know of it.

        A rank that cannot wait for that, as it has no memory for what still comes, waits until the word has left.
        Tensors that are owed, and for which receives may be posted, do not come any more: a GPU would wait for them.
        """
        for peer in program.departures:
            self._outboxes[peer].give_failure(failure)
        for peer in program.arrivals:
            if not self._inboxes[peer].drain():
                self._outboxes[peer].let_failure_leave(time.monotonic() + _TO_LEAVE)
        if program.arrivals:
            self._abort()

    def _abort(self) -> None:
        """Ends the transfers of tensors that come apart; the lanes of headers end with what holds them.

        Those of steps that are over come to their end, for which a GPU may be behind its host, unless a rank is gone.
        """
        if self._lanes is None:
            return
        until = time.monotonic() + self.timeout.total_seconds()
        while self._last_step is not None and not self._last_step.query() and time.monotonic() < until:
            time.sleep(_PAUSE)
        self._lanes.abort()
        self._lanes = self._last_step = None
