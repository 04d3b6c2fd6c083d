"""A rank's end of the line to the referee, and what it does when an operation is told to run."""

import gc
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from . import options
from .buffers import Buffers
from .clock import Clock, Times
from .devices import DeviceOfRank, OnDevice
from .operation import Entry, Operation
from .payloads import Share
from .queues import Party
from .referee import payload_of

Compute = Callable[[Sequence[Share]], list[bytes]]
"""From the shares of all that take part, in the order of the group, to the bytes of this rank's outputs."""


class StrictError(RuntimeError):
    """Ranks would hang, or compute something else than what the program says, if this were NCCL."""


class StrictWork(dist.Work):
    """One operation of this rank.

    Args:
        player: Who runs it.
        entry: What was issued.
        buffers: Its tensors.
        compute: What it makes of the payloads.
        early: Whether it completes as soon as it has run, not when it is waited for.
    """

    def __init__(self, player: "Player", entry: Entry, buffers: Buffers, compute: Compute, *, early: bool) -> None:
        super().__init__()
        self.entry, self.ran = entry, threading.Event()
        self.span = (0.0, 0.0)
        self.on_device: OnDevice | None = None
        self._player, self._compute, self._early = player, compute, early
        self._buffers: Buffers | None = buffers
        self._results: list[bytes] = []
        self._lock = threading.RLock()  # a finalizer that waits may run in the thread that holds it
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._outputs = [memory.tensor for memory in buffers.outputs]

    def run(self, shares: Sequence[Share], span: tuple[float, float]) -> None:
        """All ranks have come; called by the player's thread.

        Args:
            shares: What each of them brings.
            span: When it begins and ends, in virtual time.
        """
        results = self._compute(shares)
        with self._lock:
            self._results, self.span = results, span
            self._player.note(self)
            self.ran.set()
            at_once = self._early or self._future is not None
        if at_once:
            self.complete()

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - torch's signature; the referee sees who waits in vain
        """Waits until it is complete, and with it all earlier ones of its communicator."""
        self._player.wait(self)
        return True

    def complete(self) -> None:
        """Brings the results into the outputs, once."""
        with self._lock:  # until all is written, for whoever waits meanwhile
            if self._buffers is None:
                return
            misuse = self._buffers.complete(self._results)
            self._buffers = None
        if misuse:
            self._player.report(f"rank {self.entry.rank}, {self.entry.operation}: {misuse}")
        elif self._future is not None:
            self._future.set_result(self._outputs)

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future that completes by itself, as soon as the operation has run."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            ran, complete = self.ran.is_set(), self._buffers is None
            future = self._future
        if complete:
            future.set_result(self._outputs)
        elif ran:
            self.complete()
        self._charge_later()
        return future

    def _charge_later(self) -> None:
        """In virtual time, who took a future waits at the end of the backward pass, or at once if there is none."""
        if self._player.clock is None and self.on_device is None:
            return
        try:
            at_the_end_of_backward(self._wait_in_virtual_time)
        except RuntimeError:  # there is no backward pass
            self._wait_in_virtual_time()

    def _wait_in_virtual_time(self) -> None:
        self._player.until_ran(self)
        self._player.pass_time(self)

    def is_completed(self) -> bool:
        """Whether the outputs can be read."""
        return self._buffers is None

    def is_success(self) -> bool:
        """Whether it has completed without a fault."""
        return self.is_completed() and self._player.fault is None

    def exception(self) -> StrictError | None:
        """What was wrong in this world, if anything was."""
        return StrictError(self._player.fault) if self._player.fault else None

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs


