"""A copy of what a rank gives to a save, so that the trainer may go on."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from .._errors import CheckpointError
from .._torch_private import version_of
from ..format.bytes import copy_elements_, join_
from ..plan.tasks import BlockPiece, RankPlan, Task
from .chunks import Chunks
from .memory import LocalState
from .workers import Workers


class Snapshot:
    """A copy of all that this rank gives, in memory of its own.

    Args:
        plan: This rank's part.
        local: What this rank holds.
        rank: This rank.
        memory: Chunks to copy into; made anew if they are not pinned, but should be.
        late: Whether to leave what changes only in an optimizer's step to `finish`. Everything else is copied now.
        threads: Number of threads that copy now.

    Attributes:
        memory: The chunks that the copy lies in.
        blocks: By file and first byte: a block that this rank writes, with this rank's pieces in it.
    """

    def __init__(
        self, plan: RankPlan, local: LocalState, rank: int, memory: Chunks | None, *, late: bool, threads: int
    ) -> None:
        self._plan, self._local, self._rank = plan, local, rank
        self._watched = _versions(local) if late else {}
        self._streams = _streams(local) if self._watched else []
        on_gpu = any(part.local.is_cuda for parts in local.parts.values() for part in parts)
        self.memory = memory if memory is not None and memory.pinned >= on_gpu else Chunks(pinned=on_gpu)
        self.blocks: dict[tuple[int, int], torch.Tensor] = {}
        self._waits = late and not on_gpu and len(self._watched) == len(local.parts)
        if not self._waits:  # to be listed, and for memory, until all of it is copied
            self._lay_out()
            with Workers(threads, "par-checkpoint-copy") as workers:
                self._copy(lambda piece: piece.tensor not in self._watched, workers)

    def _lay_out(self) -> None:
        """Lists what is to be copied, and where to; makes memory for it."""
        local, rank = self._local, self._rank
        mine, others = list(self._plan.mine), list(self._plan.others)
        own = [[piece for piece in task.pieces if piece.source == rank] for task in mine]
        given = [[piece for piece in task.pieces if piece.to != rank] for task in others]
        sizes = [task.block.size for task in mine] + [local.packed_size(pieces) for pieces in given]
        parts = self.memory.split(sizes)
        self.blocks = {(task.block.file, task.block.begin): next(parts) for task in mine}
        self._packed = {(task.rank, task.turn): next(parts) for task in others}
        self._own = list(zip(self.blocks.values(), own, strict=True))
        self._given = list(zip(self._packed.values(), given, strict=True))

    def finish(self) -> None:
        """Copies what is left, in this thread; where that is everything, makes the memory for it, too.

        Raises:
            CheckpointError: It has changed since the snapshot was made.
        """
        if self._waits:
            self._lay_out()
        if not self._watched:
            return
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            self._copy(lambda piece: piece.tensor in self._watched, None)
        for number, versions in self._watched.items():
            if any(version_of(tensor) != version for tensor, version in versions):
                raise CheckpointError(
                    f"{self._local.tensors[number].name!r} was changed while the save copied it in the background, and "
                    "nothing was committed. Weights and optimizer state must stay as they are until the save's "
                    "wait_for_copy() returns, which a torch optimizer's step() calls itself: call it before anything "
                    "else that changes them, or save with copy='blocking'"
                )

    def outgoing(self, tasks: Sequence[Task], buffer: torch.Tensor) -> torch.Tensor:
        """Pack this rank's pieces of another rank's blocks at the beginning of a buffer."""
        begin = 0
        for task in tasks:
            part = self._packed[task.rank, task.turn]
            buffer[begin : begin + part.numel()] = part
            begin += part.numel()
        return buffer

    def _copy(self, chosen: Callable[[BlockPiece], bool], workers: Workers | None) -> None:
        """Copies the chosen pieces; if there are workers, they copy what lies in runs of bytes."""
        jobs = []
        for block, pieces in self._own:
            some = [piece for piece in pieces if chosen(piece)]
            runs = self._local.direct(some, block.numel())
            if runs is None:
                self._local.to_block_(some, block)
            elif workers is None:
                join_(block, runs)
            else:  # threads of torch would wait for each other at every block
                jobs.append(workers.submit(partial(join_, block, runs)))
        for buffer, pieces in self._given:
            for piece, view in zip(pieces, self._local.packed(pieces, buffer), strict=True):
                if chosen(piece):
                    copy_elements_(view, self._local.view(piece))
        for job in jobs:
            job.result()


def _versions(local: LocalState) -> dict[int, list[tuple[torch.Tensor, int]]]:
    """By number, for tensors that change only in an optimizer's step: their counts of changes, now.

    A DTensor counts its changes itself, everything else counts those of its memory. An inference tensor counts nothing.
    """
    found = {}
    for number, parts in local.parts.items():
        known = (part.steady for part in parts if part.steady is not None and not part.steady.is_inference())
        steady = [tensor for tensor in known if tensor.device.type in ("cpu", "cuda")]
        if len(steady) == len(parts):
            found[number] = [(tensor, version_of(tensor)) for tensor in (*steady, *(part.local for part in parts))]
    return found


def _streams(local: LocalState) -> list[torch.cuda.Stream]:
    """A stream of each GPU, for copies beside the trainer's work, after what it has enqueued by now."""
    devices = {part.local.device for parts in local.parts.values() for part in parts if part.local.is_cuda}
    streams = [torch.cuda.Stream(device) for device in devices]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    return streams
