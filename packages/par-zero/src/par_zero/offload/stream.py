"""An optimizer's step where state, parameters or gradients lie on a disk.

disk     read piece k + 1 ...      write piece k - 1
memory                step piece k, by a twin

Reading begins with backward, as far as there are buffers, and the last writes end in the next forward. The slots of a
piece lie side by side in the file, so a piece is one read and one write, through a ring of buffers. Where the optimizer
has a copy of parameters that are used in another dtype, that is the first of them, and a step ends with its rounding.
Parameters that lie there themselves are not cut at whole pages, as units are gathered from one piece of the file: their
pages are read into the same buffer behind the slots, and their bytes written back.

Between steps `state[slot]` is a tensor that lies in the file, so that checkpoints and users find it as ever. What was
stepped last may be on its way when a step ends: until its writes are over, that state shows its buffer. Where a write
fails, it does so for good. For parameters, which are gathered and shown from elsewhere, a step waits.
"""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import agree, set_slots

from .._collectives import all_reduce
from ..layout.chunk import Chunk, Slice
from ..optimizer.apart import SliceSplitter
from .disk import Disk, DiskBuffer, DiskHandle, tensors_in, threads_of
from .pieces import COPY, PAGE, StateBlock, pages
from .shares import DiskShards
from .sums import DiskGradient, DiskGradients
from .twin import Twins

if TYPE_CHECKING:
    from concurrent.futures import Future

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DiskUsage:
    """What a rank has of its optimizers on a disk, and how fast that is.

    Args:
        pieces: Bytes of each piece on the disk, without padding, in the order in which `reload_state` loads them.
        read: Bytes a second that were read, with what other ranks have read meanwhile.
        write: Bytes a second that were written.
    """

    pieces: tuple[int, ...] = ()
    read: float = math.inf
    write: float = math.inf


