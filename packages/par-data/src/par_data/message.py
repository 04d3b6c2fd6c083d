"""One rank reads, and tells the others of its group what it has read: a broadcast of bytes.

    header      bytes of the message and of the skeleton, two int64
    skeleton    a pickle of the value, in which each tensor is its place, dtype, shape and strides
    tensors     their bytes, each aligned

Receivers post a buffer as large as the last message was. Where that is enough, as it is for batches of one size, a
message is one broadcast; otherwise its first bytes say how large it is, and a second broadcast has all of it.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import backend_of

_T = TypeVar("_T")

_HEADER = 16  # bytes
_ALIGNMENT = 64  # bytes, of the skeleton's end and of each tensor
_FIRST = 4096  # bytes of the first message that are sent at once


class Reader:
    """Reads on one rank of a group, for all of them.

    Messages travel on the CPU, where the group has a backend for it, as "cpu:gloo,cuda:nccl" has; otherwise they are
    moved to the accelerator for it and back, for which the host waits.

    Args:
        group: The ranks that want the same; the first one reads.
        pinned: Whether tensors come in pinned memory, from which a GPU copies while the host goes on.
    """

    def __init__(self, group: dist.ProcessGroup, *, pinned: bool = False) -> None:
        self._group = group
        self._first = dist.get_process_group_ranks(group)[0]
        self.reads = dist.get_rank() == self._first
        self._device = wire_of(group)
        self._pinned = pinned and torch.cuda.is_available()
        self._room = _FIRST

    def read(self, how: Callable[[], _T]) -> _T:
        """What a function gives on the rank that reads, on every rank, tensors in memory of their own. Collective.

        Args:
            how: It is called on the rank that reads alone, and gives something that can be pickled.

        Raises:
            Exception: What the function raised, on the rank that reads.
            ValueError: On the others, with its text. Or what it gives cannot be pickled, on every rank.
        """
        problem: Exception | None = None
        message = torch.empty(0, dtype=torch.uint8)
        if self.reads:
            try:
                message = self._written(how())
            except Exception as error:  # of any kind: the others wait for this rank
                problem = error
                message = self._written(_Failed(f"{type(error).__name__}: {error}"))
        value = read_message(self._sent(message))
        if problem is not None:
            raise problem
        if isinstance(value, _Failed):
            raise ValueError(f"rank {self._first}: {value.text}")
        return value  # type: ignore[no-any-return]  # what was written

    def _written(self, value: Any) -> Tensor:
        return write_message(value, self._empty)

    def _empty(self, size: int) -> Tensor:
        """Memory for a message, and for what is sent at once."""
        return torch.empty(max(size, self._room), dtype=torch.uint8, pin_memory=self._pinned)

    def _sent(self, message: Tensor) -> Tensor:
        """The message of the rank that reads, on every rank."""
        first = self._broadcast(message[: self._room] if self.reads else self._empty(0)[: self._room])
        size = int(first[:_HEADER].view(torch.int64)[0])
        if size <= self._room:
            received = first
        else:
            received = self._broadcast(message[:size] if self.reads else self._empty(size)[:size])
        self._room = size
        return message if self.reads else received

    def _broadcast(self, data: Tensor) -> Tensor:
        there = data.to(self._device)
        dist.broadcast(there, group=self._group, group_src=0)
        return data if self.reads or there is data else data.copy_(there)


class _Failed:
    """Stands for what could not be read.

    Args:
        text: What went wrong.
    """

    def __init__(self, text: str) -> None:
        self.text = text


def wire_of(group: dist.ProcessGroup) -> torch.device:
    """Where a group sends bytes of the CPU from: there, or from the accelerator, if it has no backend for the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if backend_of(group, "cpu") is not None or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def write_message(value: Any, empty: Callable[[int], Tensor]) -> Tensor:
    """A value as bytes, the tensors in it beside a pickle of the rest.

    Args:
        value: Anything that can be pickled. Tensors of the CPU with strides, without a graph and of torch's own class
            are written as their bytes, in the order in which a copy would have them; others are pickled.
        empty: Gives memory for a number of bytes, or more.

    Raises:
        ValueError: It cannot be pickled.
    """
    skeleton = io.BytesIO()
    pickler = _Pickler(skeleton)
    try:
        pickler.dump(value)
    except Exception as error:  # pickle raises several kinds, and what the value's own class raises
        raise ValueError(
            f"a batch cannot be sent to the other ranks of its replica ({type(error).__name__}: {error}); make its "
            "parts such that pickle takes them, or let each rank read, with Strategy(broadcast_batches=False)"
        ) from error
    tensors_at = _aligned(_HEADER + skeleton.tell())
    size = tensors_at + pickler.end
    message = empty(size)
    message[:_HEADER].view(torch.int64).copy_(torch.tensor([size, skeleton.tell()]))
    message[_HEADER : _HEADER + skeleton.tell()].copy_(torch.frombuffer(skeleton.getbuffer(), dtype=torch.uint8))
    for tensor, (begin, dtype, shape, strides) in pickler.tensors.values():
        _tensor_in(message, tensors_at + begin, dtype, shape, strides).copy_(tensor)
    return message


def read_message(message: Tensor) -> Any:
    """The value of a message; its tensors lie in the message's memory."""
    size = int(message[:_HEADER].view(torch.int64)[1])
    skeleton = message[_HEADER : _HEADER + size].numpy().tobytes()
    return _Unpickler(skeleton, message, _aligned(_HEADER + size)).load()


_Layout = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
"""Where the bytes of a tensor begin, its dtype, shape and strides."""


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and notes where they go."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: dict[int, tuple[Tensor, _Layout]] = {}
        self.end = 0

    def persistent_id(self, value: Any) -> _Layout | None:
        if type(value) is not Tensor or value.layout is not torch.strided or not value.is_cpu:
            return None
        if value.requires_grad or value.is_quantized or value.is_nested or value.is_conj() or value.is_neg():
            return None
        if id(value) not in self.tensors:
            strides = torch.empty_like(value, device="meta").stride()
            self.tensors[id(value)] = value, (self.end, value.dtype, value.shape, strides)
            self.end = _aligned(self.end + max(1, value.nbytes))  # so that each begins somewhere else
        return self.tensors[id(value)][1]


class _Unpickler(pickle.Unpickler):
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
    """A tensor in the memory of a message. It is no view: what is changed in place is not the others' change, too."""
    return torch.empty(0, dtype=dtype).set_(message.untyped_storage(), begin // dtype.itemsize, shape, strides)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
