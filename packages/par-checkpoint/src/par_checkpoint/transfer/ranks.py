"""The communicator of the ranks that save or load together, and their agreement on errors.

All messages are CPU bytes over gloo, whatever the backend of the group: a save in the background must never wait for
the trainer's collectives.

No rank collects one object from every other rank, because that would not scale to thousands of ranks. Ranks compare
equal values by sums of digests. If values differ, one rank of each kind broadcasts its value.
"""

import hashlib
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from crc32c import crc32c

from par_groups import bytes_of

from .._errors import CheckpointError, UnansweredError
from .._torch_private import all_gather_into, gloo_among, gloo_of, set_timeout_of
from .errors import PortableError, attempt
from .roll import Roll
from .workers import Workers

Value = TypeVar("Value")

_HEAD = struct.Struct("<qII")
_ROOM = 1008  # bytes of a broadcast message that are sent together with its head
_FEW = 16  # number of distinct values up to which their ranks broadcast them one after the other
_PATIENCE = timedelta(days=1)  # gloo's own timeout while two ranks connect; `Ranks` applies the shorter, real one
_CLOSING = 2.0  # seconds to wait for gloo to close its connections, which takes milliseconds
_NOTICE = timedelta(seconds=60)  # time after which a warning names ranks that have not joined a call


class PeerTransfer:
    """A transfer of bytes to or from another rank.

    Args:
        work: Handle from torch.
        timeout: Maximum time to wait.
        lost: Function that converts torch's error into the error for a rank that does not answer.
    """

    def __init__(self, work: Any, timeout: timedelta, lost: Callable[[Exception], CheckpointError]) -> None:
        self._work, self._timeout, self._lost = work, timeout, lost

    def wait(self) -> None:
        """Wait until the buffer may be used again.

        Raises:
            CheckpointError: The other rank is gone, or does not answer.
        """
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error