@dataclass(eq=False, kw_only=True)
class DiskPiece:
    """A slice of which anything is on the disk.

    Args:
        tensor: The optimizer's tensor. Where it is a copy of parameters in another dtype, it lies on the disk too.
        chunk: The chunk that it is a slice of.
        first: Its first element in the chunk.
        group: Number of its param group in its optimizer.
        block: Where its state lies in the file.
        views: By slot, the tensor that lies in the file; under COPY what is there of `tensor`.
        used: The parameters in use of which the optimizer has a copy; None: they are `tensor`.
        start: Where its parameters in use lie in the file: the first byte; None: they are in memory.
        sum: Where its gradient lies in the file; None: it is in memory.
        in_memory: Whether its state is in memory for good, as the disk has not taken it, or it was recalled.
    """

    tensor: nn.Parameter
    chunk: Chunk
    first: int
    group: int
    block: StateBlock
    views: Mapping[str, torch.Tensor]
    used: torch.Tensor | None = None
    start: int | None = None
    sum: DiskGradient | None = None
    in_memory: bool = False

    @property
    def offset(self) -> int:
        """Its first element among those of its chunk that this rank updates."""
        return self.first - self.chunk.updated[0]

    def lies_in_memory_(self) -> None:
        """Its parameters in use lie in memory from now on, where its chunk has them."""
        self.start = None
        own = self.chunk.own[self.offset : self.offset + self.tensor.numel()]
        if self.used is not None:
            self.used = own
        else:
            self.tensor.data = own
            self.views = {name: view for name, view in self.views.items() if name != COPY}

    @property
    def size(self) -> int:
        """Number of the bytes that it takes of a buffer."""
        return self._slots_size + (0 if self.start is None else pages(self.start % PAGE + self._own_size))

    @property
    def _slots_size(self) -> int:
        return self.block.size + self.block.gradient_size

    @property
    def _own_size(self) -> int:
        return self.tensor.numel() * self.chunk.own.element_size()

    @property
    def at(self) -> int:
        """The first byte of its parameters in use in a buffer: they lie in its page as in the file."""
        return self._slots_size + (self.start or 0) % PAGE

    def own_in(self, buffer: DiskBuffer) -> torch.Tensor | None:
        """Its parameters in use in a buffer; None: they are in memory."""
        own = self.chunk.own
        return None if self.start is None else buffer.tensor(self.at, own.dtype, self.tensor.numel())

    def read(self, disk: Disk, state: State, buffer: DiskBuffer, after: DiskHandle | None = None) -> DiskHandle:
        """Begins to read what there is of it in the file, and what is to be stepped."""
        handle = disk.read(self.block.start, buffer.bytes[: self.stored(state)], after)
        if self.start is not None and self.used is None:
            handle += disk.read(self.start - self.start % PAGE, buffer.bytes[self._slots_size : self.size], after)
        return handle

    def read_gradient(self, disk: Disk, buffer: DiskBuffer, after: DiskHandle | None = None) -> DiskHandle:
        """Begins to read its gradient, which lies in the file."""
        first, last = self.block.size, self._slots_size
        return disk.read(self.block.start + first, buffer.bytes[first:last], after)

    def write(self, disk: Disk, buffer: DiskBuffer) -> DiskHandle:
        """Begins to write what was stepped."""
        handle = disk.write(self.block.start, buffer.bytes[: self.block.size])
        if self.start is not None:
            handle += disk.write(self.start, buffer.bytes[self.at : self.at + self._own_size])
        return handle

    def stored(self, state: State) -> int:
        """Number of the first bytes of the block that are in use: without state those of the copy alone."""
        if any(state.get(name) is not None for name in self.views):
            return self.block.size
        return self.block.copy_size

    @property
    def state_size(self) -> int:
        """Bytes of all of its slots, without padding."""
        return sum(slot.count * slot.dtype.itemsize for slot in self.block.slots)

    def stay_(self, state: State) -> None:
        """From now on its state is in memory."""
        slots = {name: state[name] for name in self.views if state.get(name) is not None}
        state.update({name: slot.clone() for name, slot in slots.items()})
        if self.used is not None:
            self.tensor.data = self.tensor.detach().clone()
        set_slots(self.tensor, {})
        self.in_memory = True

    def versions(self, state: State) -> list[tuple[int, int]]:
        """What shows whether somebody has changed its state, or the parameters that are read with it."""
        seen = [self.tensor, *(state[name] for name in self.views if state.get(name) is not None)]
        if self.start is not None and self.used is None:
            seen += [self.chunk.own, *(member.parameter for member in self.chunk.members)]
        return [(id(tensor), tensor._version) for tensor in seen]


@dataclass(eq=False, kw_only=True)
class _PendingWrite:
    """A piece that was stepped, and whose writes may be under way.

    Args:
        piece: The piece.
        buffer: Its buffer of the ring.
        handle: The writes.
        state: Its state, some of which shows the buffer.
        shown: By slot, what shows the buffer, and how often that had been changed when the writes began.
        taken: Whether another piece is read into the buffer when the writes are over.
    """

    piece: DiskPiece
    buffer: DiskBuffer
    handle: DiskHandle
    state: State
    shown: Mapping[str, tuple[torch.Tensor, int]]
    taken: bool = False


@dataclass(eq=False, kw_only=True)
class _PendingRead:
    """A piece that is read.

    Args:
        piece: The piece.
        buffer: Its buffer of the ring.
        handle: The reads.
        state: Its state.
        versions: What shows whether that was changed since the reads began.
        behind: The writes of another piece in the same buffer, which the reads wait for.
        gradient: The reads of its gradient, which begin with the step; None: that is in memory.
    """

    piece: DiskPiece
    buffer: DiskBuffer
    handle: DiskHandle
    state: State
    versions: Sequence[tuple[int, int]]
    behind: _PendingWrite | None = None
    gradient: DiskHandle | None = None


