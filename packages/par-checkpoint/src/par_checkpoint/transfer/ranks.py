"""The ranks that save or load together: their communicator, and how they agree on errors.

All of it is bytes of the CPU over gloo, whatever the backend of the group: a save in the background must never wait for
the trainer's collectives.

No rank collects an object of each other one. What must be the same everywhere is compared by sums; what differs is told
once by each kind of rank; of what every rank tells, as many integers travel as are needed.
"""

import hashlib
import logging
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from crc32c import crc32c

from par_groups import error_text

from .._errors import CheckpointError
from .._torch_private import all_gather_into, gloo_among, gloo_of, set_timeout_of
from ..format.bytes import bytes_of
from .roll import Roll, named_ranks
from .workers import Workers

Value = TypeVar("Value")

_logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<qII")
_ROOM = 1008  # bytes of a message that go with its head
_FEW = 16  # ranks that tell something one after the other; more do so at once
_PATIENCE = timedelta(days=1)  # of gloo, while two ranks connect: how long that may take, `Ranks` decides
_NOTICE = timedelta(seconds=60)  # after which a warning names ranks that have not come to a call


class PeerTransfer:
    """Bytes under way to or from another rank.

    Args:
        work: The handle that torch gave for them.
        timeout: How long to wait at most.
        lost: Makes the error for a rank that does not answer of torch's error.
    """

    def __init__(self, work: Any, timeout: timedelta, lost: Callable[[Exception], CheckpointError]) -> None:
        self._work, self._timeout, self._lost = work, timeout, lost

    def wait(self) -> None:
        """Returns when the buffer may be used again.

        Raises:
            CheckpointError: The other rank is gone, or does not answer.
        """
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error


