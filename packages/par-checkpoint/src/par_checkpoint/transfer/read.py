"""Reading blocks: read once in the group, verified whole, and their pieces handed to all that hold them."""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from crc32c import crc32c

from par_groups import bytes_of

from .._errors import CorruptError, corrupt_block
from ..format.bytes import copy_elements_
from ..format.crc import Crc
from ..format.manifest import BLOCK
from ..plan.claims import name_of
from ..plan.files import File, FileBlock, join_parts
from ..plan.tasks import BlockPiece, RankPlan, Task
from ..storage.files import REACH, FileSource
from ..storage.folder import Folder
from .exchange import PieceExchange, by_wave
from .memory import LocalState, MemoryPool
from .ranks import Ranks

_AHEAD = 1024  # blocks that are listed before the first is read where ranks send each other nothing
_LISTED = 16  # of which so many are listed at a time, so that the first are being read meanwhile
_AT_ONCE = 4  # requests of a rank that reads for others, at least, where its budget has room for so many blocks


@dataclass(frozen=True, kw_only=True)
class BlockReader:
    """Context of the reads.

    Args:
        files: All files.
        local: State that this rank fills.
        ranks: Ranks that read together.
        folder: Folder of the checkpoint.
        crcs: crc32c of each block, by file name; a missing file is not verified.
        budget: Memory in addition to the state, in bytes.
        threads: Number of threads that read.
        window: Consecutive bytes that one request reads, if requests are slow; 0: blocks are read one by one.
        wrong: List that receives the file and number of each corrupt block.
    """

    files: Sequence[File]
    local: LocalState
    ranks: Ranks
    folder: Folder
    crcs: Mapping[str, Sequence[int]]
    budget: int
    threads: int
    window: int = 0
    wrong: list[tuple[str, int]] = field(default_factory=list)

    @property
    def block(self) -> int:
        """Bytes of the largest block."""
        return max((file.block for file in self.files), default=BLOCK)


