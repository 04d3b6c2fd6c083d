"""Memory for messages, which one attention after another uses."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .._collectives import may_overwrite


class MessageBuffer:
    """Memory that stays from one message to the next, on CPUs.

    There a process is given new memory page by page, as it first writes into each, and the memory of a large tensor
    goes back to the system with the tensor. Filling a message costs twice as much then. Accelerators have an allocator
    that keeps memory, so they get new tensors, and so does whoever looks on at operations, as fake tensors do.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # one at most; none while a message is in it, so a second thread gets its own

    @contextmanager
    def of(self, elements: int, like: Tensor) -> Iterator[Tensor]:
        """Lend a flat tensor of another tensor's dtype and device, inside the context. Its values are arbitrary.

        Args:
            elements: Number of elements.
            like: Tensor with the dtype and the device.
        """
        # Accelerators have a caching allocator. On a CPU a large allocation maps fresh pages, whose first touch is
        # slow.
        if like.device.type != "cpu" or not may_overwrite():
            yield like.new_empty(elements)
            return
        size = elements * like.element_size()
        try:
            memory = self._free.pop()
        except IndexError:  # another thread has it, or there is none yet
            memory = None
        if memory is None or memory.numel() < size:
            with torch.inference_mode(mode=False):  # a training step may write to it after an evaluation
                memory = torch.empty(size, dtype=torch.uint8)
        yield memory[:size].view(like.dtype)
        # Not reached if the block raises: a message may then still be in flight into this memory.
        self._free[:] = [memory]

    def __reduce__(self) -> tuple[type["MessageBuffer"], tuple[()]]:
        return MessageBuffer, ()  # a copy has memory of its own
