"""The ranks that save or load together: their communicator, how they agree on errors, and what they keep between calls.

All of it is bytes of the CPU over gloo, whatever the backend of the group: a save in the background must never wait for
the trainer's collectives.

No rank collects an object of each other one. What must be the same everywhere is compared by sums; what differs is told
once by each kind of rank; of what every rank tells, as many integers travel as are needed.
"""

import hashlib
import pickle
import socket
import struct
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from crc32c import crc32c

from .._errors import CheckpointError
from .._torch_private import all_gather_into, gloo_among, gloo_of, set_timeout_of
from ..format.bytes import bytes_of
from .workers import Workers

if TYPE_CHECKING:
    from .chunks import Chunks

Value = TypeVar("Value")

_HEAD = struct.Struct("<qII")
_ROOM = 1008  # bytes of a message that go with its head
_FEW = 16  # ranks that tell something one after the other; more do so at once
_PLANS = 4  # a trainer saves one or two kinds of checkpoints
_PATIENCE = timedelta(days=1)  # of gloo, while two ranks connect: how long that may take, `Ranks` decides


class Transfer:
    """Bytes under way to or from another rank.

    Args:
        work: The handle that torch gave for them.
        timeout: How long to wait at most.
    """

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        """Returns when the buffer may be used again.

        Raises:
            RuntimeError: The other rank is gone, or does not answer.
        """
        self._work.wait(self._timeout)


class Ranks:
    """The ranks of a group, or this process alone, and bytes of the CPU between them, whatever their backend.

    Args:
        group: The ranks that take part; None: this process alone.
        timeout: Seconds after which a transfer with a rank that does not answer raises.
        private: Whether to have a communicator of its own, which never meets the trainer's collectives. Without it, the
            group's is used where that is gloo.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, *, private: bool = False) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._timeout = timedelta(seconds=timeout)
        self._machines: list[tuple[Sequence[int], str]] | None = None  # by number: its ranks, and its name
        self._met = set(range(self.size))  # the ranks that this one is connected with
        self._gloo: Any = None
        self._is_own = False
        if group is not None and self.size > 1:
            self._gloo = None if private else gloo_of(group)
            if self._gloo is None:
                self._gloo, self._is_own = self._make(group), True
                self._meet()

    def set_timeout(self, timeout: float) -> None:
        """Has all calls from now on wait so many seconds for a rank that does not answer.

        On the group's own communicator a collective never waits longer than that was made for, as ever.
        """
        if self._timeout != timedelta(seconds=timeout):
            self._timeout = timedelta(seconds=timeout)
            if self._is_own:
                set_timeout_of(self._gloo, self._timeout)

    def _make(self, group: dist.ProcessGroup) -> Any:
        """A communicator of the group's ranks alone; torch's `new_group` would have to be called by all others, too."""
        nonce = [uuid.uuid4().hex]
        dist.broadcast_object_list(nonce, group=group, group_src=0)
        gloo = gloo_among(f"par_checkpoint/{nonce[0]}", self.rank, self.size, _PATIENCE)
        set_timeout_of(gloo, self._timeout)
        return gloo

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
        self._gloo.allreduce([sums]).wait(self._timeout)
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
            What this rank keeps, and the sums of the integers.

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

        Every rank tells a digest; of each kind of bytes, the first rank that has them tells them to all.

        Raises:
            RuntimeError: Another rank is gone. gloo has been seen to tell so by a message that was never filled.
        """
        if self._gloo is None:
            return [(range(1), mine)]
        own = torch.tensor([*_halves(mine), len(mine)], device="cpu")
        told = torch.empty(self.size, 3, dtype=torch.int64, device="cpu")
        all_gather_into(self._gloo, told, own[None], self._timeout)
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
            all_gather_into(self._gloo, memory, _padded(mine if self.rank in short else b"", room), self._timeout)
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

        They come up a tree, so that no rank has many others to receive from.
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
            self._gloo.broadcast(memory, root).wait(self._timeout)
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

    def send(self, buffer: torch.Tensor, to: int) -> Transfer:
        """Begins to send a contiguous uint8 tensor. Messages between two ranks arrive in order."""
        return self._begun(lambda: self._gloo.send([buffer], to, 0), to)

    def receive(self, buffer: torch.Tensor, source: int) -> Transfer:
        """Begins to receive what that rank sends next into a contiguous uint8 tensor."""
        return self._begun(lambda: self._gloo.recv([buffer], source, 0), source)

    def _begun(self, begin: Callable[[], Any], peer: int) -> Transfer:
        """A transfer that has begun, after two ranks have connected if it is their first one.

        Raises:
            RuntimeError: They have not connected in time. The thread goes on waiting, as gloo cannot be told to stop.
        """
        if peer in self._met:
            return Transfer(begin(), self._timeout)
        seconds = self._timeout.total_seconds()
        connecting = Workers(1, "par-checkpoint-connect")
        begun = connecting.submit(begin)
        if not wait([begun], seconds).done:
            connecting.leave()
            raise RuntimeError(
                f"timed out after {seconds:g} seconds: rank {peer} has not come to where rank {self.rank} waits for "
                "it; see what it does, or pass a larger timeout"
            )
        connecting.close()  # torch aborts a thread that lets go of a work while the interpreter ends
        transfer = Transfer(begun.result(), self._timeout)
        self._met.add(peer)
        return transfer