class Ranks:
    """The ranks of a group, or a single process, with a gloo communicator of their own.

    On the group's communicator, a message of a save could match a collective that the trainer calls on another rank or
    in another thread. gloo ends the process if two kinds of operations match.

    Args:
        group: The ranks that take part; None: only this process.
        timeout: Seconds after which a transfer with a rank that does not answer raises.
        roll: The roll of the ranks that have joined the present call; None: a new roll.
        in_background: Whether the communicator is for background work, which ranks do not join by a call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: float,
        *,
        roll: Roll | None = None,
        in_background: bool = False,
    ) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._timeout = timedelta(seconds=timeout)
        self._machines: list[tuple[Sequence[int], str]] | None = None  # by number: its ranks, and its name
        self._met = set(range(self.size))  # the ranks that this one is connected with
        self._gloo: Any = None
        self._failure = ""  # the text of the first error of gloo; the error itself would hold this object in a cycle
        self._name, self._in_background = "", in_background
        if group is not None and self.size > 1:
            self._roll = roll or Roll.of(group)
            if self._roll.is_lost:
                self._gloo = self._gloo_of_trainer(group)
            else:
                self.connect()

    @classmethod
    def in_store(cls, store: Any, call: str, rank: int, size: int, timeout: float) -> "Ranks":
        """Return the communicator of processes that meet in a store and need not be in one world; see `connect`.

        Args:
            store: Store whose keys only this communicator uses.
            call: Name of the call that they join, for errors.
            rank: Number of this process among them.
            size: Number of processes.
            timeout: Seconds after which a transfer with a process that does not answer raises.
        """
        ranks = cls(None, timeout)
        ranks.rank, ranks.size = rank, size
        ranks._roll = Roll(store, rank, range(size))
        ranks._roll.come(call)
        return ranks

    def disconnect(self) -> None:
        """Close all connections for good. It raises an error in each process that still waits. Not collective."""
        # gloo closes its connections in its destructor, which never returns if a peer has died while it connected (seen
        # with torch 2.13). So a thread drops the last reference. It gets time, because it would abort the process if
        # the interpreter ended in the destructor.
        held, self._gloo = [self._gloo], None
        closing = threading.Thread(target=held.clear, name="par-checkpoint-disconnect", daemon=True)
        closing.start()
        closing.join(_CLOSING)

    def set_timeout(self, timeout: float) -> None:
        """Set the seconds that all later calls wait for a rank that does not answer."""
        if self._timeout != timedelta(seconds=timeout):
            self._timeout = timedelta(seconds=timeout)
            if self._gloo is not None:
                set_timeout_of(self._gloo, self._timeout)

    def connect(self) -> None:
        """Make a communicator, as after `in_store`. Collective over these ranks alone, unlike torch's `new_group`."""
        if self.size == 1:
            return
        self._name = self._roll.next_name()
        try:
            self._gloo = gloo_among(self._roll.store_for(self._name), self.rank, self.size, _PATIENCE)
            set_timeout_of(self._gloo, self._timeout)
            # A rank connects only with ranks that have published their side. gloo would otherwise wait inside the
            # store's client, which blocks every other thread of this process that uses the store.
            self._roll.publish(self._name)
            self._meet()
        except BaseException:
            # Ranks that join later compute the same name only if this attempt does not count.
            self._roll.give_back()
            raise

    def _gloo_of_trainer(self, group: dist.ProcessGroup) -> Any:
        """Return the group's own communicator, because without a store no new one can be made.

        Raises:
            CheckpointError: It has none for the CPU, or the save is to run while the trainer uses it.
        """
        gloo = None if self._in_background else gloo_of(group)
        if gloo is None:
            raise CheckpointError(
                "the store of torch.distributed is gone, as after a torchrun that was killed, so no communicator for "
                "this call can be made; make a group with gloo for the CPU, such as backend='cpu:gloo,cuda:nccl', and "
                "save without async_=True"
            )
        return gloo

    def _lost(self, error: Exception | str) -> CheckpointError:
        """Return the error for a rank that does not answer. It names the ranks that have not joined the call.

        Args:
            error: The error from torch, or the cause as a text.
        """
        if isinstance(error, CheckpointError):
            return error
        lost = self._roll.unanswered(error, self._timeout, in_background=self._in_background)
        if isinstance(error, Exception):
            self._failure = self._failure or str(lost)
        return lost

    @property
    def _connected(self) -> Any:
        """The communicator, until one of its calls fails.

        After that, ranks disagree which call is the next one, and gloo ends the process if two kinds of calls match.
        """
        if self._failure:
            raise UnansweredError(
                f"an earlier call failed, and no other one can follow it; restart the run: {self._failure}"
            )
        return self._gloo

    def _wait(self, work: Any) -> None:
        """Wait for a collective.

        After a minute, long before the timeout, a warning names the ranks that have not joined the call.
        """
        left = self._timeout
        try:
            if left > _NOTICE and not self._in_background:
                with suppress(RuntimeError):
                    work.wait(_NOTICE)
                    return
                # A work that is completed here has failed, and the wait below raises its error.
                if not work.is_completed():
                    self._roll.warn(_NOTICE)
                left -= _NOTICE
            work.wait(left)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _meet(self) -> None:
        """Connect with the ranks that collectives of this rank use: those 1, 2, 4, ... away, on either side."""
        # A collective would connect lazily, in a thread of gloo that no timeout can stop. These messages connect in a
        # thread of ours, which `_begun` can leave behind.
        self._met.clear()
        byte, other = torch.zeros(2, 1, dtype=torch.uint8, device="cpu")
        for step in (1 << power for power in range((self.size - 1).bit_length())):
            receiving = self.receive(other, (self.rank - step) % self.size)
            self.send(byte, (self.rank + step) % self.size).wait()
            receiving.wait()

    def total(self, values: Sequence[int]) -> list[int]:
        """Return the sums of integers over all ranks. The sums must fit in 64 bits.

        Raises:
            RuntimeError: Another rank is gone.
        """
        if self._gloo is None:
            return list(values)
        # Each rank adds a 1. If a rank dies, gloo may return a sum without its values instead of an error, and only the
        # count shows it.
        sums = torch.tensor([1, *values], dtype=torch.int64, device="cpu")
        self._wait(self._connected.allreduce([sums]))
        count, *totals = sums.tolist()
        if count != self.size:
            self._failure = f"{count} of {self.size} ranks of the group have taken part in a sum"
            raise RuntimeError(f"{self._failure}; restart the run with all ranks")
        return totals

    def tell(self, act: Callable[[], tuple[Value, Sequence[int]]], count: int) -> tuple[Value, list[int]]:
        """Call a function that may fail on this rank, and sum its integers over all ranks.

        Args:
            act: Function that returns a value for this rank, and integers.
            count: Number of the integers.

        Returns:
            This rank's own value, and the sums of the integers.

        Raises:
            Exception: `act` failed on some rank; every rank raises that error.
        """
        # A rank that failed still takes part in the sum, with zeros. If it raised first, the other ranks would wait for
        # it until the timeout.
        result, error = attempt(act)
        failed, *sums = self.total([0, *result[1]] if result is not None else [1] + [0] * count)
        if failed:
            self._raise(error)
        return cast("tuple[Value, Sequence[int]]", result)[0], sums

    def agree(self, act: Callable[[], Value]) -> Value:
        """Call a function that may fail on this rank. If it failed on any rank, every rank raises that error."""
        return self.tell(lambda: (act(), ()), 0)[0]

    def raise_first(self, error: BaseException | None) -> None:
        """Raise the error of the first rank that has one, on every rank and with the rank's number."""
        if self.total([int(error is not None)])[0]:
            self._raise(error)

    def _raise(self, mine: BaseException | None) -> None:
        """Raise the error of the first rank that has one, after the ranks know that some rank has one."""
        errors = self.distinct(None if mine is None else PortableError.of(mine))
        # This rank raises its own KeyboardInterrupt or SystemExit unchanged, but only after the collective, so that the
        # other ranks receive an error instead of waiting.
        if mine is not None and not isinstance(mine, Exception):
            raise mine
        rank, first = next((ranks[0], error) for ranks, error in errors if error is not None)
        # If every rank has failed in the same way, the error belongs to no rank in particular.
        raise first.error("" if len(errors) == 1 else f"rank {rank}: ") from mine

    def distinct(self, value: Value) -> list[tuple[Sequence[int], Value]]:
        """Return the distinct values of all ranks with the ranks that have each value, by their first rank."""
        return [(ranks, pickle.loads(data)) for ranks, data in self.distinct_bytes(pickle.dumps(value))]  # noqa: S301

    def distinct_bytes(self, mine: bytes) -> list[tuple[Sequence[int], bytes]]:
        """Return the distinct bytes of all ranks with the ranks that have them, by their first rank.

        Every rank sends a digest. The first rank of each distinct value then broadcasts the value.

        Raises:
            RuntimeError: Another rank is gone.
        """
        if self._gloo is None:
            return [(range(1), mine)]
        own = torch.tensor([*_halves(mine), len(mine)], device="cpu")
        told = torch.empty(self.size, 3, dtype=torch.int64, device="cpu")
        self._gather(told, own[None])
        alike: dict[tuple[int, int, int], list[int]] = {}
        for rank, (high, low, size) in enumerate(told.tolist()):
            alike.setdefault((high, low, size), []).append(rank)
        if len(alike) == 1:
            return [(range(self.size), mine)]
        firsts = {ranks[0]: size for (_, _, size), ranks in alike.items()}
        # One gather brings all short values, padded to the longest of them. A value of over four times the mean is
        # broadcast separately, because the padding of every rank would become as long.
        usual = 4 * -(-sum(firsts.values()) // len(firsts))
        long = {rank for rank, size in firsts.items() if len(firsts) <= _FEW or size > usual}
        found = {rank: bytes(self._broadcast(mine, size, rank)) for rank, size in firsts.items() if rank in long}
        if short := {rank: size for rank, size in firsts.items() if rank not in long}:
            room = max(short.values())
            memory = torch.empty(self.size * room, dtype=torch.uint8, device="cpu")
            self._gather(memory, _padded(mine if self.rank in short else b"", room))
            every = bytes_of(memory)
            found.update({rank: bytes(every[rank * room : rank * room + size]) for rank, size in short.items()})
        # If a rank dies, gloo may complete without filling the buffer. Comparing the digests detects it.
        for (high, low, _), ranks in alike.items():
            if _halves(found[ranks[0]]) != (high, low):
                raise _broken(ranks[0])
        return [(ranks, found[ranks[0]]) for ranks in alike.values()]

    def hosts(self) -> list[int]:
        """Return the number of each rank's machine. The first call is collective."""
        machine = {rank: number for number, (ranks, _) in enumerate(self.machines()) for rank in ranks}
        return [machine[rank] for rank in range(self.size)]

    def machines(self) -> list[tuple[Sequence[int], str]]:
        """Return the ranks and the host name of each machine, by its number. The first call is collective."""
        if self._machines is None:
            self._machines = self.distinct(socket.gethostname())
        return self._machines

    def to_first(self, mine: bytes) -> list[memoryview]:
        """Return the bytes of every rank on rank 0, in any order, and an empty list on the other ranks.

        The bytes travel up a binary tree, so that no rank receives from many ranks.
        """
        parts = [memoryview(mine)]
        step = 1
        while step < self.size:
            # A binary tree: in each round, half of the remaining ranks send all that they have to the rank `step`
            # below, and are done.
            if self.rank % (2 * step):
                data = b"".join(piece for part in parts for piece in (len(part).to_bytes(8), part))
                head = _head(data)
                for message in (head, data):
                    self.send(_padded(message, len(message)), self.rank - step).wait()
                return []
            source = self.rank + step
            if source < self.size:
                frame = torch.empty(_HEAD.size, dtype=torch.uint8, device="cpu")
                self.receive(frame, source).wait()
                size, crc = _checked(bytes_of(frame), source)
                # The size of the second message arrives with the first one.
                body = torch.empty(size, dtype=torch.uint8, device="cpu")
                self.receive(body, source).wait()
                received = bytes_of(body)
                if crc32c(received) != crc:
                    raise _broken(source)
                while received:
                    end = 8 + int.from_bytes(received[:8])
                    parts.append(received[8:end])
                    received = received[end:]
            step *= 2
        return parts

    def _broadcast(self, data: bytes, size: int, root: int) -> memoryview:
        """Return the bytes of rank `root` on every rank."""
        memory = _padded(data, size) if self.rank == root else torch.zeros(size, dtype=torch.uint8, device="cpu")
        if size:
            self._wait(self._connected.broadcast(memory, root))
        return bytes_of(memory)

    def broadcast(self, value: Value | None) -> Value:
        """Return rank 0's value on every rank."""
        if self._gloo is None:
            return cast("Value", value)
        # The other ranks do not have the size of the value yet. The first message has a fixed size and carries the head
        # and the first bytes, so that a short value needs only one message.
        data = pickle.dumps(value) if self.rank == 0 else b""
        frame = self._broadcast(_head(data) + data[:_ROOM], _HEAD.size + _ROOM, 0)
        size, crc = _checked(frame, 0)
        message = frame[_HEAD.size :][:size] if size <= _ROOM else self._broadcast(data, size, 0)
        if crc32c(message) != crc:
            raise _broken(0)
        return cast("Value", pickle.loads(message))  # noqa: S301 - from a rank

    def on_first(self, act: Callable[[], Value]) -> Value:
        """Call a function only on rank 0. Every rank returns its result, or raises its error."""
        result, error = attempt(act) if self.rank == 0 else (None, None)
        outcome = self.broadcast((result, None if error is None else PortableError.of(error)))
        if outcome[1] is not None:
            if self.rank == 0 and error is not None:
                raise error
            raise outcome[1].error()
        return cast("Value", outcome[0])

    def send(self, buffer: torch.Tensor, to: int) -> PeerTransfer:
        """Begin to send a contiguous uint8 tensor. Messages between two ranks arrive in order."""
        gloo = self._connected
        return self._begun(lambda: gloo.send([buffer], to, 0), to)

    def receive(self, buffer: torch.Tensor, source: int) -> PeerTransfer:
        """Begin to receive the next message of a rank into a contiguous uint8 tensor."""
        gloo = self._connected
        return self._begun(lambda: gloo.recv([buffer], source, 0), source)

    def _begun(self, begin: Callable[[], Any], peer: int) -> PeerTransfer:
        """Begin a transfer, after the two ranks have connected if it is their first one.

        Raises:
            CheckpointError: The ranks have not connected in time, or the other rank has given up. The thread continues
                to wait, because gloo cannot cancel a connection.
        """
        if peer in self._met:
            return self._transfer(begin)
        if not self._is_there(peer):
            raise self._lost(f"rank {peer} has not made its side of a connection")
        seconds = self._timeout.total_seconds()
        connecting = Workers(1, "par-checkpoint-connect")
        begun = connecting.submit(begin)
        # gloo's connect has no timeout, so it runs in a thread that can be left behind.
        if not wait([begun], seconds).done:
            connecting.leave()
            raise self._lost(f"timed out: rank {peer} has not come to where rank {self.rank} waits for it")
        connecting.close()  # torch aborts a thread that releases a work while the interpreter ends
        transfer = self._transfer(begun.result)
        self._met.add(peer)
        return transfer

    def _transfer(self, begin: Callable[[], Any]) -> PeerTransfer:
        try:
            return PeerTransfer(begin(), self._timeout, self._lost)
        except RuntimeError as error:  # the peer has given up, and has closed its side
            raise self._lost(error) from error

    def _is_there(self, peer: int) -> bool:
        """Return whether a rank makes its side of the communicator within the timeout."""
        notice = min(self._timeout, _NOTICE)
        if self._roll.wait_for(peer, self._name, notice):
            return True
        if notice == self._timeout:
            return False
        if not self._in_background:
            self._roll.warn(_NOTICE)
        return self._roll.wait_for(peer, self._name, self._timeout - notice)

    def _gather(self, every: torch.Tensor, mine: torch.Tensor) -> None:
        """Gather the same number of bytes from every rank into one tensor."""
        gloo = self._connected
        try:
            all_gather_into(gloo, every, mine, self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error


def _padded(data: bytes, size: int) -> torch.Tensor:
    """Return bytes as a uint8 tensor of a given size, padded with zeros."""
    padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
    bytes_of(padded)[: len(data)] = data
    return padded


def words(data: bytes) -> list[int]:
    """Return a digest as integers, whose sums over all ranks can be compared, too."""
    return list(struct.unpack("<8I", hashlib.sha256(data).digest()))


def _halves(data: bytes) -> tuple[int, int]:
    """Return a digest of some bytes as two integers of 64 bits."""
    high, low = struct.unpack_from("<qq", hashlib.sha256(data).digest())
    return high, low


def _head(data: bytes) -> bytes:
    """Return the head of a message: its length, its checksum, and a checksum of these two."""
    size, crc = len(data), crc32c(data)
    return _HEAD.pack(size, crc, crc32c(b"%d %d" % (size, crc)))


def _checked(frame: memoryview, rank: int) -> tuple[int, int]:
    """Return the length and the checksum of a message from a head that a rank has sent."""
    size, crc, check = _HEAD.unpack_from(frame)
    if crc32c(b"%d %d" % (size, crc)) != check:
        raise _broken(rank)
    return size, crc


def _broken(rank: int) -> RuntimeError:
    """Return the error for a message that differs from the one that its rank has sent."""
    return RuntimeError(f"the message of rank {rank} arrived incomplete: a rank of the group is gone; restart the run")
