"""A rank's copy of the data that it saves, so that the trainer can continue during the write."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from .._errors import CheckpointError
from .._torch_private import version_of
from ..format.bytes import copy_elements_, join_
from ..plan.claims import name_of
from ..plan.tasks import BlockPiece, RankPlan, Task
from .chunks import Chunks
from .memory import LocalState
from .workers import Workers


class Snapshot:
    """A copy of all pieces that this rank writes or sends, in separate memory.

    Args:
        plan: This rank's part of the save.
        local: Tensors that this rank holds.
        rank: Number of this rank.
        memory: Chunks to copy into; None, or chunks that are not pinned but should be: new chunks.
        late: Whether `finish` copies the tensors that only optimizer steps change. All other tensors are copied now.
        threads: Number of threads that copy now.

    Attributes:
        memory: The chunks that hold the copy.
        blocks: Blocks that this rank writes, with this rank's pieces in them, by file and first byte.
    """

    def __init__(
        self, plan: RankPlan, local: LocalState, rank: int, memory: Chunks | None, *, late: bool, threads: int
    ) -> None:
        self._plan, self._local, self._rank = plan, local, rank
        self._watched = _versions(local) if late else {}
        self._streams = _streams(local) if self._watched else []
        pinned = bool(local.accelerators())
        self.memory = memory if memory is not None and memory.pinned >= pinned else Chunks(pinned=pinned)
        self.blocks: dict[tuple[int, int], torch.Tensor] = {}
        # If all tensors are copied later, their list and their memory can wait, too. Allocating gigabytes takes
        # seconds, for which `save` would block the trainer.
        self._waits = late and not pinned and len(self._watched) == len(local.parts)
        if not self._waits:
            self._lay_out()
            with Workers(threads, "par-checkpoint-copy") as workers:
                self._copy(lambda piece: piece.tensor not in self._watched, workers)

    def _lay_out(self) -> None:
        """List the pieces to copy, and allocate memory for them."""
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
        """Copy the remaining tensors in this thread.

        Raises:
            CheckpointError: A tensor has changed since the snapshot was created.
        """
        if self._waits:
            self._lay_out()
        if not self._watched:
            return
        with ExitStack() as stack:
            # These streams wait for the work that the trainer had enqueued when `save` was called. A copy on the
            # current stream would also wait for the forward and backward passes that were enqueued since then.
            for stream in self._streams:
                stack.enter_context(stream)
            self._copy(lambda piece: piece.tensor in self._watched, None)
        # The check follows the copy: a tensor may change at any moment before its last byte is copied.
        for number, versions in self._watched.items():
            if any(version_of(tensor) != version for tensor, version in versions):
                raise CheckpointError(
                    f"{name_of(self._local.tensors[number].key)!r} was changed while the save copied it in the "
                    "background, and nothing was committed. Do not change weights and optimizer state before the "
                    "save's wait_for_copy() returns. The step() of a torch optimizer calls it automatically. Call it "
                    "before any other change, or save with copy='blocking'"
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
        """Copy the chosen pieces. Workers, if any, copy the blocks whose pieces are contiguous."""
        jobs = []
        for block, pieces in self._own:
            some = [piece for piece in pieces if chosen(piece)]
            runs = self._local.direct(some, block.numel())
            if runs is None:
                self._local.to_block_(some, block)
            elif workers is None:
                join_(block, runs)
            else:
                # Each thread copies full blocks with `memmove`. torch's own threads would split every single block, and
                # would wait for each other at its end.
                jobs.append(workers.submit(partial(join_, block, runs)))
        for buffer, pieces in self._given:
            for piece, view in zip(pieces, self._local.packed(pieces, buffer), strict=True):
                if chosen(piece):
                    copy_elements_(view, self._local.view(piece))
        for job in jobs:
            job.result()


def _versions(local: LocalState) -> dict[int, list[tuple[torch.Tensor, int]]]:
    """Return the version counters of the tensors that only optimizer steps change, by the tensor's number."""
    found = {}
    for number, parts in local.parts.items():
        # An inference tensor has no version counter, so a change to it would stay unnoticed.
        known = (part.steady for part in parts if part.steady is not None and not part.steady.is_inference())
        steady = [tensor for tensor in known if tensor.device.type != "meta"]
        if len(steady) == len(parts):
            # A DTensor has a counter separate from its local tensor's, so both are noted.
            found[number] = [(tensor, version_of(tensor)) for tensor in (*steady, *(part.local for part in parts))]
    return found


def _streams(local: LocalState) -> list[torch.Stream]:
    """Return a stream per accelerator that waits for the work that the trainer has enqueued so far."""
    streams = [torch.Stream(device) for device in local.accelerators()]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
    return streams
