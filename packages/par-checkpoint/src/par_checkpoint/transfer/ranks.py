"""The ranks that save or load together: their communicator, and how they agree on errors."""

import pickle
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from crc32c import crc32c

from .._errors import CheckpointError
from ..format.bytes import bytes_of

Value = TypeVar("Value")
Told = TypeVar("Told")

_HEAD = struct.Struct("<qII")
_ROOM = 1008  # bytes of a message that go with its head


class Transfer:
    """Bytes under way.

    Args:
        work: What torch gave for it.
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
        if group is not None and self.size > 1:
            self._gloo = (None if private else _gloo_of(group)) or self._make(group)

    def _make(self, group: dist.ProcessGroup) -> Any:
        """A communicator of the group's ranks alone; torch's `new_group` would have to be called by all others, too."""
        nonce = [uuid.uuid4().hex]
        dist.broadcast_object_list(nonce, group=group, group_src=0)
        store = dist.distributed_c10d._get_default_store()
        prefixed = dist.distributed_c10d.PrefixStore(f"par_checkpoint/{nonce[0]}", store)
        return dist.ProcessGroupGloo(prefixed, self.rank, self.size, self._timeout)

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
        found = [each[:size] for each, (size, _) in zip(found, heads, strict=True)]
        for rank, (each, (_, crc)) in enumerate(zip(found, heads, strict=True)):
            if crc32c(each) != crc:
                raise _broken(rank)
        return [pickle.loads(each) for each in found]  # noqa: S301 - from ranks

    def _broadcast(self, data: bytes, size: int, root: int) -> memoryview:
        """A rank's bytes."""
        memory = _padded(data, size) if self.rank == root else torch.zeros(size, dtype=torch.uint8, device="cpu")
        self._gloo.broadcast(memory, root).wait(self._timeout)
        return bytes_of(memory)

    def _all_gather(self, data: bytes, size: int) -> list[memoryview]:
        """Everybody's bytes, each padded to that size."""
        mine = _padded(data, size)
        every = torch.empty(self.size * size, dtype=torch.uint8, device="cpu")
        self._gloo._allgather_base(every, mine).wait(self._timeout)
        return [bytes_of(each) for each in every.split(size)]

    def broadcast(self, value: Value | None) -> Value:
        """Rank 0's value on every rank."""
        if self._gloo is None:
            return cast("Value", value)
        return cast("Value", self.gather(value if self.rank == 0 else None)[0])

    def agree(self, act: Callable[[], Value]) -> Value:
        """Does something that may fail on this rank; if it failed on any, every rank raises that error."""
        return self.share(lambda: (act(), None))[0]

    def share(self, act: Callable[[], tuple[Value, Told]]) -> tuple[Value, list[Told]]:
        """The same for something that gives a result for this rank and another one for all: the latter, by rank."""
        result, error = attempt(act)
        mine = (result[1], None) if result is not None else (None, _portable(cast("BaseException", error)))
        every = self.gather(mine)
        self._raise([each for _, each in every], error)
        return cast("tuple[Value, Told]", result)[0], [cast("Told", told) for told, _ in every]

    def raise_first(self, error: BaseException | None) -> None:
        """Every rank raises if one has an error; its own, or the first rank's with its number."""
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
        """Does something on rank 0 alone; its result, or its error, is every rank's."""
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
    return RuntimeError(f"the message of rank {rank} never arrived whole: a rank of the group is gone; start anew")


def _gloo_of(group: dist.ProcessGroup) -> Any:
    """The group's own gloo communicator for the CPU, or None."""
    if "cpu" not in {str(device) for device in group._device_types}:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def attempt(act: Callable[[], Value]) -> tuple[Value | None, BaseException | None]:
    """The result of a call, or what it raised."""
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
        """The error anew."""
        error = self.kind(prefix + self.text)
        if isinstance(error, OSError):
            error.errno = self.number  # such as ENOSPC, which callers look at
        return error


def _portable(error: BaseException) -> _Portable:
    """Its own kind where that is plain, with its text."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, CheckpointError):
        return _Portable(type(error), str(error), number)
    kind = next((each for each in _KINDS if isinstance(error, each)), CheckpointError)
    return _Portable(kind, str(error) if type(error) is kind else f"{type(error).__name__}: {error}", number)
