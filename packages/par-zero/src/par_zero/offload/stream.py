"""An optimizer's step where state lies on a disk.

disk     read piece k + 1 ...      write piece k - 1
memory                step piece k, by a twin

The slots of a piece lie side by side in the file, so a piece is one read and one write, through a ring of buffers.
Between steps `state[slot]` is a tensor that lies in the file, so that checkpoints and users find it as ever. What was
stepped last may be on its way when a step ends: until its writes are over, that state shows its buffer. Where a write
fails, it does so for good.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import agree, set_slots

from .._collectives import all_reduce
from ..layout.chunk import Slice
from ..optimizer.step import Unmoved
from .disk import Buffer, Disk, Handle
from .pieces import Block
from .twin import Twins

State = dict[str, Any]


@dataclass(eq=False, kw_only=True)
class Piece:
    """A slice whose state is on the disk.

    Args:
        tensor: The optimizer's tensor.
        group: Number of its param group in its optimizer.
        block: Where its state lies in the file.
        views: By slot, the tensor that lies in the file.
        in_memory: Whether its state is in memory for good, as the disk has not taken it.
    """

    tensor: nn.Parameter
    group: int
    block: Block
    views: Mapping[str, torch.Tensor]
    in_memory: bool = False


@dataclass(eq=False, kw_only=True)
class _Writing:
    """A piece that was stepped, and whose writes may be under way.

    Args:
        piece: The piece.
        number: Number of its buffer in the ring.
        handle: The writes.
        state: Its state, some of which shows the buffer.
        shown: By slot, what shows the buffer, and how often that had been changed when the writes began.
    """

    piece: Piece
    number: int
    handle: Handle
    state: State
    shown: Mapping[str, tuple[torch.Tensor, int]]


@dataclass(eq=False, kw_only=True)
class _Own:
    """What one optimizer has on the disk.

    Args:
        pieces: Its pieces, in the order of the file.
        gradients: Of pieces, while the optimizer's own step must not see them.
        twins: What steps the pieces, from the beginning of a step to its end.
    """

    pieces: Sequence[Piece]
    gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = field(default_factory=list)
    twins: Twins | None = None


class Stream:
    """Steps what has its state on a disk.

    Args:
        disk: The file.
        ahead: Number of buffers.
        pieces: By number of an optimizer, its pieces: slices, their numbers of the param group there, and their blocks.
        groups: The ranks that learn of each other's failures.
    """

    def __init__(
        self,
        disk: Disk,
        ahead: int,
        pieces: Mapping[int, Sequence[tuple[Slice, int, Block]]],
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        self._disk, self._ahead, self._groups = disk, ahead, tuple(groups)
        self._own = {
            owner: _Own(pieces=[self._piece(*given) for given in of_owner]) for owner, of_owner in pieces.items()
        }
        self._size = max((piece.block.size for own in self._own.values() for piece in own.pieces), default=0)
        self._ring: list[Buffer] = []
        self._writing: list[_Writing] = []
        self._problem: OSError | None = None

    def _piece(self, part: Slice, group: int, block: Block) -> Piece:
        views = {slot.name: self._disk.tensor(block.start + slot.start, slot.dtype, slot.count) for slot in block.slots}
        set_slots(part.tensor, views)
        return Piece(tensor=part.tensor, group=group, block=block, views=views)

    def has(self, owner: int) -> bool:
        """Whether an optimizer may have state on the disk of any rank."""
        return owner in self._own

    @property
    def ring_bytes(self) -> int:
        """Bytes of the buffers that there are."""
        return self._size * len(self._ring)

    def tensors(self, owner: int) -> list[nn.Parameter]:
        """The tensors of an optimizer that have their state on the disk."""
        return [piece.tensor for piece in self._own[owner].pieces]

    @torch.no_grad()
    def adopt_(self, owner: int, optimizer: Optimizer) -> None:
        """Brings state that somebody has made in memory to its place in the file."""
        self.settle()
        for piece in self._own[owner].pieces:
            if piece.tensor in optimizer.state:
                _adopt_(piece, optimizer.state[piece.tensor])

    @torch.no_grad()
    def step(self, owner: int, optimizer: Optimizer, unmoved: Unmoved) -> None:
        """Steps an optimizer's pieces, and hides their gradients until `end_step`.

        A read that fails ends this before its piece is touched; `raise_problem` tells.

        Args:
            owner: Number of the optimizer.
            optimizer: The optimizer, whose own step follows.
            unmoved: What must stay as it is.
        """
        self.settle()
        own = self._own[owner]
        pieces = [piece for piece in own.pieces if piece.tensor.grad is not None]
        found_inf = getattr(optimizer, "found_inf", None)  # as torch's GradScaler sets it, for kernels that skip
        if found_inf is None or not float(found_inf):
            own.twins = Twins(optimizer)
            try:
                self._step(own.twins, optimizer, pieces, unmoved)
            except OSError as error:
                text = (
                    f"the optimizer's state on the disk at {self._disk.folder!r} cannot be read ({error}), so this "
                    "step has stopped half-way; load the latest checkpoint, and offload to another disk"
                )
                self._problem = OSError(error.errno, text)
        own.gradients = [(piece.tensor, piece.tensor.grad) for piece in pieces]
        for piece in pieces:
            piece.tensor.grad = None

    def _step(self, twins: Twins, optimizer: Optimizer, pieces: Sequence[Piece], unmoved: Unmoved) -> None:
        states = [optimizer.state[piece.tensor] for piece in pieces]
        for piece, state in zip(pieces, states, strict=True):
            _adopt_(piece, state)
            if piece.in_memory:
                _step_piece(twins, piece, state, unmoved)
        moved = [pair for pair in zip(pieces, states, strict=True) if not pair[0].in_memory]
        self._ring += [Buffer(self._size) for _ in range(len(self._ring), min(self._ahead, len(moved)))]
        size = len(self._ring)
        reads = [self._read(*pair, number) for number, pair in enumerate(moved[:size])]
        try:
            for number, (piece, state) in enumerate(moved):
                if number >= size and not self._finish(self._writing.pop(0)):
                    reads[number] = self._read(piece, state, number % size)  # into another buffer, as that is kept
                reads[number].wait()
                buffer = self._ring[number % size]
                lent = {slot.name: buffer.tensor(slot.start, slot.dtype, slot.count) for slot in piece.block.slots}
                stepped = state | {name: tensor for name, tensor in lent.items() if name in state}
                _step_piece(twins, piece, stepped, unmoved)
                for name, tensor in lent.items():
                    if name in stepped and stepped[name] is not tensor:  # such as what a first step makes
                        tensor.copy_(stepped[name].view(-1))
                        stepped[name] = tensor
                state.clear()
                state.update(stepped)
                write = self._disk.write(piece.block.start, buffer.bytes[: piece.block.size])
                shown = {name: (tensor, tensor._version) for name, tensor in lent.items() if name in state}
                self._writing.append(
                    _Writing(piece=piece, number=number % size, handle=write, state=state, shown=shown)
                )
                if number + size < len(moved):
                    reads.append(self._read(*moved[number + size], number % size, after=write))
        finally:
            for read in reads:
                read.error()  # what is under way uses the buffers

    def _read(self, piece: Piece, state: State, number: int, after: Handle | None = None) -> Handle:
        """Begins to read a piece into a buffer of the ring, if any of its state lies in the file."""
        if not any(name in state for name in piece.views):
            return Handle([])
        return self._disk.read(piece.block.start, self._ring[number].bytes[: piece.block.size], after)

    @torch.no_grad()
    def settle(self, *_: Any) -> None:
        """Waits for what the latest step has begun to write. State lies in the file then, or, if it cannot, stays."""
        while self._writing:
            self._finish(self._writing.pop(0))

    def _finish(self, writing: _Writing) -> bool:
        """Waits for the writes of a piece. Whether its buffer is free."""
        error = writing.handle.error()
        piece = writing.piece
        if error is not None:
            piece.in_memory = True
            self._ring[writing.number] = Buffer(self._size)
            text = (
                f"the optimizer's state cannot be written to the disk at {self._disk.folder!r} ({error}). It stays in "
                "memory, and nothing is lost; save a checkpoint, and offload to another disk"
            )
            self._problem = self._problem or OSError(getattr(error, "errno", None), text)
            return False
        for name, (tensor, version) in writing.shown.items():
            if writing.state.get(name) is tensor:
                if tensor._version != version:  # somebody has written to it since
                    piece.views[name].copy_(tensor)
                writing.state[name] = piece.views[name]
        return True

    def end_step(self, owner: int) -> None:
        """After the optimizer's own step: what it must not see comes back."""
        own = self._own[owner]
        for tensor, gradient in own.gradients:
            tensor.grad = gradient
        own.gradients = []
        if own.twins is not None:
            own.twins.take_over_()
            own.twins = None

    def raise_problem(self) -> None:
        """Raises on all ranks, if the disk of any has failed. An all-reduce of an int32 over each group.

        Raises:
            OSError: A read or a write has failed, here or on another rank.
        """
        failed = torch.tensor([self._problem is not None], dtype=torch.int32)
        for group in self._groups:
            all_reduce(failed, group, dist.ReduceOp.MAX).wait()
        if not failed:
            return
        problem, self._problem = self._problem, None
        try:
            agree(problem, None, *self._groups)
        except ValueError as error:  # of another rank
            raise OSError(str(error)) from None


def _adopt_(piece: Piece, state: State) -> None:
    """Brings state of a piece that is in memory to its place in the file."""
    for name, view in () if piece.in_memory else piece.views.items():
        value = state.get(name)
        if value is None or value is view:
            continue
        if value.dtype != view.dtype or value.numel() != view.numel():
            warnings.warn(
                f"the slot {name!r} has {value.numel()} elements of {value.dtype}, and its place on the disk is for "
                f"{view.numel()} of {view.dtype}, so this part stays in memory",
                stacklevel=2,
            )
            state.update({other: state[other].clone() for other in piece.views if other in state})
            piece.in_memory = True
            return
        view.copy_(value.view(-1))
        state[name] = view


def _step_piece(twins: Twins, piece: Piece, state: State, unmoved: Unmoved) -> None:
    """Steps one piece, whose state is in memory."""
    kept = unmoved.kept(piece.tensor, state)
    twins.step(piece.tensor, piece.group, state)
    if kept is not None:
        kept.restore_(state)