class Player:
    """Issues this rank's operations, in the order in which the program asks, and runs them when the referee says so.

    Args:
        folder: Of the referee.
        rank: This rank of the world.
        strict: What is enforced.
        device: Its device, if it has one.
    """

    def __init__(self, folder: Path, rank: int, strict: options.Strict, device: DeviceOfRank | None = None) -> None:
        self.fault: str | None = None
        self.rank, self.strict, self.device = rank, strict, device
        self.clock = Clock(strict.compute or options.Compute()) if strict.links else None
        if self.clock is not None and device is not None:
            self.clock.current = lambda: device.time
        self._folder = folder
        self._numbers = 0
        self._works: dict[int, StrictWork] = {}
        self._lanes: defaultdict[str, deque[StrictWork]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._sending = threading.RLock()  # a finalizer may send where the collector runs within this thread's sending
        self._line = Client(str(folder / "referee"))
        self._send(rank)
        self._thread = threading.Thread(target=self._listen, name="strict player", daemon=True)
        self._thread.start()

    def issue(
        self,
        communicator: str,
        members: tuple[int, ...],
        operation: Operation,
        buffers: Buffers,
        compute: Compute,
        joined: tuple[int, ...] = (),
    ) -> StrictWork:
        """Hands an operation to the referee.

        Args:
            communicator: The name of the communicator.
            members: The ranks that it joins and that have a process.
            operation: What is asked for.
            buffers: Its tensors.
            compute: From the shares of `members` to the bytes of this rank's outputs.
            joined: All ranks that it joins.

        Raises:
            StrictError: Something has been wrong before.
        """
        self._check()
        with self._lock:
            self._numbers += 1
            entry = Entry(
                rank=self.rank,
                number=self._numbers,
                communicator=communicator,
                members=members,
                operation=operation,
                time=0.0 if self.clock is None else self.clock.now,
                joined=joined,
            )
            work = StrictWork(self, entry, buffers, compute, early=self._early(communicator))
            self._works[entry.number] = work
            self._lanes[communicator].append(work)
            if payload := buffers.payload:
                payload_of(self._folder, (self.rank, entry.number)).write_bytes(payload)
            self._send(("issue", entry))
        return work

    def wait(self, work: StrictWork) -> None:
        """Until an operation has run; then completes it, and those of its communicator before it.

        Raises:
            StrictError: It will never run, or something else has been wrong.
        """
        if not work.ran.is_set():
            self._send(("wait", work.entry.number))
            self.until_ran(work)
        self._check()
        if not work.ran.is_set():
            return  # a finalizer waits, within the run of this operation, for tensors that nobody reads any more
        self.pass_time(work)
        lane = self._lanes[work.entry.communicator]
        while lane and lane[0].entry.number <= work.entry.number:
            lane.popleft().complete()
        work.complete()
        self._check()

    def until_ran(self, work: StrictWork) -> None:
        """Return when an operation has run, or when nothing runs any more."""
        if threading.current_thread() is not self._thread:
            work.ran.wait()
            return
        # The garbage collector may finalize a module in this thread, and its finalizer may wait for a collective, which
        # runs when this thread hears of it, unless it runs already.
        while work.entry.number in self._works and not work.ran.is_set() and self._hear():
            pass

    def note(self, work: StrictWork) -> None:
        """The clock hears when an operation ran."""
        if self.clock is not None:
            self.clock.ran(work.entry.communicator, work.entry.operation.name, *work.span)

    def pass_time(self, work: StrictWork) -> None:
        """The clock, or the current stream of a device, goes on to the end of an operation that is waited for."""
        name, sites = work.entry.operation.name, work.entry.operation.sites
        if work.on_device is not None:
            work.on_device.wait(work.span[1], sites[0] if sites else name)
        elif self.clock is not None:
            self.clock.line.wait(work.span[1], sites[0] if sites else name)

    def report(self, words: str) -> None:
        """Something is wrong on this rank."""
        self.fault = self.fault or words
        self._send(("fault", words))

    def end(self, how: str) -> None:
        """This rank will issue nothing more."""
        self._send(("ended", how))

    def _early(self, communicator: str) -> bool:
        if self.strict.complete == "drawn":
            return random.Random(f"{self.strict.draw} {communicator} {self._numbers}").random() < 0.5
        return self.strict.complete == "early"

    def _check(self) -> None:
        if self.fault is not None:
            raise StrictError(self.fault)

    def _send(self, message: object) -> None:
        """Send to the referee."""
        # Pickled before the lock is taken: a finalizer that sends may run while Python makes objects.
        message = ForkingPickler.dumps(message)
        with self._sending:
            self._line.send_bytes(message)

    def _listen(self) -> None:
        """Hear the referee until it is gone. Runs in a thread."""
        while self._hear():
            pass

    def _hear(self) -> bool:
        """Do what the next message says; return whether there was one."""
        collects = False
        try:
            try:
                self._line.poll(None)
                # The garbage collector may finalize a module in this thread, whose finalizer waits for an operation.
                # That one runs after the operation of this message, so nothing is collected until this one has run.
                collects = gc.isenabled()
                gc.disable()
                word, what = self._line.recv()
            except (EOFError, OSError):
                self._stop("the referee is gone")
                return False
            if word == "run":
                self._run(*what)
            else:
                self._stop(what)
            return True
        finally:
            if collects:
                gc.enable()

    def _run(self, number: int, party: Party, span: tuple[float, float]) -> None:
        work = self._works.pop(number)
        paths = [payload_of(self._folder, (entry.rank, entry.number)) for entry in party]
        payloads = [path.read_bytes() if path.exists() else b"" for path in paths]
        shares = sorted(zip(party, payloads, strict=True), key=lambda share: work.entry.members.index(share[0].rank))
        try:
            work.run(shares, span)
        except Exception as error:  # of a thread that nobody waits for: all ranks must hear of it
            self.report(f"rank {self.rank}, {work.entry.operation}: {type(error).__name__}: {error}")
            work.ran.set()
        self._send(("done", number))

    def _stop(self, words: str) -> None:
        """Wakes up whoever waits."""
        self.fault = self.fault or words
        for work in list(self._works.values()):
            work.ran.set()


_players: list[Player] = []
"""The player of this process, once its strict backend has been made known."""


def strict_time() -> Times:
    """Virtual time of this rank since this was last called, or since its start.

    Raises:
        RuntimeError: No time is reckoned.
    """
    return clock_of_this_rank().read()


def clock_of_this_rank() -> Clock:
    """The clock of this rank's virtual time.

    Raises:
        RuntimeError: No time is reckoned.
    """
    clock = _players[0].clock if _players else None
    if clock is None:
        raise RuntimeError('no virtual time is reckoned; give the test backend="strict", strict=Strict(links=Links())')
    return clock


def at_the_end_of_backward(call: Callable[[], None]) -> None:
    """Calls a function when the backward pass that is under way ends.

    Raises:
        RuntimeError: There is none.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