def window_of(total: int, budget: int, block: int, ranks: int, in_flight: int) -> int:
    """Return the number of consecutive bytes that one request to a store reads, a multiple of a block.

    The window is small enough that every rank has enough requests to send concurrently. A single rank receives directly
    into its tensors, or through a block. Ranks that read for each other keep everything that they read in a round until
    it is sent, so several requests must fit into the budget.

    Args:
        total: Size of all files, in bytes.
        budget: Memory of a rank in addition to its state, in bytes.
        block: Size of a block, in bytes.
        ranks: Number of ranks that read together.
        in_flight: Number of concurrent requests of one rank.
    """
    blocks = min(REACH // block, -(-(total // block) // (ranks * in_flight)))  # a header is no block to share out
    if ranks > 1:
        blocks = min(blocks, round_of(budget, block) // _AT_ONCE)
    return block * max(blocks, 1)


def round_of(budget: int, block: int) -> int:
    """Return the number of blocks that a rank reads in a round: they take a third of the budget, and sends the rest."""
    return max(budget // (3 * block), 1)


def read_blocks(
    plan: RankPlan, reading: BlockReader, progress: Callable[[int], None]
) -> tuple[list[Crc], BaseException | None]:
    """Fill this rank's tensors, and send other ranks what this rank reads for them.

    After an error this rank still sends and receives until the end, so that no rank waits for it.

    Args:
        plan: This rank's part of the load.
        reading: Context of the reads.
        progress: Function that receives the number of bytes of each block that was read.

    Returns:
        Checksums of the parts of blocks that other ranks complete, and the first error if there was one.

    Raises:
        RuntimeError: Another rank is gone.
    """
    reading.local.wait_for_streams()  # what is still to be written there must not come after what is read
    with ThreadPoolExecutor(reading.threads, thread_name_prefix="par-checkpoint-read") as pool:
        reader = _Reader(reading, pool, progress, Counter(plan.files()))
        window = max(reading.window // reading.block, 1)
        blocks = max(_LISTED // window, 1) * window  # of a round
        rounds = max(_AHEAD // blocks, 1)  # that are read at a time
        # Ranks that read for each other hold all blocks of a round until they are sent, so the budget bounds the
        # rounds.
        if plan.peers:
            held = round_of(reading.budget, reading.block)
            blocks = window if reading.window else max(held // _AT_ONCE, 1)
            rounds = max(held // blocks, 1)
        under_way: deque[_Round] = deque()
        try:
            for tasks, of_others in plan.rounds(blocks):
                # The next rounds are read while pieces of this one are exchanged.
                if len(under_way) == rounds:
                    reader.end(under_way.popleft(), peers=plan.peers)
                under_way.append(reader.begin(tasks, of_others))
            while under_way:
                reader.end(under_way.popleft(), peers=plan.peers)
        finally:
            wait([job for each in under_way for job in each.jobs])  # the files are closed next
            reader.sources.close()
    reader.error = reader.error or reader.gaps()
    return reader.parts, reader.error


def wrong_join(parts: Iterable[Crc], reading: BlockReader) -> CorruptError | None:
    """Return the error for a block whose parts, as read by several ranks, do not join to its checksum; or None.

    Args:
        parts: Checksums of all parts, from all ranks.
        reading: Context of the reads.
    """
    for (number, block), crc in join_parts(reading.files, parts).items():
        file = reading.files[number]
        if crc != reading.crcs[file.name][block]:
            reading.wrong.append((file.name, block))
            first = file.data_begin + block * file.block
            inside = [tensor for tensor, low, high in file.placed if low < first + file.block and high > first]
            names = [name_of(reading.local.tensors[tensor].key) for tensor in inside]
            return CorruptError(corrupt_block(f"{reading.folder.url}/{file.name}", block, first, names))
    return None


@dataclass(frozen=True, kw_only=True)
class _Round:
    """Blocks that are being read.

    Args:
        shared: Blocks from which other ranks take pieces, each with the memory that it is read into.
        others: Blocks that other ranks read concurrently, from which this rank takes pieces.
        jobs: Reads in flight.
    """

    shared: Sequence[tuple[Task, torch.Tensor]]
    others: Sequence[Task]
    jobs: Sequence[Future[None]]


class _Reader:
    """State of one rank's reading.

    Args:
        reading: Context of the reads.
        pool: Threads that read.
        progress: Function that receives the number of bytes of each block that was read.
        blocks: Number of blocks that this rank reads, by file.
    """

    def __init__(
        self, reading: BlockReader, pool: ThreadPoolExecutor, progress: Callable[[int], None], blocks: Mapping[int, int]
    ) -> None:
        self.error: BaseException | None = None
        self.parts: list[Crc] = []  # of blocks that several ranks read
        self._taken: Counter[int] = Counter()  # by number of a tensor: elements that came
        self._reading, self._pool, self._progress = reading, pool, progress
        self._rank = reading.ranks.rank
        self.sources = _Sources(reading.folder, {reading.files[file].name: count for file, count in blocks.items()})
        self._blocks = MemoryPool(max((file.block for file in reading.files), default=0))
        self._exchange = PieceExchange(reading.ranks, reading.local.packed_size, limit=reading.budget // 4)

    def begin(self, tasks: Sequence[Task], others: Sequence[Task]) -> "_Round":
        """Begin to read the blocks of a round.

        Args:
            tasks: This rank's blocks.
            others: Blocks of other ranks, of which this rank takes pieces.
        """
        for piece in (piece for task in (*tasks, *others) for piece in task.pieces):
            # Elements are counted when they are planned, so `gaps` finds a tensor that no task fills.
            if piece.to == self._rank:
                self._taken[piece.tensor] += piece.count
        shared, jobs = [], []
        for run in _runs(tasks, self._reading.window):
            memories = []
            for task in run:
                memory = None
                # A block that other ranks need stays in memory until the exchange. Any other block is read directly
                # into the tensors.
                if any(piece.to != self._rank for piece in task.pieces):
                    memory = self._blocks.take()
                    shared.append((task, memory))
                memories.append(memory)
            jobs.append(self._pool.submit(self._read_run, run, memories))
        return _Round(shared=shared, others=others, jobs=jobs)

    def end(self, begun: "_Round", *, peers: bool) -> None:
        """Wait for the blocks of a round, and takes what others read for this rank. All ranks end rounds in order.

        Args:
            begun: The round.
            peers: Whether any rank sends anything to another.
        """
        # Every job must end before the buffers are reused, even if one has failed.
        wait(begun.jobs)  # for all at once, after an error too
        for job in begun.jobs:
            self.error = self.error or job.exception()
        if peers:
            self._swap(begun.shared, begun.others)
        for _, block in begun.shared:
            self._blocks.give_back(block)

    def gaps(self) -> RuntimeError | None:
        """Return the error for a tensor of this rank whose elements did not all arrive."""
        for number, parts in self._reading.local.parts.items():
            wanted = sum(math.prod(size) for _, size in {(part.box.start, part.box.size) for part in parts})
            if self._taken[number] < wanted:
                name, taken = name_of(self._reading.local.tensors[number].key), self._taken[number]
                return RuntimeError(f"{taken} of {wanted} elements of {name!r} came, a bug of par-checkpoint")
        return None

    def _swap(self, shared: Sequence[tuple[Task, torch.Tensor]], others: Sequence[Task]) -> None:
        """Send pieces of the blocks that this rank has read, receive pieces of other ranks' blocks, and pass them on.

        Received pieces are in this rank's tensors before they are passed on, so no buffer grows with the number of
        ranks.
        """
        local = self._reading.local
        block_of = {id(piece): block for task, block in shared for piece in task.pieces}

        def fill(to: int, pieces: Sequence[BlockPiece], buffer: torch.Tensor) -> torch.Tensor:
            del to
            for piece, view in zip(pieces, local.packed(pieces, buffer), strict=True):
                # A piece that this rank passes on has arrived in its tensors; one that it has read is still in the
                # block.
                block = block_of.get(id(piece))
                copy_elements_(view, local.view(piece) if block is None else local.in_block(piece, block))
            return buffer

        def take(pieces: Sequence[BlockPiece], buffer: torch.Tensor) -> None:
            for piece, view in zip(pieces, local.packed(pieces, buffer), strict=True):
                copy_elements_(local.view(piece), view)

        for outgoing, incoming in by_wave([*(task for task, _ in shared), *others], self._rank):
            self._exchange.run(outgoing, incoming, fill=fill, take=take, place=local.place)

    def _read_run(self, run: Sequence[Task], memories: Sequence[torch.Tensor | None]) -> None:
        """Read consecutive blocks: each into the given memory, or into the tensors of this rank."""
        name = self._reading.files[run[0].block.file].name
        source = self.sources[name]
        # With a window, one request reads all blocks of the run.
        ranged = source.ranged(run[0].block.begin, run[-1].block.end) if self._reading.window else source
        try:
            for task, memory in zip(run, memories, strict=True):
                if memory is None:
                    self._read_own(ranged, task)
                else:
                    self._read_into(ranged, task, memory)
                self.sources.done(name)
        finally:
            if ranged is not source:
                ranged.close()

    def _read_own(self, source: FileSource, task: Task) -> None:
        """Read a block of which no other rank takes a piece from here: straight into the tensors, if it can."""
        with self._blocks.lent() as spare:
            direct = self._reading.local.direct(task.pieces, task.block.size, spare)
            if direct is not None:
                self._read(source, task.block, direct)
            else:
                self._read_into(source, task, spare)

    def _read_into(self, source: FileSource, task: Task, memory: torch.Tensor) -> None:
        """Read a block into memory, and copy this rank's pieces of it."""
        block = memory[: task.block.size]
        self._read(source, task.block, [block])
        own = (piece for piece in task.pieces if piece.to == self._rank)
        with torch.no_grad():
            self._reading.local.from_block_(own, block)

    def _read(self, source: FileSource, block: FileBlock, into: Iterable[torch.Tensor]) -> None:
        """Read a block into one or several runs of memory, and verify it."""
        file = self._reading.files[block.file]
        crcs = self._reading.crcs.get(file.name)
        begin, crc = block.begin, 0
        for memory in map(bytes_of, into):
            for low in range(0, len(memory), source.stride):
                part = memory[low : low + source.stride]
                source.read_into(begin, part)
                begin += len(part)
                crc = crc if crcs is None else crc32c(part, crc)
        if crcs is not None:
            self._check(file, block, crc, crcs)
        self._progress(block.size)

    def _check(self, file: File, block: FileBlock, crc: int, crcs: Sequence[int]) -> None:
        """Compares a block's checksum with the recorded one; that of a part of a block is kept for later."""
        number, start = divmod(block.begin - file.data_begin, file.block)
        # The recorded checksum is that of the full block, so a part can only be checked after all parts are joined.
        if start or block.end < min(block.begin + file.block, file.size):
            self.parts.append((block.file, block.begin, block.size, crc))
        elif crc != crcs[number]:
            self._reading.wrong.append((file.name, number))
            tensors = [name_of(self._reading.local.tensors[span.tensor].key) for span in block.spans]
            raise CorruptError(corrupt_block(f"{self._reading.folder.url}/{file.name}", number, block.begin, tensors))


def _runs(tasks: Sequence[Task], window: int) -> list[list[Task]]:
    """Group the tasks into lists of consecutive blocks in a file, of at most a window's bytes."""
    runs: list[list[Task]] = []
    for task in sorted(tasks, key=lambda task: (task.block.file, task.block.begin)):
        block = task.block
        first, before = (runs[-1][0].block, runs[-1][-1].block) if runs else (block, block)
        follows = before.file == block.file and before.end == block.begin
        if follows and block.end - first.begin <= window:
            runs[-1].append(task)
        else:
            runs.append([task])
    return runs


class _Sources:
    """Open files, each from its first block that this rank reads to its last: a process may only have few open files.

    Args:
        folder: Folder of the files.
        blocks: Number of blocks that this rank reads, by name of the file.
    """

    def __init__(self, folder: Folder, blocks: Mapping[str, int]) -> None:
        self._folder, self._left = folder, dict(blocks)
        self._open: dict[str, FileSource] = {}
        self._opening = threading.Lock()

    def __getitem__(self, name: str) -> FileSource:
        """Return the open file with a name."""
        with self._opening:
            if name not in self._open:
                self._open[name] = self._folder.open(name)
            return self._open[name]

    def done(self, name: str) -> None:
        """Notes that a block of a file is read; closes the file after the last one."""
        with self._opening:
            self._left[name] -= 1
            last = None if self._left[name] else self._open.pop(name)
        if last is not None:
            last.close()

    def close(self) -> None:
        """Close all files that are open."""
        for source in self._open.values():
            source.close()
        self._open.clear()