@dataclass(eq=False, kw_only=True)
class _OptimizerPieces:
    """What one optimizer has on the disk.

    Args:
        pieces: Its pieces, in the order of the file.
        moved: The pieces that its latest step has moved, in that order.
        gradients: Of pieces, while the optimizer's own step must not see them.
        work: What its step has of pieces, until that is over.
    """

    pieces: Sequence[DiskPiece]
    moved: Sequence[DiskPiece] = ()
    gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = field(default_factory=list)
    work: "_StepWork | None" = None

    def show_gradients(self) -> None:
        """Gives pieces the gradients back that the optimizer's own step must not see, and has not, if it has failed."""
        for tensor, gradient in self.gradients:
            if tensor.grad is None:
                tensor.grad = gradient
        self.gradients = []


@dataclass(eq=False, kw_only=True)
class _StepWork:
    """The pieces of one step, and all that it needs, as it was when the step began.

    Args:
        twins: What steps the pieces.
        states: Their states.
        gradients: Those that are to be stepped still, and their gradients.
        apart: What of pieces is stepped apart.
    """

    twins: Twins
    states: Mapping[DiskPiece, State]
    gradients: dict[DiskPiece, torch.Tensor]
    apart: SliceSplitter

    def has_in_file(self, piece: DiskPiece) -> bool:
        """Whether a piece's gradient lies in the file."""
        gradient = self.gradients[piece]
        return piece.sum is not None and gradient.data_ptr() == piece.sum.view.data_ptr()

    def step(self, piece: DiskPiece, state: State, used: torch.Tensor | None) -> None:
        """Steps one piece, whose state is in memory.

        Args:
            piece: The piece.
            state: Its state.
            used: Where the parameters in use go, if the piece is a copy of them.
        """
        gradient = self.gradients.pop(piece)
        taken = self.apart.take(piece.tensor, gradient, state)
        if taken is None:
            stepped = nn.Parameter(piece.tensor.detach())  # of the same memory, with a gradient that nobody takes away
            stepped.grad = gradient
            self.twins.step(stepped, piece.group, state)
        else:
            for part in taken.parts:
                self.twins.step(part.tensor, piece.group, part.state)
            taken.join_()
        if used is not None:
            used.copy_(piece.tensor)


