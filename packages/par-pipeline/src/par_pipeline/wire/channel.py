"""Messages between the ranks of a pipeline.

To each neighbour there is one communicator for what goes to higher ranks and one for what goes to lower ones, so that a
send never waits behind a receive. All receives of a step are posted, in the order in which the peer sends, as far as a
budget of bytes allows; each further one when an earlier one has arrived.

They are posted at the end of a step, for one like it: nobody sends then. Gloo's thread spins for a connection that a
rank is sending or posting on, and for milliseconds if it has come to the rank's core meanwhile; that happened in every
step while receives were posted and told of beside the first sends. Whatever a rank sends next takes the buffers in
their order, so both ranks reckon how large each is: what an evaluation sends may find those of a training step.

A rank that waits looks for a while before it sleeps, and lets others run meanwhile. Waking it up takes longer than a
tiny action, and as often as not it wakes up on another core, whose caches are cold.

Headers go over gloo, whatever the group has: it is they that the host waits for, with a timeout, and that bring word of
a failure. Tensors on GPUs follow over NCCL, which only streams wait for.
"""

import os
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import Failure, PeerFailed
from .._program import STATUS, Arrival, Message, Program
from .._structure import Signature, flatten
from .message import Header, Kind, encode, encode_failure, room_for

Contents = tuple[Signature, list[Tensor]]

NOTHING = flatten(())[1]
_AWAKE = 2e-3  # seconds in which a rank that waits does not sleep; other threads of its process need the interpreter
_let_others_run = getattr(os, "sched_yield", partial(time.sleep, 0))  # Windows has no sched_yield
_FOR_KERNELS = timedelta(minutes=30)  # NCCL counts from when it was asked, and kernels before it take their time


class Lanes(NamedTuple):
    """The private communicators of a pipeline.

    Args:
        up: To higher ranks; gloo.
        down: To lower ranks; gloo.
        up_second: To higher ranks, for what a message announced; NCCL where tensors are on GPUs.
        down_second: To lower ranks, likewise.
    """

    up: Any
    down: Any
    up_second: Any
    down_second: Any


