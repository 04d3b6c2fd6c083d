"""Optimizer steps whose state, parameters or gradients are on a disk, or on the host of an accelerator.

A step calls `fetch`, updates and calls `evict` for one piece after the other (`_step_pieces`). Prefetching starts with
backward, and the last writes end in the next forward. With a thread, the whole loop runs during the next forward, or,
for chunks whose gradients are reduced, during backward (`_step_in_backward`).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import SCALARS, TensorStepper

from ..layout.chunk import Chunk
from ..optimizer.apart import SliceSplitter
from .errors import DiskErrors
from .gradients import DiskGradients
from .host_gradients import HostGradients
from .link import DeviceLink, HostReads, link_of
from .offloaded import OffloadedOptimizer, OffloadedStep
from .piece import DiskPiece, make_piece
from .plan import OffloadPlan
from .runner import StepRunner
from .shards import DiskShards
from .staging import StagingBuffer
from .swapper import PieceValues, StateSwapper

if TYPE_CHECKING:
    from ..layout.gradients import GradientStore
    from .disk import Disk


@dataclass(frozen=True, kw_only=True)
class DiskUsage:
    """State that a rank keeps on a disk, and the disk's transfer rates.

    Args:
        pieces: Bytes of each piece on the disk, without padding, in the order in which `reload_state` loads them.
        read: Bytes per second of reads, while the other ranks read as well.
        write: Bytes per second of writes.
    """

    pieces: tuple[int, ...] = ()
    read: float = math.inf
    write: float = math.inf


class DiskTier:
    """The part of optimizers, parameters and gradients that a rank steps piece by piece.

    It is on the rank's disk or, of an accelerator, on the host.

    Args:
        plan: Tiers of the chunks, and the file.
        chunks: The chunks, in backward order.
        optimizers: All optimizers, which methods name by number.
        groups: Process groups whose ranks raise errors of disks and step threads together.
        device: Device of the all-reduces over these groups.
        has_all_gradients: Function that returns whether this rank has gradients of all parameters of a chunk.

    Attributes:
        link: Link between the device and its host.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        chunks: Sequence[Chunk],
        optimizers: Sequence[Optimizer],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        has_all_gradients: Callable[[Chunk], bool],
    ) -> None:
        # Without a file, no piece, shard or gradient is on a disk, so nothing reads or writes it.
        self._disk, self._depth = cast("Disk", plan.disk), plan.depth
        # Ranks raise errors of disks and of step threads together. Flags of groups without a CPU backend are on the
        # device, and each step would wait for them. So if such groups use no disk, a rank's thread raises on this rank
        # only. An error of a step that is not late is raised by the program's own call.
        raises_together = plan.disk is not None or (plan.late and device.type == "cpu")
        self.errors = DiskErrors(plan.folder, groups if raises_together else (), device)
        self.link = link_of(chunks[0].flat.device, plan.depth)
        self.runner = StepRunner(late=plan.late)
        starts = {chunk: start for chunk, start in zip(chunks, plan.shard_starts, strict=True) if start is not None}
        self.shards = DiskShards(self._disk, starts, self.runner.is_pending, self.errors)
        self._optimizers = [OffloadedOptimizer(optimizer=optimizer, pieces=[]) for optimizer in optimizers]
        first_groups = list(accumulate((len(optimizer.param_groups) for optimizer in optimizers), initial=0))
        gradients: dict[Chunk, list[DiskPiece]] = {}
        on_host: dict[Chunk, list[DiskPiece]] = {}
        for chunk, tiers in zip(chunks, plan.chunks, strict=True):
            parts = [part for part in chunk.slices if part.in_pieces]
            for part, block in zip(parts, tiers.blocks, strict=True):
                group = part.group - first_groups[chunk.plan.owner]
                piece = make_piece(self._disk, chunk, part, group, block, starts.get(chunk))
                self._optimizers[chunk.plan.owner].pieces.append(piece)
                if piece.gradient is not None:
                    gradients.setdefault(chunk, []).append(piece)
                elif plan.slabs is not None:
                    on_host.setdefault(chunk, []).append(piece)
        if plan.late:
            # Chunks are in backward order. A thread steps them in forward order, as the next forward waits for it.
            for own in self._optimizers:
                own.pieces.reverse()
        self.gradients = DiskGradients(self._disk, gradients, self.errors)
        self.gradient_stores: list[GradientStore] = [self.gradients]
        self._host_gradients: HostGradients | None = None
        if isinstance(self.link, DeviceLink):
            self._host_gradients = HostGradients(self.link, on_host)
            self.gradient_stores.append(self._host_gradients)
            if plan.in_backward:
                self._host_gradients.step_in_backward = self._step_in_backward
        self._has_all_gradients = has_all_gradients
        size = max((piece.size for piece in self._pieces if not piece.in_memory), default=0)
        self._swapper = StateSwapper(self._disk, size, plan.depth, self.errors, self.runner.finish_piece, self.link)
        self._stepped: list[OffloadedOptimizer] = []  # in the order of their steps since the latest backward began

    @property
    def _pieces(self) -> list[DiskPiece]:
        return [piece for own in self._optimizers for piece in own.pieces]

    @property
    def is_in_backward(self) -> bool:
        """Whether pieces are stepped within backward."""
        return self._host_gradients is not None and self._host_gradients.step_in_backward is not None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all staging buffers in host memory."""
        found = self._swapper.buffer_bytes + self.shards.buffer_bytes + self.gradients.buffer_bytes
        return found + self.link.buffer_bytes

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Bytes of the file by kind, in use or reserved."""
        copies = sum(piece.block.copy_size for piece in self._pieces)
        return {
            "parameters": self.shards.stored_bytes,
            "gradients": self.gradients.stored_bytes,
            "optimizer": sum(piece.block.size for piece in self._pieces) - copies,
            "copies": copies,
        }

    @property
    def tensors_on_disk(self) -> set[nn.Parameter]:
        """The optimizers' tensors of which anything is on the disk."""
        return {piece.tensor for piece in self._pieces if not piece.in_memory}

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the host's memory for gradients of an accelerator."""
        return 0 if self._host_gradients is None else self._host_gradients.bytes

    def tensors(self, owner: int) -> list[nn.Parameter]:
        """Return the tensors of an optimizer's pieces."""
        return [piece.tensor for piece in self._optimizers[owner].pieces]

    @torch.no_grad()
    def measure(self) -> DiskUsage:
        """Return sizes of the pieces, and transfer rates from reading and writing as many pieces as there are buffers.

        Raises:
            OSError: The disk has failed.
        """
        self.settle()
        pieces = [piece for _, piece in self._reloadable()]
        tried = [(piece.block, StagingBuffer(piece.block.size)) for piece in pieces[: self._depth]]
        seconds = [math.inf, math.inf]
        for _ in range(2):  # the first pass allocates the buffers' pages, and earlier writes may still be in progress
            for number, move in ((0, self._disk.read), (1, self._disk.write)):
                began = time.perf_counter()
                for handle in [move(block.start, buffer.bytes[: block.size]) for block, buffer in tried]:
                    handle.wait()
                seconds[number] = min(seconds[number], time.perf_counter() - began)
        size = sum(block.size for block, _ in tried)
        read, write = (size / each if size else math.inf for each in seconds)
        return DiskUsage(pieces=tuple(piece.state_size for piece in pieces), read=read, write=write)

    @torch.no_grad()
    def reload_state(self, size: int) -> int:
        """Load pieces into memory for good, one after the other as far as they fit, and return their bytes.

        Args:
            size: Bytes that they may take.
        """
        self.settle()
        loaded = 0
        for own, piece in self._reloadable():
            if loaded + piece.state_size <= size:
                piece.keep_state_in_memory_(own.optimizer.state.get(piece.tensor, {}))
                loaded += piece.state_size
        return loaded

    def _reloadable(self) -> list[tuple[OffloadedOptimizer, DiskPiece]]:
        """Return pieces that memory may hold for good, with their optimizer.

        State next to parameters or gradients in the file stays there.
        """
        # The first pieces of the list save most time. Prefetching during backward hides the reads of the first pieces,
        # so a step waits for the last ones. With a thread, the next forward waits for the first ones.
        return [
            (own, piece)
            for own in self._optimizers
            for piece in (own.pieces if self.runner.is_late else reversed(own.pieces))
            if not piece.in_memory and piece.start is None and piece.gradient is None
        ]

    @torch.no_grad()
    def adopt_(self, owner: int, *_: object) -> None:
        """Move state that was made in memory to the file, such as a constructor's or a loaded checkpoint's."""
        self.settle()
        state = self._optimizers[owner].optimizer.state
        for piece in self._optimizers[owner].pieces:
            if piece.tensor in state:
                piece.adopt_(state[piece.tensor])

    def drop_hidden_gradients(self, owner: int) -> None:
        """Drop the gradients that stay hidden after an optimizer's own step has failed: the program drops them."""
        self._optimizers[owner].check_is_stepped("zero_grad() is called")
        self._optimizers[owner].hidden = []

    @torch.no_grad()
    def prefetch(self) -> None:
        """Start to read the first pieces of the next step, because a backward pass has begun.

        The optimizer that stepped first in the last iteration is expected to do so again, with the same pieces.
        """
        self.join()
        for own in self._optimizers:
            own.show_gradients()  # an optimizer's own step has failed, and backward adds to these gradients
        if self._stepped:
            # The ring has room for the first pieces of one optimizer, so nothing is read for those that step later.
            own = self._stepped[0]
            self._stepped = []
            self._swapper.follow({piece: PieceValues(state=own.optimizer.state[piece.tensor]) for piece in own.order})

    def begin_backward(self) -> None:
        """Allow the steps of pieces within the backward that begins."""
        for own in self._optimizers:
            own.begin_backward()

    def refuse_forward(self, *_: object) -> None:
        """Raise before a forward between backward and step, which would read parameters while a thread updates them."""
        for own in self._optimizers:
            own.check_is_stepped("a forward begins")

    def end_backward(self, *, reduced: bool) -> None:
        """Expect the optimizers' own steps next. All ranks expect them, whichever pieces they have stepped.

        Args:
            reduced: Whether backward has reduced gradients.
        """
        for own in self._optimizers:
            own.awaits_step = own.awaits_step or (reduced and own.stepper is not None)

    def forget_backward(self) -> None:
        """Expect no steps of the optimizers, because a backward has failed."""
        for own in self._optimizers:
            own.stepper, own.awaits_step = None, False
            own.drop_applied()

    def release_copies(self) -> None:
        """Free the memory of sums that are copied to the host, because a failed pass does not end, which would."""
        if self._host_gradients is not None:
            self._host_gradients.release()

    @torch.no_grad()
    def _step_in_backward(self, chunk: Chunk, gradients: Mapping[DiskPiece, torch.Tensor]) -> bool:
        """Start to step the pieces of a chunk, whose gradients are on their way to the host.

        Returns:
            Whether they are stepped. If a parameter of the chunk has no gradient on this rank, or has been stepped less
            often than another, they are not: the optimizer's own step finds out how to step them.
        """
        own = self._optimizers[chunk.plan.owner]
        states = {piece: own.optimizer.state[piece.tensor] for piece in gradients}
        if own.stepper is None or not self._has_all_gradients(chunk) or any(SCALARS in s for s in states.values()):
            return False
        # A unit that is freed later would copy what its forward wrote over the updated shard.
        if chunk.stage.shards_parameters and chunk.may_be_written:
            return False
        if own.applied & gradients.keys():
            raise RuntimeError(
                f"a gradient of {chunk.name!r} has arrived after Offload(overlap='backward') had stepped with the "
                "others; use torch.utils.checkpoint with use_reentrant=False, or remove overlap"
            )
        order = {piece: PieceValues(state=states[piece], gradient=gradients[piece]) for piece in gradients}
        own.applied.update(order)
        self._run(own, OffloadedStep(stepper=own.stepper, splitter=None, order=order, reads=HostReads()))
        return True

    @torch.no_grad()
    def step(self, owner: int, splitter: SliceSplitter) -> None:
        """Step an optimizer's pieces, or prepare their step for a thread.

        The optimizer's own step follows, from which the gradients of pieces are hidden until `end_step`. A failed read
        ends the step before its piece is changed, and `errors` reports it.

        Args:
            owner: Number of the optimizer.
            splitter: Splits slices whose parameters have different step counts.
        """
        own = self._optimizers[owner]
        optimizer = own.optimizer
        self.shards.drop_reads()
        reads = HostReads()
        stepper = own.take_stepper() or TensorStepper(optimizer, reads.begin)
        own.drop_applied()
        gradients = {piece: piece.tensor.grad for piece in own.pieces if piece.tensor.grad is not None}
        own.hidden += [(piece.tensor, gradient) for piece, gradient in gradients.items()]
        if reads.has_begun or not stepper.is_skipped:  # if copies are under way, the step finds out itself
            order = {
                piece: PieceValues(state=optimizer.state[piece.tensor], gradient=gradient)
                for piece, gradient in gradients.items()
            }
            own.step = OffloadedStep(stepper=stepper, splitter=splitter, order=order, reads=reads)
            self._stepped.append(own)
            if not self.runner.is_late:
                self._run(own, own.step)
        for tensor, _ in own.hidden:
            tensor.grad = None  # optimizers skip tensors without a gradient

    def end_step(self, owner: int) -> None:
        """Show the hidden gradients again, after the optimizer's own step, and start the thread's step."""
        own = self._optimizers[owner]
        own.show_gradients()
        if self.runner.is_late and own.step is not None:
            self._run(own, own.step)
        else:
            own.end_step()
            self.link.wait_for()

    def _run(self, own: OffloadedOptimizer, step: OffloadedStep) -> None:
        """Step the pieces of an optimizer, or start that in the thread."""
        last_use = self.link.record()

        @torch.inference_mode(mode=False)  # tensors of inference mode have no versions
        @torch.no_grad()
        def job() -> None:
            with self.link.on_device():
                step_all()

        def step_all() -> None:
            try:
                self.link.begin_step(last_use)
                step.reads.wait()
                if step.stepper.is_skipped:
                    return
                # Afterwards all state shows the file, so versions tell whether prefetched state is up to date.
                self._swapper.finish_writes()
                for piece, values in step.order.items():
                    piece.adopt_(values.state)
                own.order = tuple(step.order)
                self._step_pieces(step)
            except Exception as error:
                if not self.runner.is_late and not isinstance(error, OSError):
                    raise  # an error of the optimizer, in the program's own call
                self.errors.add_stopped_step(error, is_late=self.runner.is_late)

        self.runner.run([piece.chunk for piece in step.order], job)

    def _step_pieces(self, step: OffloadedStep) -> None:
        """Fetch, update and evict the pieces of a step in order."""
        # Copies of earlier steps to the device read the memory that the updates write. Before the first piece: later on
        # the event is that of this step's copies, and each piece would wait for the copy of the one before it.
        for chunk in dict.fromkeys(piece.chunk for piece in step.order):
            self.link.finish_copies_in(chunk)
        self._swapper.follow(step.order)
        try:
            for piece in step.order:
                meter, name = piece.chunk.meter, f"{piece.chunk.name}+{piece.first}"
                meter.note("fetch", name)
                step.update_(piece, self._swapper.fetch(piece))
                meter.note("step", name)
                self._swapper.evict(piece)
                meter.note("evict", name)
                if piece.in_memory or piece.start is None:
                    # Other parameters are ready when they are written. Those of a device are ready for a stream that
                    # waits for their copy, which `evict` has begun.
                    self.runner.finish_piece(piece.chunk)
        except BaseException:  # also of the optimizer
            self._swapper.drop_reads()
            raise
        finally:
            # Units are gathered from the file, not from the buffers, so the step waits for its last writes.
            if self.shards.were_given:
                self._swapper.finish_writes()
                self._keep_unwritten_parameters()

    def _keep_unwritten_parameters(self) -> None:
        """Keep all parameters of a chunk in memory for good, if some of them could not be written."""
        unwritten = self._swapper.take_unwritten()
        for chunk in dict.fromkeys(piece.chunk for piece, _ in unwritten):
            own = torch.empty_like(chunk.own)  # its all-gather needs the shard in one place
            self.shards.fetch_(chunk, own)
            for piece, values in unwritten:
                if piece.chunk is chunk:
                    own[piece.offset : piece.offset + values.numel()] = values
            self.shards.remove(chunk)
            chunk.take_own_(own, {})
            chunk.home = replace(chunk.home, parameters="device")
            for piece in self._pieces:
                if piece.chunk is chunk:
                    piece.keep_parameters_in_memory_()

    def wait_for(self, chunks: Sequence[Chunk]) -> None:
        """Wait until some chunks are updated: the host for the thread, and the current stream for the copies."""
        self.runner.wait_for(chunks)
        self.link.wait_for(chunks)

    def join(self) -> None:
        """Wait until all pieces are updated, as `wait_for` does."""
        if self.runner.join():
            for own in self._optimizers:
                own.end_step()
            self.link.wait_for()

    @torch.no_grad()
    def settle(self, *_: object) -> None:
        """End all work in progress, because somebody reads or writes state now. Prefetched data is discarded.

        Afterwards state is in the file or, if it cannot be written, in memory.

        Raises:
            Exception: The step thread has stopped within a step, so that state is incomplete.
        """
        self.join()
        self.errors.raise_stopped()
        self._swapper.drop_reads()
        self._swapper.finish_writes()
        self.shards.drop_reads()
        self.link.settle()

    def before_step(self, owner: int) -> None:
        """Wait for an optimizer's earlier step in the step thread.

        Raises:
            OSError: The disk has failed on this rank or another. Collective if there is a step thread.
        """
        if self.runner.is_late:
            self._optimizers[owner].show_gradients()  # hidden still, if the optimizer's own step has failed
            if self._optimizers[owner].step is not None:
                self.join()  # its settings must be those after that step
            self.errors.raise_together()

    def finish(self) -> None:
        """Wait for all steps in the step thread.

        Raises:
            OSError: The disk has failed on this rank or another. Collective if there is a step thread.
        """
        if self.runner.is_late:
            self.join()
            self.errors.raise_together()