class DiskStream:
    """Steps that of which anything lies on a disk.

    Args:
        disk: The file.
        ahead: Number of buffers.
        pieces: By number of an optimizer, its pieces: chunks, slices of theirs, their numbers of the param group there,
            and their blocks.
        shares: For each chunk whose parameters lie in the file, the first byte of this rank's share.
        groups: The ranks that learn of each other's failures.
        late: Whether a thread steps the pieces after the optimizer's own step has returned, those of the modules that
            run first before others.
    """

    def __init__(
        self,
        disk: Disk,
        ahead: int,
        pieces: Mapping[int, Sequence[tuple[Chunk, Slice, int, StateBlock]]],
        shares: Mapping[Chunk, int],
        groups: Sequence[dist.ProcessGroup],
        *,
        late: bool,
    ) -> None:
        self._disk, self._ahead, self._groups = disk, ahead, tuple(groups)
        self._sums: dict[Chunk, list[DiskGradient]] = {}
        self.shares = DiskShards(disk, shares, self._is_stepping, self._is_unread)
        self._own = {
            owner: _OptimizerPieces(
                pieces=[self._piece(*given) for given in (reversed(of_owner) if late else of_owner)]
            )
            for owner, of_owner in pieces.items()
        }
        self.sums = DiskGradients(disk, self._sums, self._is_unwritten, self._is_unread)
        self._size = max((piece.size for own in self._own.values() for piece in own.pieces), default=0)
        self._buffers = 0  # that were made
        self._free: list[DiskBuffer] = []
        self._reading: list[_PendingRead] = []
        self._writing: list[_PendingWrite] = []
        self._latest: list[int] = []  # the optimizers that have stepped since the latest pass began
        self._problem: Exception | None = None
        self._is_lost = False  # whether something is NaN now for that
        self.on_lost: Callable[[], None] = lambda: None  # is called on all ranks where something was NaN
        self._left: list[tuple[DiskPiece, torch.Tensor]] = []  # parameters that could not be written
        self._stopped: Exception | None = None  # why a thread has left a step half-way, until all ranks were told
        self._worker = threads_of(1) if late else None
        self._jobs: list[Future[None]] = []
        self._awaited: Counter[Chunk] = Counter()  # how many pieces of each chunk a thread has to step
        self._stepped = Condition()

    def _piece(self, chunk: Chunk, part: Slice, group: int, block: StateBlock) -> DiskPiece:
        views = tensors_in(self._disk, block)
        used, start = None, self.shares.start(chunk, part.start)
        low, _ = chunk.updated
        if chunk.master is not chunk.own:
            used = chunk.own[part.start - low : part.stop - low]
        elif start is not None:
            views[COPY] = chunk.elsewhere[part.start]
        set_slots(part.tensor, {name: view for name, view in views.items() if name != COPY})
        kept = None
        if block.gradient is not None:
            first = block.start + block.gradient.start
            view = self._disk.tensor(first, block.gradient.dtype, block.gradient.count)
            kept = DiskGradient(tensor=part.tensor, offset=part.start - low, start=first, view=view)
            self._sums.setdefault(chunk, []).append(kept)
        return DiskPiece(
            tensor=part.tensor,
            chunk=chunk,
            first=part.start,
            group=group,
            block=block,
            views=views,
            used=used,
            start=start,
            sum=kept,
        )

    def has(self, owner: int) -> bool:
        """Whether an optimizer may have anything on the disk of any rank."""
        return owner in self._own

    @property
    def is_late(self) -> bool:
        """Whether a thread steps the pieces after the optimizer's own step has returned."""
        return self._worker is not None

    @property
    def ring_bytes(self) -> int:
        """Bytes of the buffers that there are."""
        return self._size * self._buffers + self.shares.buffer_bytes + self.sums.buffer_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of the file that have copies of parameters, or did before those were in memory."""
        return sum(piece.block.copy_size for own in self._own.values() for piece in own.pieces)

    @property
    def state_bytes(self) -> int:
        """Bytes of the file that have the optimizers' state, or have room for it."""
        return sum(piece.block.size for own in self._own.values() for piece in own.pieces) - self.copy_bytes

    @property
    def on_disk(self) -> set[nn.Parameter]:
        """The optimizers' tensors that have anything on the disk: all that is not in memory for good."""
        return {piece.tensor for own in self._own.values() for piece in own.pieces if not piece.in_memory}

    def _recallable(self) -> list[tuple[int, DiskPiece]]:
        """What is on the disk and may leave it, with the number of its optimizer: first what a step waits for most.

        State beside parameters or gradients that lie there themselves stays. What comes first in the file is read
        while backward runs, and what a thread steps first is needed first.
        """
        return [
            (owner, piece)
            for owner, own in self._own.items()
            for piece in (own.pieces if self.is_late else reversed(own.pieces))
            if not piece.in_memory and piece.start is None and piece.sum is None
        ]

    @torch.no_grad()
    def look(self) -> DiskUsage:
        """The sizes of the pieces on the disk, and its rates: as many pieces as there are buffers are read and written.

        Raises:
            OSError: The disk has failed.
        """
        self.settle()
        pieces = [piece for _, piece in self._recallable()]
        tried = [(piece.block, DiskBuffer(piece.block.size)) for piece in pieces[: self._ahead]]
        seconds = [math.inf, math.inf]
        for _ in range(2):  # the first time pages are made, and what was written before is under way
            for number, move in ((0, self._disk.read), (1, self._disk.write)):
                began = time.perf_counter()
                for handle in [move(block.start, buffer.bytes[: block.size]) for block, buffer in tried]:
                    handle.wait()
                seconds[number] = min(seconds[number], time.perf_counter() - began)
        size = sum(block.size for block, _ in tried)
        read, write = (size / each if size else math.inf for each in seconds)
        return DiskUsage(pieces=tuple(piece.state_size for piece in pieces), read=read, write=write)

    @torch.no_grad()
    def recall(self, size: int, optimizers: Sequence[Optimizer]) -> int:
        """Brings pieces to memory for good, one after the other as far as they have room.

        Args:
            size: Bytes that they may take.
            optimizers: All optimizers, by number.

        Returns:
            Bytes that they take.
        """
        self.settle()
        recalled = 0
        for owner, piece in self._recallable():
            if recalled + piece.state_size <= size:
                piece.stay_(optimizers[owner].state.get(piece.tensor, {}))
                recalled += piece.state_size
        for own in self._own.values():
            own.moved = [piece for piece in own.moved if not piece.in_memory]
        return recalled

    def tensors(self, owner: int) -> list[nn.Parameter]:
        """The tensors of an optimizer that have anything on the disk."""
        return [piece.tensor for piece in self._own[owner].pieces]

    @torch.no_grad()
    def adopt_(self, owner: int, optimizer: Optimizer) -> None:
        """Brings state that somebody has made in memory to its place in the file."""
        self.settle()
        for piece in self._own[owner].pieces:
            if piece.tensor in optimizer.state:
                _adopt_(piece, optimizer.state[piece.tensor])

    def forget_gradients(self, owners: Iterable[int]) -> None:
        """Drops what is hidden of gradients, where the own step of some optimizers has failed."""
        for owner in owners:
            self._own[owner].gradients = []

    @torch.no_grad()
    def read_ahead(self, optimizers: Sequence[Optimizer]) -> None:
        """Begins to read what the next step needs first, as far as there are buffers: a backward pass has begun.

        Nothing waits but for a step that is still under way. The optimizer that stepped first last time is expected to
        do so again, with the same pieces.

        Args:
            optimizers: All optimizers, by number.
        """
        self.join()
        for own in self._own.values():
            own.show_gradients()
        if self._latest and not self._reading:
            owner = self._latest[0]
            self._latest = []
            while self._writing and self._writing[0].handle.is_over():
                self._finish(self._writing.pop(0))
            under_way = {writing.piece for writing in self._writing}
            for piece in self._own[owner].moved:
                if piece.in_memory or piece in under_way or not self._has_buffer:
                    break
                self._read(piece, optimizers[owner].state[piece.tensor], self._buffer())

    @torch.no_grad()
    def step(self, owner: int, optimizer: Optimizer, apart: SliceSplitter) -> None:
        """Steps an optimizer's pieces, or notes what a thread is to step, and hides their gradients until `end_step`.

        A read that fails ends this before its piece is touched; `raise_problem` tells.

        Args:
            owner: Number of the optimizer.
            optimizer: The optimizer, whose own step follows.
            apart: What of pieces is stepped apart.
        """
        own = self._own[owner]
        self.shares.drop()
        found_inf = getattr(optimizer, "found_inf", None)  # as torch's GradScaler sets it, for kernels that skip
        gradients = {piece: piece.tensor.grad for piece in own.pieces if piece.tensor.grad is not None}
        own.gradients += [(piece.tensor, gradient) for piece, gradient in gradients.items()]
        if found_inf is None or not float(found_inf):
            states = {piece: optimizer.state[piece.tensor] for piece in gradients}
            own.work = _StepWork(twins=Twins(optimizer), states=states, gradients=gradients, apart=apart)
            self._latest.append(owner)
            if self._worker is None:
                self._run(own, own.work)
        for tensor, _ in own.gradients:
            tensor.grad = None

    @torch.inference_mode(mode=False)  # where what is made would have no version
    @torch.no_grad()
    def _run(self, own: _OptimizerPieces, work: _StepWork) -> None:
        """Steps the pieces of an optimizer, on whichever thread."""
        try:
            self._finish_writes()
            self._step(own, work)
        except Exception as error:
            if isinstance(error, OSError):
                text = (
                    f"what a step needs of the disk at {self._disk.folder!r} cannot be read ({error}), so this "
                    "step has stopped half-way; load the latest checkpoint, and offload to another disk"
                )
                error = OSError(error.errno, text)
            elif self._worker is None:
                raise
            self._problem = error
            if self._worker is not None:
                self._stopped = error
        finally:
            if self._worker is not None:
                with self._stepped:
                    for piece in work.states:  # what an error has left out
                        self._awaited[piece.chunk] = 0
                    self._stepped.notify_all()

    def _step(self, own: _OptimizerPieces, work: _StepWork) -> None:
        for piece, state in work.states.items():
            _adopt_(piece, state)
            if piece.in_memory:
                work.step(piece, state, piece.used)
                self._tell(piece)
        own.moved = [piece for piece in work.states if not piece.in_memory]
        ahead = [(reading.piece, reading.versions) for reading in self._reading]
        if ahead != [(piece, piece.versions(work.states[piece])) for piece in own.moved[: len(ahead)]]:
            self._drop_reads()
        for reading in self._reading:
            self._read_gradient(work, reading)
        to_read = iter(own.moved[len(self._reading) :])
        self._fill(work, to_read)
        try:
            for piece in own.moved:
                if not self._reading:  # all buffers are of writes that were under way
                    self._finish(self._writing.pop(0))
                    self._fill(work, to_read)
                reading = self._reading[0]
                if reading.behind is not None and not self._finish_until(reading.behind):
                    reading.buffer = DiskBuffer(self._size)  # that of a write that has failed is kept
                    reading.handle = piece.read(self._disk, reading.state, reading.buffer)
                    reading.behind = None
                    self._read_gradient(work, reading)
                reading.handle.wait()
                if reading.gradient is not None:
                    reading.gradient.wait()
                writing = self._step_read(work, reading)
                self._reading.pop(0)
                following = next(to_read, None)
                if following is not None:
                    writing.taken = True
                    self._read(following, work.states[following], writing.buffer, behind=writing)
                    self._read_gradient(work, self._reading[-1])
        except BaseException:  # that of an optimizer too
            self._drop_reads()
            raise
        finally:
            if self.shares.are_there:
                self._finish_writes()
                self._keep_left()

    def _keep_left(self) -> None:
        """Where parameters could not be written, all of their chunk's lie in memory from now on."""
        left, self._left = self._left, []
        for chunk in dict.fromkeys(piece.chunk for piece, _ in left):
            own = torch.empty_like(chunk.own)
            self.shares.fetch_(chunk, own)
            for piece, values in left:
                if piece.chunk is chunk:
                    own[piece.offset : piece.offset + values.numel()] = values
            self.shares.leave(chunk)
            chunk.take_own_(own, {})
            chunk.home = replace(chunk.home, parameters="device")
            for piece in self._pieces_of(chunk):
                piece.lies_in_memory_()

    def _pieces_of(self, chunk: Chunk) -> list[DiskPiece]:
        return [piece for own in self._own.values() for piece in own.pieces if piece.chunk is chunk]

    def _tell(self, piece: DiskPiece) -> None:
        """Tells those who wait for a piece that its parameters are those after the step."""
        if self._worker is not None:
            with self._stepped:
                self._awaited[piece.chunk] -= 1
                self._stepped.notify_all()

    def _step_read(self, work: _StepWork, reading: _PendingRead) -> _PendingWrite:
        """Steps a piece that was read, and begins to write it."""
        piece, state, buffer = reading.piece, reading.state, reading.buffer
        lent = {slot.name: buffer.tensor(slot.start, slot.dtype, slot.count) for slot in piece.block.slots}
        if reading.gradient is not None and piece.block.gradient is not None:
            place = piece.block.gradient
            work.gradients[piece] = buffer.tensor(place.start, place.dtype, place.count)
        used = piece.own_in(buffer)
        copy = lent.pop(COPY, used if piece.used is None else None)
        if copy is not None:
            piece.tensor.data = copy
        stepped = state | {name: tensor for name, tensor in lent.items() if state.get(name) is not None}
        work.step(piece, stepped, piece.used if used is None or piece.used is None else used)
        if used is None:
            self._tell(piece)
        lent = {name: tensor for name, tensor in lent.items() if stepped.get(name) is not None}
        for name, tensor in lent.items():
            if stepped[name] is not tensor:  # such as what a first step makes
                tensor.copy_(stepped[name].view(-1))
                stepped[name] = tensor
        state.clear()
        state.update(stepped)
        handle = piece.write(self._disk, buffer)
        shown = {name: (tensor, tensor._version) for name, tensor in lent.items()}
        if copy is not None:
            shown[COPY] = (piece.tensor, piece.tensor._version)
        self._writing.append(_PendingWrite(piece=piece, buffer=buffer, handle=handle, state=state, shown=shown))
        return self._writing[-1]

    @property
    def _has_buffer(self) -> bool:
        """Whether there is a buffer of the ring that nobody uses, or one may be made."""
        return bool(self._free) or self._buffers < self._ahead

    def _buffer(self) -> DiskBuffer:
        """A buffer of the ring that nobody uses."""
        if self._free:
            return self._free.pop()
        self._buffers += 1
        return DiskBuffer(self._size)

    def _fill(self, work: _StepWork, pieces: Iterator[DiskPiece]) -> None:
        """Begins to read pieces and their gradients into all buffers that nobody uses."""
        while self._has_buffer:
            following = next(pieces, None)
            if following is None:
                return
            self._read(following, work.states[following], self._buffer())
            self._read_gradient(work, self._reading[-1])

    def _read(self, piece: DiskPiece, state: State, buffer: DiskBuffer, behind: _PendingWrite | None = None) -> None:
        """Begins to read what there is of a piece in the file."""
        after = None if behind is None else behind.handle
        handle = piece.read(self._disk, state, buffer, after)
        reading = _PendingRead(
            piece=piece, buffer=buffer, handle=handle, state=state, versions=piece.versions(state), behind=behind
        )
        self._reading.append(reading)

    def _read_gradient(self, work: _StepWork, reading: _PendingRead) -> None:
        """Begins to read the gradient of a piece, if it lies in the file."""
        if work.has_in_file(reading.piece):
            after = None if reading.behind is None else reading.behind.handle
            reading.gradient = reading.piece.read_gradient(self._disk, reading.buffer, after)

    def _drop_reads(self) -> None:
        """Forgets what was read and not stepped."""
        for reading in self._reading:
            reading.handle.error()  # what is under way uses the buffer
            if reading.gradient is not None:
                reading.gradient.error()
            if COPY in reading.piece.views:
                reading.piece.tensor.data = reading.piece.views[COPY]
            if reading.behind is None or self._finish_until(reading.behind):
                self._free.append(reading.buffer)
            else:
                self._free.append(DiskBuffer(self._size))
        self._reading.clear()

    @torch.no_grad()
    def settle(self, *_: Any) -> None:
        """Waits for what the latest step has begun to write. State lies in the file then, or, if it cannot, stays.

        What was read ahead is forgotten, as somebody may write state now.

        Raises:
            Exception: A thread has left a step half-way, so that state is no longer whole.
        """
        self.join()
        if self._stopped is not None:
            raise self._stopped
        self._drop_reads()
        self._finish_writes()
        self.shares.drop()

    def join(self) -> None:
        """Waits until a thread has stepped all that it is to step."""
        for job in self._jobs:
            job.result()
        for own in self._own.values() if self._jobs else ():
            if own.work is not None:
                own.work.twins.take_over_()
                own.work = None
        self._jobs.clear()

    def wait_for(self, chunks: Sequence[Chunk]) -> None:
        """Waits until a thread has stepped what it is to step of some chunks."""
        with self._stepped:
            self._stepped.wait_for(lambda: not self._is_stepping(chunks))

    def _is_stepping(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a thread is still to step anything of some chunks."""
        return any(self._awaited[chunk] for chunk in chunks)

    def before_step(self, owner: int) -> None:
        """Waits for an optimizer's step before, as far as it is under way.

        Raises:
            OSError: That has failed, here or on another rank. An all-reduce, where a thread steps.
        """
        if self.is_late:
            self._own[owner].show_gradients()  # no thread has stepped these, where the optimizer's own step has failed
            if self._own[owner].work is not None:
                self.join()
            self.raise_problem()

    def finish(self) -> None:
        """Waits for the steps of all optimizers, as far as they are under way.

        Raises:
            OSError: One has failed, here or on another rank. An all-reduce, where a thread steps.
        """
        if self.is_late:
            self.join()
            self.raise_problem()

    def _finish_writes(self) -> None:
        while self._writing:
            self._finish(self._writing.pop(0))

    def _finish_until(self, last: _PendingWrite) -> bool:
        """Waits for writes up to some. Whether those have gone well."""
        while last in self._writing:
            self._finish(self._writing.pop(0))
        return not last.piece.in_memory

    def _finish(self, writing: _PendingWrite) -> None:
        """Waits for the writes of a piece."""
        error = writing.handle.error()
        piece = writing.piece
        if error is not None:
            piece.in_memory = True
            self._is_unwritten(error)
            own = piece.own_in(writing.buffer)
            if own is not None:
                self._left.append((piece, own))
            if not writing.taken:
                self._free.append(DiskBuffer(self._size))
            return
        if piece.start is not None:
            self._tell(piece)
        if not writing.taken:
            self._free.append(writing.buffer)
        for name, (tensor, version) in writing.shown.items():
            if name == COPY or writing.state.get(name) is tensor:
                if tensor._version != version:  # somebody has written to it since
                    piece.views[name].copy_(tensor)
                if name == COPY:
                    tensor.data = piece.views[name]
                else:
                    writing.state[name] = piece.views[name]

    def end_step(self, owner: int) -> None:
        """After the optimizer's own step: what it must not see comes back, or goes to a thread."""
        own = self._own[owner]
        own.show_gradients()
        if own.work is None:
            return
        if self._worker is None:
            own.work.twins.take_over_()
            own.work = None
        else:
            with self._stepped:
                self._awaited.update(piece.chunk for piece in own.work.states)
            self._jobs.append(self._worker.submit(self._run, own, own.work))

    def _is_unread(self, error: BaseException) -> None:
        """Parameters or gradients of this rank cannot be read, amid what all ranks do."""
        text = (
            f"parameters or gradients on the disk at {self._disk.folder!r} cannot be read ({error}), so what was "
            "computed with them is NaN; load the latest checkpoint, and offload to another disk"
        )
        self._problem, self._is_lost = OSError(getattr(error, "errno", None), text), True

    def _is_unwritten(self, error: BaseException) -> None:
        """Something cannot be written, and stays in memory."""
        text = (
            f"what was computed cannot be written to the disk at {self._disk.folder!r} ({error}). It stays in memory, "
            "and nothing is lost; save a checkpoint, and offload to another disk"
        )
        self._problem = self._problem or OSError(getattr(error, "errno", None), text)

    def raise_problem(self, *groups: dist.ProcessGroup) -> None:
        """Raises on all ranks, if the disk of any has failed. An all-reduce of an int32 over each group.

        Args:
            groups: The ranks; by default those of all groups.

        Raises:
            OSError: A read or a write has failed, here or on another rank.
        """
        groups = groups or self._groups
        failed = torch.tensor([self._problem is not None, self._is_lost], dtype=torch.int32)
        for group in groups:
            all_reduce(failed, group, dist.ReduceOp.MAX).wait()
        if not failed.any():
            return
        problem, self._problem, self._stopped = self._problem, None, None
        self._is_lost = False
        if failed[1]:
            self.on_lost()
        try:
            agree(problem, None, *groups)
        except ValueError as error:  # of another rank
            raise OSError(str(error)) from None


def _adopt_(piece: DiskPiece, state: State) -> None:
    """Brings state of a piece that is in memory to its place in the file."""
    for name, view in () if piece.in_memory else piece.views.items():
        value = state.get(name) if name != COPY else None
        if value is None or value is view:
            continue
        if value.dtype != view.dtype or value.numel() != view.numel():
            warnings.warn(
                f"the slot {name!r} has {value.numel()} elements of {value.dtype}, and its place on the disk is for "
                f"{view.numel()} of {view.dtype}, so this part stays in memory",
                stacklevel=2,
            )
            piece.stay_(state)
            return
        view.copy_(value.view(-1))
        state[name] = view