class Ranks:
    """The ranks of a group, or this process alone, and bytes of the CPU between them, whatever their backend.

    They have a communicator of their own. On the group's, a save would meet whatever collective the trainer calls on
    another rank or in another thread at that moment, and gloo ends the process where two kinds meet.

    Args:
        group: The ranks that take part; None: this process alone.
        timeout: Seconds after which a transfer with a rank that does not answer raises.
        roll: What notes which ranks have come to the present call. None: a new one.
        in_background: Whether ranks meet here beside the calls, so that nobody has to come to one.
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
        self._name = ""
        self._in_background = in_background
        if group is not None and self.size > 1:
            self._roll = roll or Roll(group)
            if self._roll.is_lost:
                self._gloo = self._gloo_of_trainer(group)
            else:
                self._make()

    def set_timeout(self, timeout: float) -> None:
        """Has all calls from now on wait so many seconds for a rank that does not answer."""
        if self._timeout != timedelta(seconds=timeout):
            self._timeout = timedelta(seconds=timeout)
            if self._gloo is not None:
                set_timeout_of(self._gloo, self._timeout)

    def _make(self) -> None:
        """Make a communicator of only these ranks. All other ranks would have to call torch's `new_group`, too."""
        self._name = self._roll.next_name()
        try:
            self._gloo = gloo_among(self._name, self.rank, self.size, _PATIENCE)
            set_timeout_of(self._gloo, self._timeout)
            self._roll.publish(self._name)
            self._meet()
        except BaseException:
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
        """The error for a rank that does not answer; it names those that have not come to the call.

        Args:
            error: What torch says, or what has not happened, in words.
        """
        if isinstance(error, CheckpointError):
            return error
        seconds = f"{self._timeout.total_seconds():g}"
        absent = [] if self._in_background else self._roll.absent()
        if absent:
            has = "has" if len(absent) == 1 else "have"
            return CheckpointError(
                f"timeout={seconds}: {self._roll.call} waits for all {self.size} ranks of its group, and "
                f"{named_ranks(absent)} {has} not called it; remove the `if rank == 0` around it, or what keeps a rank "
                "from it, or pass a group of the ranks that call it"
            )
        where = "a save in the background" if self._in_background else f"{self._roll.call}, to which all ranks came"
        return CheckpointError(
            f"timeout={seconds}: in {where}, a rank of {self.size} does not answer ({error!s:.200}); look at the "
            "logs of the other ranks and start the run anew, or pass a larger timeout"
        )

    def _wait(self, work: Any) -> None:
        """Waits for a collective.

        A warning names ranks that have not come after a while, long before the timeout of half an hour.
        """
        left = self._timeout
        try:
            if left > _NOTICE and not self._in_background:
                with suppress(RuntimeError):
                    work.wait(_NOTICE)
                    return
                if not work.is_completed():  # else it has failed, and says so below
                    self._warn()
                left -= _NOTICE
            work.wait(left)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _warn(self) -> None:
        """Warns of ranks that have not come to the call, on the first rank that has."""
        absent = self._roll.absent()
        if absent and self._roll.is_first_of_others(absent):
            _logger.warning(  # a warning could be made an error, which the other ranks would wait for
                "%s has waited %g s for %s, which %s not called it; call it on every rank of its group",
                self._roll.call,
                _NOTICE.total_seconds(),
                named_ranks(absent),
                "has" if len(absent) == 1 else "have",
            )

    def _meet(self) -> None:
        """Connects with the ranks that this one meets in collectives: those 1, 2, 4, ... away, on either side.

        A collective would connect in a thread of gloo's, which nobody could stop.
        """
        self._met.clear()
        byte, other = torch.zeros(2, 1, dtype=torch.uint8, device="cpu")
        for step in (1 << power for power in range((self.size - 1).bit_length())):
            receiving = self.receive(other, (self.rank - step) % self.size)
            self.send(byte, (self.rank + step) % self.size).wait()
            receiving.wait()

    def total(self, values: Sequence[int]) -> list[int]:
        """The sums of integers over all ranks, which must fit in 64 bits.

        Raises:
            RuntimeError: Another rank is gone. gloo has been seen to tell so by a result that not all took part in.
        """
        if self._gloo is None:
            return list(values)
        sums = torch.tensor([1, *values], dtype=torch.int64, device="cpu")
        self._wait(self._gloo.allreduce([sums]))
        count, *totals = sums.tolist()
        if count != self.size:
            raise RuntimeError(
                f"{count} of {self.size} ranks of the group have taken part in a sum; start the run anew with all"
            )
        return totals

    def tell(self, act: Callable[[], tuple[Value, Sequence[int]]], count: int) -> tuple[Value, list[int]]:
        """Calls something that may fail on this rank, and adds up over all ranks what it tells them.

        Args:
            act: Returns what this rank keeps for itself, and integers.
            count: Number of the integers.

        Returns:
            This rank's own value, and the sums of the integers.

        Raises:
            Exception: `act` failed on some rank; every rank raises that error.
        """
        result, error = attempt(act)
        failed, *sums = self.total([0, *result[1]] if result is not None else [1] + [0] * count)
        if failed:
            self._raise(error)
        return cast("tuple[Value, Sequence[int]]", result)[0], sums

    def agree(self, act: Callable[[], Value]) -> Value:
        """Calls something that may fail on this rank. If it failed on any rank, every rank raises that error."""
        return self.tell(lambda: (act(), ()), 0)[0]

    def raise_first(self, error: BaseException | None) -> None:
        """Raises on every rank if some rank has an error: the error of the first such rank, with its number."""
        if self.total([int(error is not None)])[0]:
            self._raise(error)

    def _raise(self, mine: BaseException | None) -> None:
        """Raises the error of the first rank that has one; some rank has."""
        errors = self.distinct(None if mine is None else _portable(mine))
        if mine is not None and not isinstance(mine, Exception):
            raise mine
        rank, first = next((ranks[0], error) for ranks, error in errors if error is not None)
        raise first.error("" if len(errors) == 1 else f"rank {rank}: ") from mine

    def distinct(self, value: Value) -> list[tuple[Sequence[int], Value]]:
        """The values of all ranks, equal ones once, each with the ranks that have it, by the first of them."""
        return [(ranks, pickle.loads(data)) for ranks, data in self.distinct_bytes(pickle.dumps(value))]  # noqa: S301

    def distinct_bytes(self, mine: bytes) -> list[tuple[Sequence[int], bytes]]:
        """The bytes of all ranks, equal ones once, each with the ranks that have them, by the first of them.

        Every rank sends a digest. Of each distinct value, the first rank that has it broadcasts it.

        Raises:
            RuntimeError: Another rank is gone. gloo has been seen to tell so by a message that was never filled.
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
        usual = 4 * -(-sum(firsts.values()) // len(firsts))  # who has more than that, tells it alone
        long = {rank for rank, size in firsts.items() if len(firsts) <= _FEW or size > usual}
        found = {rank: bytes(self._broadcast(mine, size, rank)) for rank, size in firsts.items() if rank in long}
        if short := {rank: size for rank, size in firsts.items() if rank not in long}:
            room = max(short.values())
            memory = torch.empty(self.size * room, dtype=torch.uint8, device="cpu")
            self._gather(memory, _padded(mine if self.rank in short else b"", room))
            every = bytes_of(memory)
            found.update({rank: bytes(every[rank * room : rank * room + size]) for rank, size in short.items()})
        for (high, low, _), ranks in alike.items():
            if _halves(found[ranks[0]]) != (high, low):
                raise _broken(ranks[0])
        return [(ranks, found[ranks[0]]) for ranks in alike.values()]

    def hosts(self) -> list[int]:
        """For each rank, the number of its machine. Collective the first time."""
        machine = {rank: number for number, (ranks, _) in enumerate(self.machines()) for rank in ranks}
        return [machine[rank] for rank in range(self.size)]

    def machines(self) -> list[tuple[Sequence[int], str]]:
        """The machines by number: the ranks of each, and its name, by which it is known. Collective the first time."""
        if self._machines is None:
            self._machines = self.distinct(socket.gethostname())
        return self._machines

    def to_first(self, mine: bytes) -> list[memoryview]:
        """On rank 0, the bytes of every rank, in any order; elsewhere nothing.

        They travel up a tree, so that no rank receives from many ranks.
        """
        parts = [memoryview(mine)]
        step = 1
        while step < self.size:
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
        """The bytes of rank `root`, on every rank."""
        memory = _padded(data, size) if self.rank == root else torch.zeros(size, dtype=torch.uint8, device="cpu")
        if size:
            self._wait(self._gloo.broadcast(memory, root))
        return bytes_of(memory)

    def broadcast(self, value: Value | None) -> Value:
        """Rank 0's value on every rank."""
        if self._gloo is None:
            return cast("Value", value)
        data = pickle.dumps(value) if self.rank == 0 else b""
        frame = self._broadcast(_head(data) + data[:_ROOM], _HEAD.size + _ROOM, 0)
        size, crc = _checked(frame, 0)
        message = frame[_HEAD.size :][:size] if size <= _ROOM else self._broadcast(data, size, 0)
        if crc32c(message) != crc:
            raise _broken(0)
        return cast("Value", pickle.loads(message))  # noqa: S301 - from a rank

    def on_first(self, act: Callable[[], Value]) -> Value:
        """Calls something on rank 0 alone. Every rank returns its result, or raises its error."""
        result, error = attempt(act) if self.rank == 0 else (None, None)
        outcome = self.broadcast((result, None if error is None else _portable(error)))
        if outcome[1] is not None:
            if self.rank == 0 and error is not None:
                raise error
            raise outcome[1].error()
        return cast("Value", outcome[0])

    def send(self, buffer: torch.Tensor, to: int) -> PeerTransfer:
        """Begins to send a contiguous uint8 tensor. Messages between two ranks arrive in order."""
        return self._begun(lambda: self._gloo.send([buffer], to, 0), to)

    def receive(self, buffer: torch.Tensor, source: int) -> PeerTransfer:
        """Begins to receive what that rank sends next into a contiguous uint8 tensor."""
        return self._begun(lambda: self._gloo.recv([buffer], source, 0), source)

    def _begun(self, begin: Callable[[], Any], peer: int) -> PeerTransfer:
        """A transfer that has begun, after two ranks have connected if it is their first one.

        Raises:
            CheckpointError: They have not connected in time. The thread goes on waiting, as gloo cannot be told to
                stop.
        """
        if peer in self._met:
            return PeerTransfer(begin(), self._timeout, self._lost)
        if not self._is_there(peer):
            raise self._lost(f"rank {peer} has not made its side of a connection")
        seconds = self._timeout.total_seconds()
        connecting = Workers(1, "par-checkpoint-connect")
        begun = connecting.submit(begin)
        if not wait([begun], seconds).done:
            connecting.leave()
            raise self._lost(f"timed out: rank {peer} has not come to where rank {self.rank} waits for it")
        connecting.close()  # torch aborts a thread that lets go of a work while the interpreter ends
        transfer = PeerTransfer(begun.result(), self._timeout, self._lost)
        self._met.add(peer)
        return transfer

    def _is_there(self, peer: int) -> bool:
        """Whether a rank has made its side of the communicator, within the timeout.

        gloo would wait for that in the store, where it keeps all other threads of the process waiting, too.
        """
        notice = min(self._timeout, _NOTICE)
        if self._roll.wait_for(peer, self._name, notice):
            return True
        if notice == self._timeout:
            return False
        if not self._in_background:
            self._warn()
        return self._roll.wait_for(peer, self._name, self._timeout - notice)

    def _gather(self, every: torch.Tensor, mine: torch.Tensor) -> None:
        """Gathers equal numbers of bytes of all ranks into one tensor."""
        try:
            all_gather_into(self._gloo, every, mine, self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error


def _padded(data: bytes, size: int) -> torch.Tensor:
    """Bytes and zeros behind them, as a uint8 tensor of that size."""
    padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
    bytes_of(padded)[: len(data)] = data
    return padded


def words(data: bytes) -> list[int]:
    """Return a digest as integers, whose sums over all ranks can be compared, too."""
    return list(struct.unpack("<8I", hashlib.sha256(data).digest()))


def _halves(data: bytes) -> tuple[int, int]:
    """Two integers of 64 bits that stand for some bytes."""
    high, low = struct.unpack_from("<qq", hashlib.sha256(data).digest())
    return high, low


def _head(data: bytes) -> bytes:
    """Length and checksum of a message, and a checksum of the two."""
    size, crc = len(data), crc32c(data)
    return _HEAD.pack(size, crc, crc32c(b"%d %d" % (size, crc)))


def _checked(frame: memoryview, rank: int) -> tuple[int, int]:
    """Length and checksum of a message, from the frame that a rank has sent."""
    size, crc, check = _HEAD.unpack_from(frame)
    if crc32c(b"%d %d" % (size, crc)) != check:
        raise _broken(rank)
    return size, crc


def _broken(rank: int) -> RuntimeError:
    """The error for a message that is not what its rank has sent."""
    return RuntimeError(f"the message of rank {rank} never arrived whole: a rank of the group is gone; start anew")


def attempt(act: Callable[[], Value]) -> tuple[Value | None, BaseException | None]:
    """The result of a call and None, or None and what it raised."""
    try:
        return act(), None
    except BaseException as error:
        return None, error


_KINDS: tuple[type[Exception], ...] = (ValueError, TypeError, ImportError, FileExistsError, FileNotFoundError, OSError)


@dataclass(frozen=True)
class _Portable:
    """An error as every rank can raise it."""

    kind: type[Exception]
    text: str
    number: int | None

    def error(self, prefix: str = "") -> Exception:
        """The error itself, perhaps with a prefix that names its rank."""
        error = self.kind(prefix + self.text)
        if isinstance(error, OSError):
            error.errno = self.number  # such as ENOSPC, which callers look at
        return error


def _portable(error: BaseException) -> _Portable:
    """An error as other ranks can raise it: of its own kind where every process has that, with its text."""
    number = error.errno if isinstance(error, OSError) else None
    text = error_text(error)
    if isinstance(error, CheckpointError):
        return _Portable(type(error), text, number)
    kind = next((each for each in _KINDS if isinstance(error, each)), CheckpointError)
    return _Portable(kind, text if type(error) is kind else f"{type(error).__name__}: {text}", number)
