"""One rank of a replica loads, and broadcasts each batch to the other ranks as bytes.

A message has three parts:

- the header: the number of bytes of the message and of the skeleton, two int64;
- the skeleton: a pickle of the value, which holds only offset, dtype, shape and strides of each tensor;
- the bytes of the tensors, each aligned.

The other ranks post a buffer of the size of the last message. If the new message fits, as it does for batches of equal
size, it takes one broadcast. Otherwise its first bytes hold its size, and a second broadcast transfers all of it.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import backend_of

from .position import LoaderPosition
from .sources import BatchShard, BatchSource

_T = TypeVar("_T")

_HEADER = 16  # bytes
_ALIGNMENT = 64  # bytes, of the end of the skeleton and of each tensor
_FIRST = 4096  # bytes of the first message that one broadcast transfers


class BroadcastSource:
    """The batches of a source, which the first rank of a group reads for all of its ranks.

    Args:
        source: The source, read on the first rank only.
        broadcaster: The group.
    """

    def __init__(self, source: BatchSource, broadcaster: "Broadcaster") -> None:
        self._source, self._broadcaster = source, broadcaster

    def open(self, epoch: int) -> Iterator[BatchShard]:
        """Return the batches of an epoch. Iterating is collective over the group."""
        return self._receive(partial(self._source.open, epoch))

    def seek(self, position: LoaderPosition) -> tuple[int, Iterator[BatchShard]]:
        """Return the epoch of a position, and its batches from the position on. Collective over the group."""
        batches: Iterator[BatchShard] = iter(())

        def seek_on_first() -> int:
            nonlocal batches
            epoch, batches = self._source.seek(position)
            return epoch

        epoch = self._broadcaster.read(seek_on_first)
        return epoch, self._receive(lambda: batches)

    def _receive(self, open_batches: Callable[[], Iterator[BatchShard]]) -> Iterator[BatchShard]:
        batches: Iterator[BatchShard] | None = None

        def read_next() -> BatchShard | None:
            # Opened with the first batch, inside of `read`, so that an error of opening reaches all ranks.
            nonlocal batches
            batches = open_batches() if batches is None else batches
            return next(batches, None)

        return iter(partial(self._broadcaster.read, read_next), None)


class Broadcaster:
    """Calls functions on the first rank of a group, and broadcasts their results to all of its ranks.

    Messages travel between CPUs if the group has a backend for the CPU, as "cpu:gloo,cuda:nccl" has. Otherwise they
    are copied to the accelerator and back, and the host waits for both copies.

    Args:
        group: The ranks that need the same values.
        pinned: Whether received tensors are in pinned memory, from which a copy to a GPU is asynchronous.
    """

    def __init__(self, group: dist.ProcessGroup, *, pinned: bool = False) -> None:
        self._group = group
        self._first = dist.get_process_group_ranks(group)[0]
        self.is_first = dist.get_rank() == self._first
        self._device = transfer_device(group)
        self._pinned = pinned and torch.accelerator.is_available()
        self._capacity = _FIRST

    def read(self, function: Callable[[], _T]) -> _T:
        """Call a function on the first rank and return its result on every rank. Collective.

        Args:
            function: Called on the first rank only. Its result must be picklable; the tensors in it arrive in memory
                of their own.

        Raises:
            Exception: The exception of the function, on the first rank.
            ValueError: The text of that exception, on the other ranks. Or the result is not picklable, on every rank.
        """
        problem: Exception | None = None
        message = torch.empty(0, dtype=torch.uint8)
        if self.is_first:
            try:
                message = write_message(function(), self._allocate)
            except Exception as error:
                # An error of any kind is broadcast, too: the other ranks wait for this one.
                problem = error
                message = write_message(_ReadFailure(f"{type(error).__name__}: {error}"), self._allocate)
        # The first rank reads its own message, too, so that its tensors have memory of their own, as on the other
        # ranks.
        value = read_message(self._exchange(message))
        if problem is not None:
            raise problem
        if isinstance(value, _ReadFailure):
            raise ValueError(f"rank {self._first}: {value.text}")
        return value  # type: ignore[no-any-return]  # the message holds what the function returned

    def _allocate(self, size: int) -> Tensor:
        """Return memory for a message, and at least for the first broadcast."""
        return torch.empty(max(size, self._capacity), dtype=torch.uint8, pin_memory=self._pinned)

    def _exchange(self, message: Tensor) -> Tensor:
        """Return the first rank's message on every rank."""
        first = self._broadcast(message[: self._capacity] if self.is_first else self._allocate(0)[: self._capacity])
        size = int(first[:_HEADER].view(torch.int64)[0])
        if size <= self._capacity:
            received = first
        else:
            received = self._broadcast(message[:size] if self.is_first else self._allocate(size)[:size])
        # Every rank knows the size of this message, so all post equal buffers for the next one without an exchange.
        self._capacity = size
        return message if self.is_first else received

    def _broadcast(self, data: Tensor) -> Tensor:
        moved = data.to(self._device)
        dist.broadcast(moved, group=self._group, group_src=0)
        return data if self.is_first or moved is data else data.copy_(moved)