def make_lanes(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Lanes:
    """Communicators of a group's ranks alone; torch's `new_group` would have to be called by all other ranks, too.

    Args:
        group: The ranks.
        device: Of the tensors.
        timeout: Of everything.
    """
    nonce = [uuid.uuid4().hex]
    dist.broadcast_object_list(nonce, group=group, group_src=0)
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def make(kind: Any, name: str, options: Any) -> Any:
        prefixed = dist.distributed_c10d.PrefixStore(f"par_pipeline/{nonce[0]}/{name}", store)
        return kind(prefixed, rank, size, options)

    options = _one_thread(timeout)
    up, down = make(dist.ProcessGroupGloo, "up", options), make(dist.ProcessGroupGloo, "down", options)
    if device.type == "cpu":
        return Lanes(up, down, up, down)  # gloo tells messages apart by their tags, too
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = max(timeout, _FOR_KERNELS)
    return Lanes(up, down, *(make(dist.ProcessGroupNCCL, name, options) for name in ("up_second", "down_second")))


def _one_thread(timeout: timedelta) -> Any:
    """Of gloo communicators that share the thread which reads and writes: two of them would be in each other's way."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
    options._timeout, options._devices = timeout, devices
    return options


class Wire:
    """This rank's connections.

    Args:
        group: The ranks of the pipeline.
        device: Where tensors are sent from: a GPU that the group has NCCL for, or the CPU.
        timeout: Of each wait.
        ahead: Bytes of receives that may be posted ahead, in all.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, ahead: int) -> None:
        self._group, self._device, self._timeout, self._ahead = group, device, timeout, ahead
        self._rank = dist.get_rank(group)
        self._channels: dict[int, Channel] = {}
        self._lanes = make_lanes(group, device, timeout)

    def reset(self) -> None:
        """Makes new connections: what was under way is forgotten. Collective over the group."""
        dist.barrier(group=self._group)  # the old ones stay until everybody has heard of the failure
        self._channels = {}
        if self._device.type != "cpu":
            self._lanes.up_second.abort()
            self._lanes.down_second.abort()
        self._lanes = make_lanes(self._group, self._device, self._timeout)

    def begin(self, program: Program) -> None:
        """Begins a step.

        Raises:
            ConnectionError: A neighbour is gone.
        """
        for peer, arrivals in program.arrivals.items():
            if peer not in self._channels:
                self._channels[peer] = self._connect(peer, self._ahead // len(program.arrivals))
            self._channels[peer].begin(program.departures[peer], arrivals, program.consumed)
        for peer in program.arrivals:  # now that all have begun: a failure is told through every one
            self._channels[peer].expect()

    def _connect(self, peer: int, room: int) -> "Channel":
        up, down, up_second, down_second = self._lanes
        upwards = peer > self._rank
        sends, receives = ((up, up_second), (down, down_second)) if upwards else ((down, down_second), (up, up_second))
        return Channel(peer, sends, receives, device=self._device, timeout=self._timeout, room=room)

    def take(self, message: Message, source: int) -> Contents:
        """Waits for a message.

        Raises:
            PeerFailed: The source says that the step failed.
            ConnectionError: It is gone, or does not answer.
        """
        return self._channels[source].take(message)

    def give(self, message: Message, target: int, contents: Contents) -> None:
        """Begins to send a message."""
        self._channels[target].give(message, contents)

    def end(self, program: Program, *, together: bool) -> None:
        """Ends a step: tells the others that this rank is done, and hears that lower ranks are.

        That higher ranks are done, too, is heard in the next step, before anything else from them: the first rank may
        begin with the next batch while the last one is still busy with this one.

        Args:
            program: Of the step; the next one may be the same.
            together: Whether to wait for the higher ranks, too.
        """
        lower = [channel for peer, channel in self._channels.items() if peer < self._rank]
        higher = [channel for peer, channel in self._channels.items() if peer > self._rank]
        if not together:
            self._tell(lower, heard=False)
        self._hear(lower)
        self._tell(higher, heard=True)
        if together:
            self._hear(higher)
            self._tell(lower, heard=True)
        for peer, arrivals in program.arrivals.items():
            self._channels[peer].prepare(program.departures[peer], arrivals)

    @staticmethod
    def _tell(channels: Sequence["Channel"], *, heard: bool) -> None:
        for channel in channels:
            channel.tell(heard=heard)

    @staticmethod
    def _hear(channels: Sequence["Channel"]) -> None:
        for channel in channels:
            channel.take(STATUS)

    def fail(self, program: Program, failure: Failure) -> None:
        """Sends word of a failure in place of all that is owed, and waits until the neighbours have heard of it."""
        for instruction in program.instructions:
            if instruction.gives is not None and instruction.target != self._rank:
                self._channels[instruction.target].give_failure(instruction.gives, failure)
        for channel in self._channels.values():
            channel.give_failure(STATUS, failure)
        for channel in self._channels.values():
            channel.drain()


class Posted(NamedTuple):
    """A receive that waits for its message.

    Args:
        buffer: Where it will be.
        first: The buffer's first byte, which tells that something has come.
        work: Done when all has.
    """

    buffer: Tensor
    first: Tensor
    work: Any


class Channel:
    """The connection with one other rank.

    Args:
        peer: That rank.
        sends: Communicators for messages, and for seconds.
        receives: Likewise.
        device: Where tensors are sent from.
        timeout: Of each wait.
        room: Bytes of receives that may be posted ahead.
    """

    def __init__(
        self,
        peer: int,
        sends: tuple[Any, Any],
        receives: tuple[Any, Any],
        *,
        device: torch.device,
        timeout: timedelta,
        room: int,
    ) -> None:
        self._peer, self._sends, self._receives = peer, sends, receives
        self._device, self._timeout = device, timeout
        self._gives = {STATUS: NOTHING}  # what the peer expects of each message, and ...
        self._takes = {STATUS: NOTHING}  # ... this rank
        self._coming: deque[Arrival] = deque()
        self._posted: deque[Posted] = deque()  # buffers for what comes first, and ...
        self._planned: deque[int] = deque()  # ... bytes of those for what comes then
        self._rooms: deque[int] = deque()  # bytes of the peer's, for what it is sent next
        self._room = room
        self._heard = False
        self._told: list[tuple[Tensor, Any]] = []

    def begin(
        self, departures: tuple[Message, ...], arrivals: tuple[Arrival, ...], consumed: dict[Message, int]
    ) -> None:
        """Begins a step.

        Args:
            departures: What the peer is sent.
            arrivals: What it sends.
            consumed: See `Program`.
        """
        self._plan(departures, arrivals)
        self._late = len(self._coming)  # what a higher rank says at the end of the last step
        self._coming.extend(arrivals)
        self._consumed = consumed
        self._arrived: dict[Message, Contents] = {}
        self._given: set[Message] = set()
        self._sending: deque[tuple[int, list[tuple[Tensor, Any]]]] = deque()

    def _plan(self, departures: tuple[Message, ...], arrivals: tuple[Arrival, ...]) -> None:
        """Sees to it that there are buffers for a step, on either side. The peer does so at the same point."""
        there = len(self._posted) + len(self._planned)
        coming = [each.message for each in (*self._coming, *arrivals)]
        self._planned.extend(room_for(self._takes.get(each), self._device) for each in coming[there:])
        leaving = departures[len(self._rooms) :]
        self._rooms.extend(room_for(self._gives.get(each), self._device) for each in leaving)

    def prepare(self, departures: tuple[Message, ...], arrivals: tuple[Arrival, ...]) -> None:
        """Posts the receives of a step that may come; see `begin`."""
        self._plan(departures, arrivals)
        with suppress(ConnectionError):  # a rank that is done may have left
            self._post_ahead()

    def expect(self) -> None:
        """Posts the first receive, if none is."""
        if not self._posted:
            self._post()

    def _post(self) -> None:
        """Posts the next receive."""
        size = self._planned[0]
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        first = buffer[0].fill_(Kind.UNWRITTEN)
        self._posted.append(Posted(buffer, first, self._receive_into(buffer, 0)))
        self._planned.popleft()
        self._room -= size

    def _post_ahead(self) -> None:
        """Posts receives while there is room, and one always."""
        while self._planned and (not self._posted or self._room > 0):
            self._post()

    def take(self, message: Message) -> Contents:
        """Waits for a message, and so for all that were sent before it."""
        self._post_ahead()  # it would wait anyway
        while message not in self._arrived:
            arrival, header, second = self._receive()
            if header.failure is not None:
                raise PeerFailed(header.failure)
            if self._late:
                self._late -= 1
                continue
            expected = self._takes.get(arrival.message)
            contents = header.decode(second, expected)
            if contents[0] is not expected:
                self._takes[arrival.message] = contents[0]
            self._arrived[arrival.message] = contents
            self._settle(arrival.position)
        return self._arrived.pop(message)

    def _receive(self) -> tuple[Arrival, Header, Tensor | None]:
        """The next message that the peer sends."""
        buffer, first, work = self._posted.popleft()
        until = time.perf_counter() + _AWAKE
        while first.item() == Kind.UNWRITTEN and time.perf_counter() < until:
            _let_others_run()
        self._wait(work)
        self._room += buffer.nbytes
        header = Header(buffer, first.item())
        self._heard = header.failure is not None
        second = None
        if header.second:
            second = torch.empty(header.second, dtype=torch.uint8, device=self._device)
            self._wait(self._receive_into(second, 1), 1)
        self._post_ahead()
        return self._coming.popleft(), header, second

    def give(self, message: Message, contents: Contents) -> None:
        """Begins to send a message."""
        signature, tensors = contents
        parts = encode(signature, tensors, self._gives.get(message), self._rooms.popleft(), self._device)
        self._given.add(message)
        self._gives[message] = signature
        works = [(part, self._send(part, number)) for number, part in enumerate(parts)]
        self._sending.append((self._consumed[message], works))

    def tell(self, *, heard: bool) -> None:
        """Says that this rank is done with the step.

        Args:
            heard: Whether the peer waits for that in this step. This rank then stays until it is on its way; it may
                leave afterwards. A peer that does not may leave itself, and gloo would not tell who waits to send.
        """
        self.end()
        with suppress(ConnectionError):  # a rank that is done may have left
            for _, work in self._told:
                self._wait(work)
            self._told.clear()
            (part,) = encode(NOTHING, [], NOTHING, self._rooms.popleft(), self._device)
            work = self._send(part, 0)
            if heard:
                self._wait(work)
            else:
                self._told.append((part, work))
        self._given.add(STATUS)

    def _settle(self, position: int) -> None:
        """The peer has come to this place of its actions, so it has what it needed up to there."""
        while self._sending and self._sending[0][0] <= position:
            self._sending.popleft()

    def end(self) -> None:
        """Waits until all is sent."""
        while self._sending:
            for number, (_, work) in enumerate(self._sending.popleft()[1]):
                self._wait(work, number)

    def give_failure(self, message: Message, failure: Failure) -> None:
        """Begins to send word of a failure in place of a message that was not sent."""
        if message in self._given:
            return
        buffer = encode_failure(failure)
        with suppress(ConnectionError):
            self._sending.append((0, [(buffer, self._send(buffer, 0))]))

    def drain(self) -> None:
        """Receives and drops until the peer has heard of the failure: until it says so, or is done."""
        with suppress(ConnectionError):
            while self._coming and self._posted and not self._heard:
                self._receive()

    def _send(self, part: Tensor, number: int) -> Any:
        try:
            return self._sends[number].send([part], self._peer, number)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _receive_into(self, buffer: Tensor, number: int) -> Any:
        try:
            return self._receives[number].recv([buffer], self._peer, number)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Any, number: int = 0) -> None:
        try:
            if number == 0:
                work.wait(self._timeout)
            else:  # NCCL lets the host wait only if it is given a timeout; the communicator has one
                work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> ConnectionError:
        seconds, reason = self._timeout.total_seconds(), str(error).splitlines()[0]
        return ConnectionError(f"rank {self._peer} is gone, or did not answer within {seconds:g} s ({reason})")
