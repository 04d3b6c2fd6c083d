"""Writing blocks: each block is assembled, checksummed in memory and written while later blocks are assembled."""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import torch
from crc32c import crc32c

from par_groups import bytes_of

from ..format.bytes import copy_elements_
from ..format.crc import Crc
from ..format.manifest import BLOCK
from ..plan.files import File, FileBlock
from ..plan.tasks import BlockPiece, RankPlan, Task
from ..storage.files import Writer
from ..storage.folder import Staging
from .exchange import PieceExchange, by_wave
from .memory import LocalState, MemoryPool
from .ranks import Ranks
from .snapshot import Snapshot
from .workers import Workers

_AHEAD = 256  # blocks that may wait to be written from the local tensors
_ROUNDS = 4  # minimum number of rounds if ranks send each other pieces, so that sending overlaps with writing


@dataclass(frozen=True, kw_only=True)
class WriteContext:
    """Context of the write.

    Args:
        files: All files.
        local: Tensors that this rank holds.
        ranks: The ranks that write together.
        staging: The folder to write to.
        budget: Bytes of memory for buffers, in addition to the state.
        workers: The threads that write; a single thread if files are written in order as streams.
        progress: Function that takes the bytes of each block that was written.
    """

    files: Sequence[File]
    local: LocalState
    ranks: Ranks
    staging: Staging
    budget: int
    workers: Workers
    progress: Callable[[int], None]

    @property
    def block(self) -> int:
        """Bytes of the largest block."""
        return max((file.block for file in self.files), default=BLOCK)


