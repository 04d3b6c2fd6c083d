"""Writing blocks: assembled, checksummed from memory, and written, while the next ones are assembled."""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import torch
from crc32c import crc32c

from ..format.bytes import bytes_of, copy_elements_
from ..format.crc import Crc
from ..format.manifest import BLOCK
from ..plan.files import File
from ..plan.plan import Block, Piece, Plan, Task
from ..storage.folder import Staging, Writer
from .buffers import Pool
from .exchange import Room, by_peer, exchange, rounds
from .pieces import Local
from .ranks import Ranks
from .snapshot import Snapshot
from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class Work:
    """What writing needs beside the plan.

    Args:
        files: All files.
        local: What this rank holds.
        ranks: Who writes together.
        staging: Where to.
        budget: Bytes that may be held beside the state.
        workers: Who write; one alone where a stream is written in order.
        progress: Is told of bytes that were written.
    """

    files: Sequence[File]
    local: Local
    ranks: Ranks
    staging: Staging
    budget: int
    workers: Workers
    progress: Callable[[int], None]


def write_blocks(plan: Plan, work: Work, snapshot: Snapshot | None = None) -> tuple[list[Crc], BaseException | None]:
    """Writes this rank's blocks and sends others their pieces.

    Whatever fails here, this rank goes on giving and taking until the end, so that no other waits for it.

    Args:
        plan: This rank's part.
        work: What it needs.
        snapshot: The copy to write from; None: straight from the local tensors.

    Returns:
        The checksums, and the first error if there was one.

    Raises:
        RuntimeError: Another rank is gone.
    """
    writing = _Writing(work, snapshot, Counter(task.block.file for task in plan.mine))
    each = max(1, work.budget // (4 * BLOCK)) if snapshot is None else max(1, work.budget // (2 * BLOCK))
    mine, others = rounds(plan.mine, plan.turns, each), rounds(plan.others, plan.turns, each)
    try:
        for tasks, foreign in zip(mine, others, strict=True):
            writing.round(tasks, foreign, peers=plan.peers)
    except BaseException:
        writing.abort()
        raise
    return writing.finish()


class _Writing:
    """The state of one rank's writing."""

    def __init__(self, work: Work, snapshot: Snapshot | None, blocks: Mapping[int, int]) -> None:
        self._work, self._snapshot = work, snapshot
        self._rank = work.ranks.rank
        self._jobs: list[Future[Crc]] = []
        self._writers: dict[int, Writer] = {}
        self._left = dict(blocks)  # of each file
        self._error: BaseException | None = None
        self._bounce: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._bounces = 0
        self._scratches = Pool(BLOCK)  # one a thread at most
        self._room = Room(work.local.packed_size)
        self._opening = threading.Lock()

    def round(self, tasks: Sequence[Task], others: Sequence[Task], *, peers: bool) -> None:
        """Writes some blocks."""
        waiting = []
        for task in tasks:
            if self._work.staging.positional and self._snapshot is None and self._is_own(task):
                self._jobs.append(self._work.workers.submit(partial(self._write_own, task)))
            else:
                waiting.append((task, *self._assembled(task)))
        if peers:
            self._exchange(waiting, others)
        for task, block, bounce in waiting:
            self._jobs.append(self._work.workers.submit(partial(self._write_bounced, task, block, bounce)))

    def finish(self) -> tuple[list[Crc], BaseException | None]:
        """Waits for everything, makes it durable."""
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
        for each in closing:
            self._note(each.exception())
        return crcs, self._error

    def abort(self) -> None:
        """Closes the files, for what is removed but open still takes room; nothing may be writing to them then."""
        wait(self._jobs)
        for writer in self._writers.values():
            writer.abort()

    def _note(self, error: BaseException | None) -> None:
        self._error = self._error or error

    def _is_own(self, task: Task) -> bool:
        """Whether this rank has all of a block, and need not wait for others."""
        return all(piece.source == self._rank for piece in task.pieces)

    def _assembled(self, task: Task) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A block with this rank's pieces in it, and the bounce buffer that it lies in, if in one."""
        if self._snapshot is not None:
            return self._snapshot.blocks[task.turn], None
        bounce = self._free_bounce()
        block = bounce[: task.block.size]
        own = (piece for piece in task.pieces if piece.source == self._rank)
        self._try(partial(self._work.local.to_block_, own, block))
        return block, bounce

    def _free_bounce(self) -> torch.Tensor:
        """A buffer that is not being written; new ones are made up to half of the budget."""
        if self._bounces < max(2, self._work.budget // (2 * BLOCK)) and self._bounce.empty():
            self._bounces += 1
            return torch.empty(BLOCK, dtype=torch.uint8, device="cpu")
        return self._bounce.get()

    def _exchange(
        self, waiting: Sequence[tuple[Task, torch.Tensor, torch.Tensor | None]], others: Sequence[Task]
    ) -> None:
        local = self._work.local
        outgoing = by_peer(others, lambda piece: piece.to, self._rank)
        incoming = by_peer([task for task, _, _ in waiting], lambda piece: piece.source, self._rank)
        targets = {id(piece): block for task, block, _ in waiting for piece in task.pieces}

        def fill(to: int, buffer: torch.Tensor) -> torch.Tensor:
            if self._snapshot is not None:
                return self._snapshot.outgoing(sorted(_of(others, to), key=lambda task: task.turn), buffer)
            self._try(lambda: _pack(local, outgoing[to], buffer))
            return buffer

        def take(source: int, buffer: torch.Tensor) -> None:
            pieces = incoming[source]
            for piece, view in zip(pieces, local.packed(pieces, buffer), strict=True):
                copy_elements_(local.in_block(piece, targets[id(piece)]), view)

        exchange(self._work.ranks, self._room, outgoing, incoming, fill=fill, take=take)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # the others still count on this rank's messages
            self._note(error)

    def _write_own(self, task: Task) -> Crc:
        """A block of which this rank has all: straight from where it lies, else put together by the writing thread."""
        direct = self._work.local.direct(task.pieces, task.block.size)
        if direct is not None:
            return self._write(task.block, direct)
        with self._scratches.lent() as scratch:
            block = scratch[: task.block.size]
            self._work.local.to_block_(task.pieces, block)
            return self._write(task.block, [block])

    def _write_bounced(self, task: Task, block: torch.Tensor, bounce: torch.Tensor | None) -> Crc:
        try:
            return self._write(task.block, [block])
        finally:
            if bounce is not None:
                self._bounce.put(bounce)

    def _write(self, block: Block, runs: Iterable[torch.Tensor]) -> Crc:
        """Checksums a block and writes it, from one or several runs of memory; after an error checksums alone."""
        begin, crc = block.begin, 0
        file = self._work.files[block.file]
        try:
            if begin == file.data_begin and self._error is None:  # the header goes with the first block
                self._writer(block.file).write_at(0, memoryview(file.header))
            for memory in map(bytes_of, runs):
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
        """Makes a file durable when its last block is there: a process may not have many open."""
        with self._opening:
            self._left[file] -= 1
            keep = self._left[file] or self._error is not None or not self._work.staging.positional
            writer = None if keep else self._writers.pop(file, None)
        if writer is not None:
            writer.finish()

    def _writer(self, file: int) -> Writer:
        with self._opening:
            if file not in self._writers:
                self._writers[file] = self._work.staging.writer(self._work.files[file].name)
            return self._writers[file]


def _pack(local: Local, pieces: Sequence[Piece], buffer: torch.Tensor) -> torch.Tensor:
    for piece, view in zip(pieces, local.packed(pieces, buffer), strict=True):
        copy_elements_(view, local.view(piece))
    return buffer


def _of(tasks: Sequence[Task], rank: int) -> list[Task]:
    return [task for task in tasks if task.rank == rank]