def _padded(data: bytes, size: int) -> torch.Tensor:
    """Bytes and zeros behind them, as a uint8 tensor of that size."""
    padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
    bytes_of(padded)[: len(data)] = data
    return padded


def words(data: bytes) -> list[int]:
    """Integers that stand for some bytes where only equality counts, and whose sums over all ranks do so, too."""
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
    if isinstance(error, CheckpointError):
        return _Portable(type(error), str(error), number)
    kind = next((each for each in _KINDS if isinstance(error, each)), CheckpointError)
    return _Portable(kind, str(error) if type(error) is kind else f"{type(error).__name__}: {error}", number)


class Pending(Protocol):
    """A save in the background."""

    def _written(self) -> bool:
        """Whether it has ended, but for copies to further tiers."""

    def _join(self) -> None:
        """Waits for its end, and raises nothing."""

    def _hear(self) -> tuple[BaseException | None, bool]:
        """Waits for its end: what went wrong, and whether the trainer has heard of that on this rank before."""

    def _tiers_thread(self) -> threading.Thread | None:
        """The thread of its copies to further tiers."""

    def _tiers_failed(self) -> bool | None:
        """Whether its copies to further tiers have failed, unheard of on this rank; None while they are made."""

    def _hear_of_tiers(self) -> tuple[BaseException | None, bool]:
        """What `_hear` gives, of these copies."""