def write_blocks(
    plan: RankPlan, work: WriteContext, snapshot: Snapshot | None = None
) -> tuple[list[Crc], BaseException | None]:
    """Write this rank's blocks, and send the other ranks the pieces of theirs.

    After an error this rank still sends and receives until the end, so that no rank waits for it.

    Args:
        plan: This rank's part.
        work: Context of the write.
        snapshot: The copy to write from; None: the local tensors.

    Returns:
        The checksums of the blocks that this rank has written, and the first error or None.

    Raises:
        RuntimeError: Another rank is gone.
    """
    if snapshot is None:
        work.local.wait_for_streams()
    writing = _BlockWriter(work, snapshot, Counter(plan.files()))
    # The budget holds the blocks of a round, half of it as bounce buffers, and the two message buffers. With a snapshot
    # the blocks are in memory already, so only the message buffers count.
    blocks = max(1, work.budget // (work.block * (4 if snapshot is None else 2)))
    if plan.peers:  # several rounds let the blocks of one round be written while the next pieces are exchanged
        blocks = min(blocks, max(1, plan.turns // _ROUNDS))
    try:
        for tasks, of_others in plan.rounds(blocks):
            writing.round(tasks, of_others, peers=plan.peers)
    except BaseException:
        writing.abort()
        raise
    return writing.finish()


class _BlockWriter:
    """The state of one rank's writing.

    Args:
        work: Context of the write.
        snapshot: The copy to write from, or None.
        blocks: Number of blocks that this rank writes, by file.
    """

    def __init__(self, work: WriteContext, snapshot: Snapshot | None, blocks: Mapping[int, int]) -> None:
        self._work, self._snapshot = work, snapshot
        self._rank = work.ranks.rank
        self._jobs: list[Future[Crc]] = []
        self._writers: dict[int, Writer] = {}
        self._blocks_left = dict(blocks)
        self._error: BaseException | None = None
        self._free_bounces: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._bounces = 0
        self._scratches = MemoryPool(work.block)  # at most one buffer per thread
        # A snapshot holds the pieces of a task packed in one buffer. So the pieces for a rank are sent in one message.
        self._exchange = PieceExchange(work.ranks, work.local.packed_size)
        self._opening = threading.Lock()

    def round(self, tasks: Sequence[Task], others: Sequence[Task], *, peers: bool) -> None:
        """Write the blocks of one round.

        Args:
            tasks: This rank's blocks.
            others: Blocks of other ranks, to which this rank sends pieces.
            peers: Whether any rank sends pieces to another rank.
        """
        # The plan lists the pieces of a round lazily. Without a limit, the lists of all rounds would be in memory while
        # the disk is still busy with the first blocks.
        if len(self._jobs) > _AHEAD:
            wait(self._jobs[-_AHEAD - 1 : -_AHEAD])
        waiting = []  # blocks that need pieces of other ranks, or that a stream must receive in order
        for task in tasks:
            if task.has_gaps:
                self._note(RuntimeError(f"no rank holds all of {task.block}; this is a bug in par-checkpoint"))
            is_own = all(piece.source == self._rank for piece in task.pieces)
            if self._work.staging.positional and self._snapshot is None and is_own:
                self._jobs.append(self._work.workers.submit(partial(self._write_own, task)))
            else:
                waiting.append((task, *self._assembled(task)))
        if peers:
            self._swap(waiting, others)
        for task, block, bounce in waiting:
            self._jobs.append(self._work.workers.submit(partial(self._write_bounced, task, block, bounce)))

    def finish(self) -> tuple[list[Crc], BaseException | None]:
        """Wait for all writes, flush the files, and return the checksums and the first error or None."""
        crcs: list[Crc] = []
        wait(self._jobs)
        for job in self._jobs:
            error = job.exception()
            self._note(error)
            if error is None:
                crcs.append(job.result())
        closing = [
            self._work.workers.submit(writer.abort if self._error else writer.finish)
            for writer in self._writers.values()
        ]
        for job_of_file in closing:
            self._note(job_of_file.exception())
        return crcs, self._error

    def abort(self) -> None:
        """Close the files without flushing them."""
        # A removed file occupies the disk as long as it is open. A thread that still writes must end first: after the
        # close, its file number may belong to another file.
        wait(self._jobs)
        for writer in self._writers.values():
            writer.abort()

    def _note(self, error: BaseException | None) -> None:
        """Keep an error if it is the first one."""
        self._error = self._error or error

    def _assembled(self, task: Task) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a block with this rank's pieces in it, and its bounce buffer unless it is in the snapshot."""
        if self._snapshot is not None:
            return self._snapshot.blocks[task.block.file, task.block.begin], None
        # Bounce buffers use up to half of the budget. When all of them are in use, `get` waits until a block is
        # written, which slows the assembly down to the speed of the disk.
        if self._bounces < max(2, self._work.budget // (2 * self._work.block)) and self._free_bounces.empty():
            self._bounces += 1
            bounce = torch.empty(self._work.block, dtype=torch.uint8, device="cpu")
        else:
            bounce = self._free_bounces.get()
        block = bounce[: task.block.size]
        own = (piece for piece in task.pieces if piece.source == self._rank)
        self._try(partial(self._work.local.to_block_, own, block))
        return block, bounce

    def _swap(self, waiting: Sequence[tuple[Task, torch.Tensor, torch.Tensor | None]], others: Sequence[Task]) -> None:
        """Send this rank's pieces of the other ranks' blocks, and receive their pieces of its own blocks."""
        local, snapshot = self._work.local, self._snapshot
        block_of = {id(piece): block for task, block, _ in waiting for piece in task.pieces}

        def pack(pieces: Sequence[BlockPiece], buffer: torch.Tensor) -> None:
            for piece, view in zip(pieces, local.packed(pieces, buffer), strict=True):
                copy_elements_(view, local.view(piece))

        def fill(to: int, pieces: Sequence[BlockPiece], buffer: torch.Tensor) -> torch.Tensor:
            if snapshot is not None:
                # The order of turns is the order in which `by_wave` lists the pieces on the receiving rank.
                return snapshot.outgoing(
                    sorted((task for task in others if task.rank == to), key=lambda task: task.turn), buffer
                )
            self._try(partial(pack, pieces, buffer))
            return buffer

        def take(pieces: Sequence[BlockPiece], buffer: torch.Tensor) -> None:
            for piece, view in zip(pieces, local.packed(pieces, buffer), strict=True):
                copy_elements_(local.in_block(piece, block_of[id(piece)]), view)

        for outgoing, incoming in by_wave([*others, *(task for task, _, _ in waiting)], self._rank):
            self._exchange.run(outgoing, incoming, fill=fill, take=take)

    def _try(self, act: Callable[[], object]) -> None:
        """Call a function, and keep the error that it raises."""
        try:
            act()
        except Exception as error:  # the other ranks still wait for this rank's messages
            self._note(error)

    def _write_own(self, task: Task) -> Crc:
        """Write a block that this rank holds completely: from the tensors if they are contiguous, else from a copy."""
        direct = self._work.local.direct(task.pieces, task.block.size)
        if direct is not None:
            return self._write(task.block, direct)
        with self._scratches.lent() as scratch:
            block = scratch[: task.block.size]
            self._work.local.to_block_(task.pieces, block)
            return self._write(task.block, [block])

    def _write_bounced(self, task: Task, block: torch.Tensor, bounce: torch.Tensor | None) -> Crc:
        """Write an assembled block, and free its bounce buffer."""
        try:
            return self._write(task.block, [block])
        finally:
            if bounce is not None:
                self._free_bounces.put(bounce)

    def _write(self, block: FileBlock, runs: Iterable[torch.Tensor]) -> Crc:
        """Compute a block's checksum and write it, from one or several runs of memory.

        After an error nothing is written.
        """
        begin, crc = block.begin, 0
        file = self._work.files[block.file]
        try:
            # Exactly one rank has the first block of a file, so the header is written exactly once.
            if begin == file.data_begin and self._error is None:
                self._writer(block.file).write_at(0, memoryview(file.header))
            for memory in map(bytes_of, runs):
                # The checksum is computed from the memory that is written, and not from the file afterwards. So it also
                # finds bytes that change on their way to the disk.
                crc = crc32c(memory, crc)
                if self._error is None:
                    self._writer(block.file).write_at(begin, memory)
                begin += len(memory)
        except BaseException as error:
            self._note(error)
            raise
        self._close_after_last(block.file)
        self._work.progress(block.size)
        return block.file, block.begin, block.size, crc

    def _close_after_last(self, file: int) -> None:
        """Flush and close a file after its last block, because a process may have only so many open files."""
        # `finish` aborts all files after an error, and it also closes streams.
        with self._opening:
            self._blocks_left[file] -= 1
            keep = self._blocks_left[file] or self._error is not None or not self._work.staging.positional
            writer = None if keep else self._writers.pop(file, None)
        if writer is not None:
            writer.finish()

    def _writer(self, file: int) -> Writer:
        """Return the writer of a file, and open the file if it is not open."""
        with self._opening:  # two threads may need the same file for the first time at the same moment
            if file not in self._writers:
                self._writers[file] = self._work.staging.writer(self._work.files[file].name)
            return self._writers[file]
