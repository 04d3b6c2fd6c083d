"""How a piece gets to the host's memory and back: `fetch` and `evict`, through a ring of staging buffers.

disk      read piece k + 1, k + 2 ...      write piece k - 1
memory              update piece k
device                                     copy the parameters of piece k - 1 in

A step decides the order of pieces, and calls `fetch` and `evict` for each. Prefetching follows from that order alone:
whenever a buffer of the ring is free, the next piece in the order is read into it. Threads, files and the link to an
accelerator are behind these two calls. State on the host of an accelerator is in memory already: its `fetch` waits for
the gradient, and its `evict` begins to copy the updated parameters to the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from ..layout.chunk import Chunk
from .disk import Disk, DiskHandle
from .errors import DiskErrors
from .link import GradientInFlight, MemoryLink
from .piece import DiskPiece, State
from .pieces import COPY
from .staging import StagingBuffer, StagingPool


@dataclass(eq=False, kw_only=True)
class PieceValues:
    """The inputs and outputs of a step for one piece, next to the piece's tensor.

    Args:
        state: The optimizer's state of the tensor, which an update changes in place, or adds slots to.
        gradient: The gradient. None: it is not computed yet, so a prefetch reads the state only.
        in_use: Parameters in use that an update rounds the tensor to. None: the tensor is the parameters in use.
    """

    state: State
    gradient: torch.Tensor | None = None
    in_use: torch.Tensor | None = None


@dataclass(eq=False, kw_only=True)
class PieceTransfer:
    """A piece in a staging buffer: first it is read, then updated, then written.

    Args:
        piece: The piece.
        stored: Its values in the optimizer, between steps.
        buffer: The staging buffer.
        handle: The reads; from `evict` on, the writes.
        versions: The piece's versions when the reads began.
        behind: The transfer whose writes from the same buffer come first. None: the buffer was free.
        gradient_read: The reads of the gradient. None: the gradient is in memory, or it is not computed yet.
        fetched: Its values in the buffer, between `fetch` and `evict`.
        slots: Between `fetch` and `evict`, the slots in the buffer by name.
        shown: From `evict` on, tensors that show the buffer by slot, and their versions when the writes began.
        is_reused: Whether another piece is read into the buffer after the writes.
    """

    piece: DiskPiece
    stored: PieceValues
    buffer: StagingBuffer
    handle: DiskHandle
    versions: Sequence[tuple[int, int]]
    behind: "PieceTransfer | None" = None
    gradient_read: DiskHandle | None = None
    fetched: PieceValues | None = None
    slots: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shown: Mapping[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    is_reused: bool = False


class StateSwapper:
    """Fetches pieces to the host's memory, and evicts them to a disk, and their parameters to the device.

    Between steps the optimizer's state shows the file. A piece whose writes have not ended shows its buffer, so a step
    does not wait for its own last writes.

    Args:
        disk: The file.
        size: Bytes of a buffer of the ring.
        depth: Number of buffers.
        errors: Collects errors of writes.
        on_written: Called with the chunk of a piece after its parameters in use were written to the disk.
        link: Link between host and device. Default: they are one memory.
    """

    def __init__(
        self,
        disk: Disk,
        size: int,
        depth: int,
        errors: DiskErrors,
        on_written: Callable[[Chunk], None],
        link: MemoryLink | None = None,
    ) -> None:
        self._disk, self._size, self._depth = disk, size, depth
        self._link = link or MemoryLink()
        self._errors, self._on_written = errors, on_written
        self._pool = StagingPool()
        self._order: Mapping[DiskPiece, PieceValues] = {}
        self._unread: Iterator[DiskPiece] = iter(())
        self._reads: list[PieceTransfer] = []
        self._writes: list[PieceTransfer] = []
        self._unwritten: list[tuple[DiskPiece, torch.Tensor]] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the ring's buffers."""
        return self._pool.total

    def follow(self, order: Mapping[DiskPiece, PieceValues]) -> None:
        """Start to prefetch pieces in the order in which `fetch` is called next.

        Reads that an earlier order began are kept if they are the first of this order, and nobody has written to their
        tensors since. Nothing is waited for otherwise.

        Args:
            order: Values by piece, as the optimizer has them.
        """
        while self._writes and self._writes[0].handle.is_over():
            self._end_write(self._writes.pop(0))
        # A piece that is still written cannot be read yet, and no piece behind it may take its turn.
        in_writes = {write.piece for write in self._writes}
        on_disk = list(takewhile(lambda piece: piece not in in_writes, (p for p in order if not p.in_memory)))
        begun = [(read.piece, read.versions) for read in self._reads]
        if begun != [(piece, piece.versions(order[piece].state)) for piece in on_disk[: len(begun)]]:
            self.drop_reads()
        self._order, self._unread = order, iter(on_disk[len(self._reads) :])
        for read in self._reads:
            read.stored = order[read.piece]
            self._begin_gradient_read(read)
        while len(self._reads) + len(self._writes) < self._depth and self._begin_read():
            pass

    def fetch(self, piece: DiskPiece) -> PieceValues:
        """Bring a piece to memory, and return its values there. `evict` must follow before the next `fetch`.

        Args:
            piece: The next piece of the order.

        Raises:
            OSError: A read failed.
        """
        stored = self._order[piece]
        if isinstance(stored.gradient, GradientInFlight):
            stored.gradient.arrive()
        if piece.in_memory:
            stored.in_use = piece.in_use
            return stored
        transfer = self._reads[0]
        if transfer.behind is not None and not self._end_writes_through(transfer.behind):
            # The writes have failed, so the buffer stays with their piece, and nothing was read into it.
            transfer.buffer, transfer.behind = self._pool.take(self._size), None
            transfer.handle = piece.begin_read(self._disk, stored.state, transfer.buffer)
            self._begin_gradient_read(transfer)
        transfer.handle.wait()
        gradient = stored.gradient
        if transfer.gradient_read is not None and piece.gradient is not None:
            transfer.gradient_read.wait()
            gradient = transfer.buffer.tensor(piece.block.size, piece.gradient.dtype, piece.gradient.numel())
        slots = {each.name: transfer.buffer.tensor(each.start, each.dtype, each.count) for each in piece.block.slots}
        in_use = piece.in_use_in(transfer.buffer)
        # The buffer's memory replaces the file's, so that the update causes no page faults in the mapped file.
        if COPY in slots:
            piece.tensor.data = slots[COPY]
        elif piece.in_use is None and in_use is not None:
            piece.tensor.data = in_use
        state = stored.state | {name: slot for name, slot in slots.items() if stored.state.get(name) is not None}
        target = piece.in_use if piece.in_use is None or in_use is None else in_use
        transfer.slots, transfer.fetched = slots, PieceValues(state=state, gradient=gradient, in_use=target)
        return transfer.fetched

    def evict(self, piece: DiskPiece) -> None:
        """Start to copy a fetched piece back, and to read the next one of the order into its buffer."""
        stored = self._order[piece]
        stored.gradient = None  # its memory serves the next pieces, unless the optimizer keeps the gradient
        if piece.in_memory:
            if stored.in_use is not None:
                self._link.copy_in(piece.chunk, stored.in_use, piece.tensor)
            return
        transfer = self._reads[0]
        if transfer.piece is not piece or transfer.fetched is None:
            raise RuntimeError("evict() was called before fetch(); this is a bug in par-zero, please report it")
        if transfer.fetched.in_use is not None:
            self._link.copy_in(piece.chunk, transfer.fetched.in_use, piece.tensor)
        state = transfer.fetched.state
        # Until the writes end, the optimizer's state shows the buffer.
        shown = {name: slot for name, slot in transfer.slots.items() if name != COPY and state.get(name) is not None}
        for name, slot in shown.items():
            if state[name] is not slot:  # the update has made it, such as in a first step
                slot.copy_(state[name].view(-1))
                state[name] = slot
        transfer.slots, transfer.fetched = {}, None
        stored.state.clear()
        stored.state.update(state)
        if COPY in piece.views:
            shown[COPY] = piece.tensor
        transfer.shown = {name: (tensor, tensor._version) for name, tensor in shown.items()}
        transfer.handle = piece.begin_write(self._disk, transfer.buffer)
        self._writes.append(self._reads.pop(0))
        # The next read waits behind these writes in its own thread, so the step can go on with another buffer.
        self._begin_read(transfer)

    def drop_reads(self) -> None:
        """Discard all pieces that were prefetched or fetched, and not evicted: somebody may write to their state."""
        for read in self._reads:
            for handle in (read.handle, read.gradient_read):
                if handle is not None:
                    handle.error()  # threads write to the buffer until the reads have ended
            if COPY in read.piece.views:
                read.piece.tensor.data = read.piece.views[COPY]
            if read.behind is None or self._end_writes_through(read.behind):
                self._pool.give_back(read.buffer)
        self._reads.clear()
        self._order, self._unread = {}, iter(())

    def finish_writes(self) -> None:
        """Wait until all evicted pieces are in the file. A piece that cannot be written stays in memory."""
        while self._writes:
            self._end_write(self._writes.pop(0))

    def take_unwritten(self) -> list[tuple[DiskPiece, torch.Tensor]]:
        """Return pieces whose parameters in use could not be written since the last call, and these parameters."""
        found, self._unwritten = self._unwritten, []
        return found

    def _begin_read(self, behind: PieceTransfer | None = None) -> bool:
        """Start to read the next piece of the order, and return whether there is one.

        Args:
            behind: Transfer in whose buffer the piece is read, after its writes. None: a free buffer is used.
        """
        piece = next(self._unread, None)
        if piece is None:
            return False
        stored, after = self._order[piece], None if behind is None else behind.handle
        buffer = self._pool.take(self._size) if behind is None else behind.buffer
        if behind is not None:
            behind.is_reused = True
        handle, versions = piece.begin_read(self._disk, stored.state, buffer, after), piece.versions(stored.state)
        transfer = PieceTransfer(
            piece=piece, stored=stored, buffer=buffer, handle=handle, versions=versions, behind=behind
        )
        self._reads.append(transfer)
        self._begin_gradient_read(transfer)
        return True

    def _begin_gradient_read(self, read: PieceTransfer) -> None:
        """Start to read the gradient of a piece, if it is computed and in the file."""
        if read.piece.is_in_file(read.stored.gradient):
            after = None if read.behind is None else read.behind.handle
            read.gradient_read = read.piece.begin_read_gradient(self._disk, read.buffer, after)

    def _end_writes_through(self, last: PieceTransfer) -> bool:
        """Wait for all writes up to those of one transfer, and return whether its writes have succeeded."""
        while last in self._writes:
            self._end_write(self._writes.pop(0))
        return not last.piece.in_memory

    def _end_write(self, write: PieceTransfer) -> None:
        """Wait for the writes of a piece. Its state then shows the file, or the buffer for good if they failed."""
        error, piece = write.handle.error(), write.piece
        if error is not None:
            piece.in_memory = True  # its state shows the buffer for good, so the ring gets another one
            self._pool.lose(write.buffer)
            self._errors.add_unwritten(error)
            in_use = piece.in_use_in(write.buffer)
            if in_use is not None:
                self._unwritten.append((piece, in_use))
            return
        if not write.is_reused:
            self._pool.give_back(write.buffer)
        for name, (tensor, version) in write.shown.items():
            if name != COPY and write.stored.state.get(name) is not tensor:
                continue  # somebody has replaced the slot
            if tensor._version != version:  # somebody has written to the buffer since the writes began
                piece.views[name].copy_(tensor)
            if name == COPY:
                tensor.data = piece.views[name]
            else:
                write.stored.state[name] = piece.views[name]
        if piece.start is not None:
            self._on_written(piece.chunk)
