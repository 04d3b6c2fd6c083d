"""One piece: the part of an optimizer's tensor that a step fetches, updates and evicts as a unit."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from par_groups import set_slots

from ..layout.chunk import Chunk, Slice
from .disk import Disk, DiskHandle, tensors_in
from .pieces import COPY, PAGE, StateBlock, pages
from .staging import StagingBuffer

State = dict[str, Any]
"""An optimizer's state of one tensor, by slot."""


@dataclass(eq=False, kw_only=True)
class DiskPiece:
    """An optimizer's tensor of which anything is on a disk, or on the host of an accelerator.

    A piece in a staging buffer has its slots first, then its gradient, then the pages with its parameters in use.

    Args:
        tensor: The optimizer's tensor. On the disk as well if it is a master copy of parameters in another dtype.
        chunk: The chunk that the tensor is a slice of.
        first: Index of its first element in the chunk.
        group: Number of its param group in its optimizer.
        block: Its place in the file.
        views: By slot, the tensor that shares memory with the file. COPY: the one of `tensor` itself.
        in_use: Parameters in use that a step rounds `tensor` to. None: `tensor` is the parameters in use.
        start: First byte in the file of its parameters in use. None: they are in memory.
        gradient: Tensor that shares memory with the file, for its gradient. Between backward and step it is
            `tensor.grad`, so that norms, clipping and user code need no special case. None: gradients are in memory.
        in_memory: Whether its state is in memory for good: it is on the host tier, a write failed, or it was reloaded.
    """

    tensor: nn.Parameter
    chunk: Chunk
    first: int
    group: int
    block: StateBlock
    views: Mapping[str, torch.Tensor]
    in_use: torch.Tensor | None = None
    start: int | None = None
    gradient: torch.Tensor | None = None
    in_memory: bool = False

    @property
    def offset(self) -> int:
        """Index of its first element among the elements of its chunk that this rank updates."""
        return self.first - self.chunk.updated[0]

    @property
    def size(self) -> int:
        """Bytes that it needs of a staging buffer."""
        return self._slots_size + (0 if self.start is None else pages(self.start % PAGE + self._in_use_size))

    @property
    def state_size(self) -> int:
        """Bytes of all of its slots, without padding."""
        return sum(slot.count * slot.dtype.itemsize for slot in self.block.slots)

    @property
    def _slots_size(self) -> int:
        return self.block.size + self.block.gradient_size

    @property
    def _in_use_size(self) -> int:
        return self.tensor.numel() * self.chunk.own.element_size()

    @property
    def _in_use_start(self) -> int:
        # Units are gathered from one run of the file, so parameters of a piece need not begin at a page. Direct reads
        # must, so the buffer gets the same offset within its page as the file.
        return self._slots_size + (self.start or 0) % PAGE

    def in_use_in(self, buffer: StagingBuffer) -> torch.Tensor | None:
        """Return its parameters in use in a staging buffer; None if they are in memory."""
        if self.start is None:
            return None
        return buffer.tensor(self._in_use_start, self.chunk.own.dtype, self.tensor.numel())

    def begin_read(
        self, disk: Disk, state: State, buffer: StagingBuffer, after: DiskHandle | None = None
    ) -> DiskHandle:
        """Start to read its state and, if the step updates them in place, its parameters into a staging buffer.

        Args:
            disk: The file.
            state: The optimizer's state of the piece. If it has no slots yet, only the master copy is read.
            buffer: The staging buffer.
            after: Writes from the same buffer, which must end first.
        """
        has_state = any(state.get(name) is not None for name in self.views)
        size = self.block.size if has_state else self.block.copy_size
        handle = disk.read(self.block.start, buffer.bytes[:size], after)
        if self.start is not None and self.in_use is None:
            # Parameters that are rounded from a master copy are only written.
            handle += disk.read(self.start - self.start % PAGE, buffer.bytes[self._slots_size : self.size], after)
        return handle

    def is_in_file(self, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient of the tensor is the one in the file."""
        own = self.gradient
        return own is not None and gradient is not None and gradient.data_ptr() == own.data_ptr()

    def begin_read_gradient(self, disk: Disk, buffer: StagingBuffer, after: DiskHandle | None = None) -> DiskHandle:
        """Start to read its gradient into a staging buffer."""
        first, last = self.block.size, self._slots_size
        return disk.read(self.block.start + first, buffer.bytes[first:last], after)

    def begin_write(self, disk: Disk, buffer: StagingBuffer) -> DiskHandle:
        """Start to write its state and its parameters in use from a staging buffer."""
        handle = disk.write(self.block.start, buffer.bytes[: self.block.size])
        if self.start is not None:
            first = self._in_use_start
            handle += disk.write(self.start, buffer.bytes[first : first + self._in_use_size])
        return handle

    def versions(self, state: State) -> list[tuple[int, int]]:
        """Return identities and versions of all tensors that a read of the piece covers: a write changes them."""
        # Identities too, because a program may replace a slot by a new tensor of the same version.
        seen = [self.tensor, *(state[name] for name in self.views if state.get(name) is not None)]
        if self.start is not None and self.in_use is None:
            seen += [self.chunk.own, *self.chunk.parameters]
        return [(id(tensor), tensor._version) for tensor in seen]

    def adopt_(self, state: State) -> None:
        """Copy state that somebody has made in memory to the piece's place in the file, and show it from there."""
        for name, view in () if self.in_memory else self.views.items():
            # The master copy is the tensor itself, which was moved to the file before it had state.
            value = state.get(name) if name != COPY else None
            if value is None or value is view:
                continue
            if value.dtype != view.dtype or value.numel() != view.numel():
                warnings.warn(
                    f"the slot {name!r} has {value.numel()} elements of {value.dtype}, and its place on the disk is "
                    f"for {view.numel()} of {view.dtype}, so this part stays in memory",
                    stacklevel=2,
                )
                self.keep_state_in_memory_(state)
                return
            view.copy_(value.view(-1))
            state[name] = view

    def keep_state_in_memory_(self, state: State) -> None:
        """Load its state into memory for good."""
        slots = {name: state[name] for name in self.views if state.get(name) is not None}
        state.update({name: slot.clone() for name, slot in slots.items()})
        if self.in_use is not None:
            self.tensor.data = self.tensor.detach().clone()
        set_slots(self.tensor, {})  # else checkpoints would load state into the file
        self.in_memory = True

    def keep_parameters_in_memory_(self) -> None:
        """Use the parameters of its chunk, which are in memory for good now, as its own."""
        self.start = None
        own = self.chunk.own[self.offset : self.offset + self.tensor.numel()]
        if self.in_use is not None:
            self.in_use = own
        else:
            self.tensor.data = own
            self.views = {name: view for name, view in self.views.items() if name != COPY}


def make_piece(
    disk: Disk | None, chunk: Chunk, part: Slice, group: int, block: StateBlock, chunk_start: int | None
) -> DiskPiece:
    """Return the piece of a slice of a chunk, and register its slots with the optimizer's tensor.

    Args:
        disk: The file. None: nothing of the piece is on a disk.
        chunk: The chunk.
        part: The slice.
        group: Number of its param group in its optimizer.
        block: Its place in the file.
        chunk_start: First byte in the file of this rank's shard of the chunk's parameters; None: they are in memory.
    """
    low, _ = chunk.updated
    start = None if chunk_start is None else chunk_start + (part.start - chunk.share[0]) * chunk.own.element_size()
    views = {} if disk is None else tensors_in(disk, block)
    in_use = None
    if chunk.is_copied(part.start):
        # With a version of its own: a step that copies to it is no write of the program to other elements of `own`.
        in_use = chunk.own.data[part.start - low : part.stop - low]
    elif start is not None:
        views[COPY] = chunk.elsewhere[part.start]
    set_slots(part.tensor, {name: view for name, view in views.items() if name != COPY})
    gradient = None
    if disk is not None and block.gradient is not None:
        gradient = disk.tensor(block.start + block.size, block.gradient.dtype, block.gradient.count)
    return DiskPiece(
        tensor=part.tensor,
        chunk=chunk,
        first=part.start,
        group=group,
        block=block,
        views=views,
        in_use=in_use,
        start=start,
        gradient=gradient,
        in_memory=start is None and gradient is None and not block.slots,
    )
