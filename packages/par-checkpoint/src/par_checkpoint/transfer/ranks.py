"""The ranks that save or load together: their communicator, how they agree on errors, and what they keep between calls.

All of it is bytes of the CPU over gloo, whatever the backend of the group: a save in the background must never wait for
the trainer's collectives.
"""

import pickle
import struct
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from crc32c import crc32c

from .._errors import CheckpointError
from .._torch_private import all_gather_into, gloo_among, gloo_of, set_timeout_of
from ..format.bytes import bytes_of

if TYPE_CHECKING:
    from .chunks import Chunks

Value = TypeVar("Value")
Public = TypeVar("Public")

_HEAD = struct.Struct("<qII")
_ROOM = 1008  # bytes of a message that go with its head
_PLANS = 4  # a trainer saves one or two kinds of checkpoints


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
        self._gloo: Any = None
        self._is_own = False
        if group is not None and self.size > 1:
            self._gloo = None if private else gloo_of(group)
            if self._gloo is None:
                self._gloo, self._is_own = self._make(group), True

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
        return gloo_among(f"par_checkpoint/{nonce[0]}", self.rank, self.size, self._timeout)

    def gather(self, value: Value) -> list[Value]:
        """The value of every rank, by rank. One all-gather of pickled bytes; a second round where some have many.

        Raises:
            RuntimeError: Another rank is gone. gloo has been seen to tell so by a message that was never filled.
        """
        if self._gloo is None:
            return [value]
        data = pickle.dumps(value)
        frames = self._all_gather(_head(data) + data[:_ROOM], _HEAD.size + _ROOM)
        heads = [_checked(frame, rank) for rank, frame in enumerate(frames)]
        found = [frame[_HEAD.size :] for frame in frames]
        many = {rank: size for rank, (size, _) in enumerate(heads) if size > _ROOM}
        if len(many) == 1:
            for rank, size in many.items():
                found[rank] = self._broadcast(data, size, rank)
        elif many:
            found = self._all_gather(data, max(many.values()))
        messages = [frame[:size] for frame, (size, _) in zip(found, heads, strict=True)]
        for rank, (message, (_, crc)) in enumerate(zip(messages, heads, strict=True)):
            if crc32c(message) != crc:
                raise _broken(rank)
        return [pickle.loads(message) for message in messages]  # noqa: S301 - from ranks

    def gather_distinct(self, mine: bytes, digests: Sequence[bytes]) -> list[tuple[Sequence[int], bytes]]:
        """The bytes of all ranks, equal ones once, with the ranks that have them. No collective where all are equal.

        Args:
            mine: This rank's bytes.
            digests: For each rank, what stands for its bytes; equal where they are.
        """
        if len(set(digests)) == 1:
            return [(range(self.size), mine)]
        is_first = digests.index(digests[self.rank]) == self.rank
        every = self.gather(mine if is_first else None)
        alike: dict[bytes, list[int]] = {}
        for rank, each in enumerate(digests):
            alike.setdefault(each, []).append(rank)
        return [(ranks, every[ranks[0]] or b"") for ranks in alike.values()]

    def _broadcast(self, data: bytes, size: int, root: int) -> memoryview:
        """The bytes of rank `root`, on every rank."""
        memory = _padded(data, size) if self.rank == root else torch.zeros(size, dtype=torch.uint8, device="cpu")
        self._gloo.broadcast(memory, root).wait(self._timeout)
        return bytes_of(memory)

    def _all_gather(self, data: bytes, size: int) -> list[memoryview]:
        """The bytes of every rank, padded to that size."""
        mine = _padded(data, size)
        every = torch.empty(self.size * size, dtype=torch.uint8, device="cpu")
        all_gather_into(self._gloo, every, mine, self._timeout)
        return [bytes_of(each) for each in every.split(size)]

    def broadcast(self, value: Value | None) -> Value:
        """Rank 0's value on every rank."""
        if self._gloo is None:
            return cast("Value", value)
        return cast("Value", self.gather(value if self.rank == 0 else None)[0])

    def agree(self, act: Callable[[], Value]) -> Value:
        """Calls something that may fail on this rank. If it failed on any rank, every rank raises that error."""
        return self.share(lambda: (act(), None))[0]

    def share(self, act: Callable[[], tuple[Value, Public]]) -> tuple[Value, list[Public]]:
        """Calls something that may fail on this rank, and gathers a part of what it returns.

        Args:
            act: Returns what this rank keeps for itself, and what all ranks are to know.

        Returns:
            What this rank keeps, and what every rank has made known, by rank.

        Raises:
            Exception: `act` failed on some rank; every rank raises that error.
        """
        result, error = attempt(act)
        mine = (result[1], None) if result is not None else (None, _portable(cast("BaseException", error)))
        every = self.gather(mine)
        self._raise([each for _, each in every], error)
        return cast("tuple[Value, Public]", result)[0], [cast("Public", public) for public, _ in every]

    def raise_first(self, error: BaseException | None) -> None:
        """Raises on every rank if some rank has an error: the error of the first such rank, with its number."""
        self._raise(self.gather(None if error is None else _portable(error)), error)

    def _raise(self, errors: "Sequence[_Portable | None]", mine: BaseException | None) -> None:
        failed = [rank for rank, each in enumerate(errors) if each is not None]
        if not failed:
            return
        if mine is not None and not isinstance(mine, Exception):
            raise mine
        first = cast("_Portable", errors[failed[0]])
        common = self.size == 1 or all(each == first for each in errors)
        raise first.error("" if common else f"rank {failed[0]}: ") from mine

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
        return Transfer(self._gloo.send([buffer], to, 0), self._timeout)

    def receive(self, buffer: torch.Tensor, source: int) -> Transfer:
        """Begins to receive what that rank sends next into a contiguous uint8 tensor."""
        return Transfer(self._gloo.recv([buffer], source, 0), self._timeout)


def _padded(data: bytes, size: int) -> torch.Tensor:
    """Bytes and zeros behind them, as a uint8 tensor of that size."""
    padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
    bytes_of(padded)[: len(data)] = data
    return padded


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
        if how == "raise" and not all(self.ranks.gather(self.pending._written())):
            raise CheckpointError(
                "an earlier save is still being written and pending is 'raise'; wait() for it, save less often, or "
                "pass pending='wait'"
            )
        pending, self.pending = self.pending, None
        error, heard = pending._hear()
        if not all(self.ranks.gather(heard)):
            self.ranks.raise_first(error)

    def _hear_of_tiers(self) -> None:
        """Raises on all ranks what went wrong in copies to further tiers, if all ranks have not heard of it yet.

        Copies that are still being made are left alone. Ranks agree about which those are.
        """
        if not self.copied:
            return
        of_ranks = self.ranks.gather([copy._tiers_failed() for copy in self.copied])
        for number, failed in enumerate(zip(*of_ranks, strict=True)):
            if any(failed):
                error, _ = self.copied.pop(number)._hear_of_tiers()
                self.ranks.raise_first(error)
        self.copied = [
            copy for copy, states in zip(self.copied, zip(*of_ranks, strict=True), strict=True) if None in states
        ]

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
