"""Connection of a rank with the other ranks of its pipeline."""

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from .._errors import Failure, PeerFailed
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
    """Connection of a rank with its peers.

    Args:
        group: Ranks of the pipeline.
        device: Device of the sent tensors: an accelerator for which the group has a backend of its own, or the CPU.
        timeout: Timeout for a message.
        ahead: Limit for receives posted ahead, from all neighbouring stages together, in bytes.
        make_lanes: Function that makes the communicators.

    Attributes:
        are_apart: Whether tensors are sent separately from headers, so that no host waits for them.
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
        self._last_step: torch.Event | None = None  # a device comes to it when it has done all steps that are over
        self._meeting = Meeting(group)
        self._has_failed = False  # since the ranks last met

    def reset(self, timeout: timedelta) -> None:
        """Make new connections, and drop all messages in flight. Collective over the group.

        The old connections end first, so that a rank that still waits for this rank receives an error and joins.

        Args:
            timeout: Timeout for the other ranks.

        Raises:
            ConnectionError: Other ranks do not join within the timeout.
        """
        self.close("reset() was called on it", is_idle=False)
        self._meeting.meet(timeout)
        self._has_failed = False
        self._lanes = self._make_lanes(self._group, self._device, self.timeout)
        self.connect(self._peers)

    def connect(self, peers: Iterable[int]) -> None:
        """Exchange a byte with each peer. Collective over the ranks that are peers of each other.

        NCCL connects two ranks on their first exchange, and both hosts wait for each other. During a step, this wait
        would not be part of the schedule. All ranks go through their pairs in one order, so that two ranks never wait
        for each other in different exchanges.

        Args:
            peers: Ranks with which this rank exchanges tensors in a step.

        Raises:
            ConnectionError: A peer is gone.
        """
        self._peers = tuple(peers)
        if self._lanes is None or not self.are_apart:
            return
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        # Sorted pairs are the same order on every rank. A rank may wait in its pair, but a chain of waits always ends
        # at the smallest pair, so there is no deadlock.
        for low, high in sorted((min(self._rank, peer), max(self._rank, peer)) for peer in self._peers):
            to_peer, from_peer = self._lanes.to(high if low == self._rank else low)
            for sends in (low == self._rank, high == self._rank):
                lane = to_peer if sends else from_peer
                # The host waits for each exchange, so that a rank never has two connections in the making.
                lane.wait(lane.send(byte, APART) if sends else lane.receive(byte, APART), APART)

    def close(self, why: str, *, is_idle: bool) -> None:
        """End this rank's connections, without a wait for other ranks. A peer that waits for this rank gets the reason.

        Args:
            why: Reason that the peers receive, unless they received a failure before.
            is_idle: Whether all steps have succeeded; the GPU's queued work for them then ends, too.
        """
        # The host may have finished its steps while the GPU still runs them; aborting its transfers would corrupt a
        # successful step.
        if is_idle and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._abort()  # before the buffers go into which receives are posted
        failure = Failure(self._rank, f"rank {self._rank}, between two steps", "PipelineError", why)
        # After a failed step the ranks have its cause, which this reason would hide.
        if not self._has_failed:
            self._meeting.leave_word(failure)
        # All peers are told before the first wait, so that the wait below is the longest of them instead of their sum.
        for outbox in self._outboxes.values():
            outbox.give_failure(failure)
        until = time.monotonic() + _TO_LEAVE
        for outbox in self._outboxes.values():
            outbox.close(until)
        for inbox in self._inboxes.values():
            inbox.close()
        self._outboxes, self._inboxes = {}, {}

    def who_says_so(self, word: bool, *, waits: bool) -> list[int]:
        """Send a yes or no to the other ranks, after a failure that all ranks have received.

        Args:
            word: Answer of this rank.
            waits: Whether to wait for the answers of the other ranks; otherwise the result is empty.

        Returns:
            The ranks that answer yes within the timeout, ascending.
        """
        return self._meeting.who_says_so(word, self.timeout if waits else None)

    def begin(self, program: Program) -> None:
        """Begin a step.

        Raises:
            ConnectionError: A peer is gone.
            PeerFailed: The step before has failed on another rank, after this rank had finished it.
        """
        if self._lanes is None:
            raise ConnectionError("the connections of the pipeline are closed")
        # The event marks all work of earlier steps: `_abort` waits for it, so that an error in this step does not break
        # tensors of a step that succeeded.
        if self._device.type != "cpu":
            self._last_step = torch.accelerator.current_stream(self._device).record_event()
        for peer, arrivals in program.arrivals.items():
            # An evaluation may have peers that training does not have, so connections are made for the peers of each
            # program.
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
        # Expecting posts the first receives. It must not fail on one peer while another peer has no outbox yet, because
        # `fail` reports through the outboxes.
        for peer in program.arrivals:
            self._inboxes[peer].expect()
        for peer in program.arrivals:
            self._inboxes[peer].hear()

    def take(self, message: Message, source: int) -> Contents:
        """Wait for a message from another rank.

        Raises:
            PeerFailed: The other rank reports that the step failed.
            ConnectionError: The other rank is gone, or does not answer.
        """
        return self._inboxes[source].take(message)

    def give(self, message: Message, target: int, contents: Contents) -> None:
        """Begin to send a message to another rank."""
        self._outboxes[target].give(message, contents)

    def end(self, program: Program, wait_for: WaitFor) -> None:
        """End a step: send the status of this rank to its peers.

        The status of the other peers arrives in the next step, before their other messages. The first rank may
        therefore begin the next batch while the last rank still runs this one.

        Args:
            program: Program of the step; the next step probably has the same.
            wait_for: Peers whose status this rank waits for now. "lower" is for training. "all" is for an evaluation,
                in which no gradients synchronize the ranks. "none" is for steps in which all ranks confirmed success
                before the loss.
        """
        lower = [peer for peer in program.arrivals if peer < self._rank]
        higher = [peer for peer in program.arrivals if peer > self._rank]
        # A lower rank reads this status in its next step, so this rank only sends it and waits for nothing.
        if wait_for != "all":
            for peer in lower:
                self._outboxes[peer].give_status(awaited=False)
        if wait_for == "none":
            for peer in higher:
                self._outboxes[peer].give_status(awaited=False)
        else:
            # Statuses travel from low to high ranks: each rank waits for the lower ranks before it confirms to the
            # higher ones, so there is no circle.
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
            # Both ends of a connection compute the buffers of the next step at the same point, from the same history of
            # sizes.
            self._outboxes[peer].plan(program.departures[peer])
            self._inboxes[peer].prepare(arrivals)

    def fail(self, program: Program, failure: Failure) -> None:
        """Send a failure in place of all remaining messages, and wait until the peers have received it.

        A rank without memory for the remaining messages only waits until the failure is sent. The remaining tensors are
        never sent, and a GPU would wait for the receives that are posted for them. The transfers are therefore aborted.
        """
        self._has_failed = True
        self._meeting.leave_word(failure)
        for peer in program.departures:
            self._outboxes[peer].give_failure(failure)
        for peer in program.arrivals:
            # Draining keeps receiving until the peer knows of the failure. The peer may be blocked in a send to this
            # rank, and would not read the failure before that send has ended.
            if not self._inboxes[peer].drain():
                self._outboxes[peer].let_failure_leave(time.monotonic() + _TO_LEAVE)
        if program.arrivals:
            self._abort()

    def cause_of(self, error: ConnectionError) -> Exception:
        """Return the failure for which a rank ended its connections; the error itself if no rank has left one."""
        failure = self._meeting.read_word()
        return error if failure is None else PeerFailed(failure)

    def _abort(self) -> None:
        """Stop the transfers of separate tensors. The lanes of headers end with their last reference.

        Transfers of finished steps complete first, unless a rank is gone: a GPU may run behind its host.
        """
        if self._lanes is None:
            return
        until = time.monotonic() + self.timeout.total_seconds()
        while self._last_step is not None and not self._last_step.query() and time.monotonic() < until:
            time.sleep(_PAUSE)
        self._lanes.abort()
        self._lanes = self._last_step = None