class Session:
    """What a group keeps between calls: communicators, plans, and a save that still runs in the background.

    Args:
        group: The ranks; None: this process alone.
        timeout: Seconds that the first call waits for a rank that does not answer.

    Attributes:
        timeout: Seconds that the present call waits.
        ranks: The communicator of saves and loads.
        pending: The save that runs in the background, or the last one that did, until somebody has asked for its error.
        copied: Saves whose copies to further tiers are under way, or were when ranks last looked, in order.
        memory: What the last copy of a save in the background lies in, used again for the next one.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.timeout = timeout
        self.ranks = Ranks(group, timeout)
        self.pending: Pending | None = None
        self.memory: Chunks | None = None
        self.copied: list[Pending] = []
        self._background: Ranks | None = None
        self._beside: Ranks | None = None
        self._group = (lambda: None) if group is None else weakref.ref(group)  # which must not keep itself alive
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    @property
    def background(self) -> Ranks:
        """A second communicator, for what runs beside the trainer. Collective the first time.

        It waits as long as the call that asks for it; nothing else uses it then.
        """
        if self._background is None:
            self._background = Ranks(self._group(), self.timeout, private=True)
        self._background.set_timeout(self.timeout)
        return self._background

    @property
    def beside(self) -> Ranks:
        """A third communicator, for copies to further tiers, which no save waits for. Collective the first time.

        It waits as long as the call that first asked for it: an earlier copy may still be using it.
        """
        if self._beside is None:
            self._beside = Ranks(self._group(), self.timeout, private=True)
        return self._beside

    def settle(self, how: str) -> None:
        """Deals with a save that still runs: waits for it, or raises. What went wrong in it is raised now.

        Whether it still runs is decided together, for ranks finish at different moments. So is whether to raise what
        went wrong: some ranks may have waited for it by themselves, and know, while others do not.

        Args:
            how: "wait" or "raise".
        """
        self._hear_of_tiers()
        if self.pending is None:
            return
        if how == "raise" and self.ranks.total([int(not self.pending._written())])[0]:
            raise CheckpointError(
                "an earlier save is still being written and pending is 'raise'; wait() for it, save less often, or "
                "pass pending='wait'"
            )
        pending, self.pending = self.pending, None
        error, heard = pending._hear()
        if self.ranks.total([int(not heard)])[0]:
            self.ranks.raise_first(error)

    def _hear_of_tiers(self) -> None:
        """Raises on all ranks what went wrong in copies to further tiers, if all ranks have not heard of it yet.

        Copies that are still being made are left alone. Ranks agree about which those are.
        """
        if not self.copied:
            return
        states = [copy._tiers_failed() for copy in self.copied]
        sums = self.ranks.total([int(state is each) for each in (True, None) for state in states])
        for number, failed in enumerate(sums[: len(states)]):
            if failed:
                error, _ = self.copied.pop(number)._hear_of_tiers()
                self.ranks.raise_first(error)
        self.copied = [copy for copy, made in zip(self.copied, sums[len(states) :], strict=True) if made]

    def release(self) -> None:
        """Frees the memory of the last copy, when it is written."""
        if self.pending is not None:
            self.pending._join()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.release()

    def planned(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The plan that is known by a key, made now if it is not known yet. The one unused for longest goes."""
        if key not in self._plans:
            self._plans[key] = make()
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return cast("Value", self._plans[key])


_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, Session] = weakref.WeakKeyDictionary()
_alone: dict[None, Session] = {}
"""The session of this process where torch.distributed does not run."""


def session_of(group: dist.ProcessGroup | None, timeout: float) -> Session:
    """The session of the ranks that take part. Collective over the group the first time.

    It is kept by process group, weakly: with the group goes its session.

    Args:
        group: The ranks; None: the world, if torch.distributed runs, else this process alone.
        timeout: Seconds that the call waits for a rank that does not answer. What is under way keeps its own.

    Raises:
        TypeError: Not a process group.
        ValueError: This rank is not in the group.
    """
    group = _checked_group(group)
    session = _known(group)
    if session is None:
        session = Session(group, timeout)
        if group is None:
            _alone[None] = session
        else:
            _sessions[group] = session
    session.timeout = timeout
    session.ranks.set_timeout(timeout)
    return session


def release(group: dist.ProcessGroup | None = None) -> None:
    """Frees the memory that this rank keeps for the next save in the background, such as pinned memory.

    It is as large as what the rank writes in a save. A save that is under way is waited for; what goes wrong in it is
    still raised by its handle, or by the next save. Not collective. The next save with `async_` makes such memory anew.

    Args:
        group: The ranks that save; None: the world, if torch.distributed runs, else this process alone.

    Raises:
        TypeError: Not a process group.
        ValueError: This rank is not in the group.
    """
    session = _known(_checked_group(group))
    if session is not None:
        session.release()


def _known(group: dist.ProcessGroup | None) -> Session | None:
    """The session of a group that `_checked_group` has given, if it has one."""
    return _alone.get(None) if group is None else _sessions.get(group)


def _checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, the world in the place of None where torch.distributed runs; raises what `session_of` says."""
    if cast("object", group) is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives those outside
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only its members save and load together")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    elif group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; give a torch.distributed.ProcessGroup, or None for the world")
    return group
