"""The memory of an operation's tensors, from its issue to its completion.

Memory is read and written past torch: a dispatch mode must not see it, and no tensor may get a new version, which
autograd and selective checkpointing would take for a change by the program.
"""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from par_groups import attributes

if TYPE_CHECKING:
    from .devices import DeviceOfRank

_POISON = 0xFF  # of floats: not a number, whatever their size
_POISON_OF_INTEGERS = 0x7F  # a large number; of bool 1, true


@dataclass(frozen=True)
class Memory:
    """Where the elements of a contiguous tensor lie.

    Args:
        tensor: The tensor.
        pointer: Its address, as the program sees it.
        address: Its address for the CPU, which is another one for a tensor of a device.
        size: Its bytes.
    """

    tensor: Tensor
    pointer: int
    address: int
    size: int

    @classmethod
    def of(cls, tensor: Tensor, device: "DeviceOfRank | None" = None) -> "Memory":
        """The memory of a tensor as it is now, which is one of the CPU or of that device."""
        view = tensor if device is None or tensor.is_cpu else device.view(tensor)
        return cls(tensor, tensor.data_ptr(), view.data_ptr(), tensor.nbytes)

    def read(self) -> bytes:
        """A copy of its bytes."""
        return ctypes.string_at(self.address, self.size) if self.size else b""

    def write(self, data: bytes) -> None:
        """Replaces its bytes."""
        if self.size:
            ctypes.memmove(self.address, data, self.size)

    def freed(self) -> bool:
        """Whether the tensor has lost this memory, as it does when its storage is resized."""
        return self.size > 0 and (self.tensor.data_ptr() != self.pointer or self.tensor.untyped_storage().nbytes() == 0)

    def overlaps(self, other: "Memory") -> bool:
        """Whether some bytes belong to both."""
        return self.address < other.address + other.size and other.address < self.address + self.size


class Buffers:
    """The tensors of one operation: inputs are copied at its issue, outputs hold poison until it completes.

    Args:
        inputs: What is read. What is also an output may not be read by the program any more; one that lies inside of
            an output, as in an all-gather in place, may.
        outputs: What is written.
        device: The device on which some of them may lie.
    """

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor], device: "DeviceOfRank | None" = None) -> None:
        self._inputs = [Memory.of(tensor, device) for tensor in inputs]
        self.outputs = [Memory.of(tensor, device) for tensor in outputs]
        self._copies = [memory.read() for memory in self._inputs]
        self._kept = [self._alone(memory) for memory in self._inputs]
        self._poison = [self._poisoned(memory) for memory in self.outputs]
        for memory, poison in zip(self.outputs, self._poison, strict=True):
            memory.write(poison)

    @property
    def payload(self) -> bytes:
        """What travels: the inputs as they were at the issue, one after the other."""
        return b"".join(self._copies)

    def complete(self, results: list[bytes]) -> str:
        """Writes the results into the outputs; what the program did to the memory in between, if it may not."""
        for memory in (*self._inputs, *self.outputs):
            if memory.freed():
                return f"the memory of its {_named(memory.tensor)} was freed while in flight"
        for memory, copy, kept in zip(self._inputs, self._copies, self._kept, strict=True):
            if kept and memory.read() != copy:
                return f"its input, {_named(memory.tensor)}, was written while in flight"
        for memory, poison in zip(self.outputs, self._poison, strict=True):
            if memory.read() != poison:
                return f"its output, {_named(memory.tensor)}, was written while in flight"
        for memory, result in zip(self.outputs, results, strict=True):
            memory.write(result)
        return ""

    def _alone(self, memory: Memory) -> bool:
        """Whether an input is not an output as well."""
        return not any(memory.overlaps(other) for other in self.outputs)

    def _poisoned(self, memory: Memory) -> bytes:
        """What an output holds while the operation is in flight."""
        dtype = memory.tensor.dtype
        byte = _POISON if dtype.is_floating_point or dtype.is_complex else _POISON_OF_INTEGERS
        poison = bytearray([1 if dtype == torch.bool else byte]) * memory.size
        for own, copy in zip(self._inputs, self._copies, strict=True):
            begin = own.address - memory.address
            if memory.overlaps(own) and own.size < memory.size and 0 <= begin <= memory.size - own.size:
                poison[begin : begin + own.size] = copy  # this rank's own share stays readable
        return bytes(poison)


def _named(tensor: Tensor) -> str:
    label = attributes.LABEL.of(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" + (f" {label!r}" if label else "")