class _ReadFailure:
    """The result of a function that raised.

    Args:
        text: The class and the text of the exception.
    """

    def __init__(self, text: str) -> None:
        self.text = text


def transfer_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device from which a group sends bytes: the CPU if it has a backend for it, else the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    if backend_of(group, "cpu") is not None or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def write_message(value: Any, allocate: Callable[[int], Tensor]) -> Tensor:
    """Serialize a value to bytes: a pickle, and next to it the bytes of the tensors.

    Args:
        value: A picklable value. Dense CPU tensors of torch's own class without a graph are written as bytes, in the
            memory order that a copy would have; all other tensors are pickled.
        allocate: Returns memory of at least a number of bytes, uint8.

    Raises:
        ValueError: The value is not picklable.
    """
    skeleton = io.BytesIO()
    pickler = _TensorPickler(skeleton)
    try:
        pickler.dump(value)
    except Exception as error:
        # pickle raises several kinds, and so do the methods of the value's own class.
        raise ValueError(
            f"a batch cannot be sent to the other ranks of its replica ({type(error).__name__}: {error}): pickle must "
            "accept all of its parts; change them, or let every rank load its own batches (replica_group=None)"
        ) from error
    tensors_at = _aligned(_HEADER + skeleton.tell())
    size = tensors_at + pickler.end
    message = allocate(size)
    message[:_HEADER].view(torch.int64).copy_(torch.tensor([size, skeleton.tell()]))
    message[_HEADER : _HEADER + skeleton.tell()].copy_(torch.frombuffer(skeleton.getbuffer(), dtype=torch.uint8))
    for tensor, (begin, dtype, shape, strides) in pickler.tensors.values():
        _tensor_in(message, tensors_at + begin, dtype, shape, strides).copy_(tensor)
    return message


def read_message(message: Tensor) -> Any:
    """Return the value of a message; its tensors use the memory of the message."""
    size = int(message[:_HEADER].view(torch.int64)[1])
    skeleton = message[_HEADER : _HEADER + size].numpy().tobytes()
    return _TensorUnpickler(skeleton, message, _aligned(_HEADER + size)).load()


_Layout = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
"""The offset of a tensor's bytes, its dtype, shape and strides."""


class _TensorPickler(pickle.Pickler):
    """A pickler that leaves the bytes of tensors out and records where they are to be written."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: dict[int, tuple[Tensor, _Layout]] = {}
        self.end = 0

    def persistent_id(self, value: Any) -> _Layout | None:
        if type(value) is not Tensor or value.layout is not torch.strided or not value.is_cpu:
            return None
        # Only tensors that their bytes describe completely; pickle keeps the rest of the state of all others.
        if value.requires_grad or value.is_quantized or value.is_nested or value.is_conj() or value.is_neg():
            return None
        if id(value) not in self.tensors:
            # The strides of a copy: an expanded dim is written out, and a memory order such as channels_last stays.
            strides = torch.empty_like(value, device="meta").stride()
            self.tensors[id(value)] = value, (self.end, value.dtype, value.shape, strides)
            # At least one byte, because the reader identifies a tensor by its offset.
            self.end = _aligned(self.end + max(1, value.nbytes))
        return self.tensors[id(value)][1]


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, skeleton: bytes, message: Tensor, tensors_at: int) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._message, self._tensors_at = message, tensors_at
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, layout: _Layout) -> Tensor:
        begin, dtype, shape, strides = layout
        if begin not in self._tensors:
            self._tensors[begin] = _tensor_in(self._message, self._tensors_at + begin, dtype, shape, strides)
        return self._tensors[begin]


def _tensor_in(message: Tensor, begin: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor in the memory of a message.

    It is not a view of the message: autograd would count an in-place write to one tensor as a write to all of them.
    """
    return torch.empty(0, dtype=dtype).set_(message.untyped_storage(), begin // dtype.itemsize, shape, strides)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
