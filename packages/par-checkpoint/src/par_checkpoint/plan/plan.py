"""The writer or reader of each block of each file, and the pieces that ranks send each other.

All ranks compute the same plan, without communication.

A block is a range of bytes of a file. One rank assembles it from its own pieces and from pieces that the other ranks
send, checksums it and writes it. A load reverses these steps. So every byte is checksummed and written once, however
the tensors are sharded.

Two cases avoid messages and contention:

- If ranks hold a block in a few contiguous runs of bytes, such as rows, each rank writes its own run. The checksum of
  the block is computed from the checksums of the runs.
- If very many ranks hold parts of a file, only a few of them write it, preferably neighbours. Thousands of ranks that
  open and sync one file would slow each other down.

Blocks are planned in runs of blocks that are mostly sharded identically. A rank decides once for a run, assigns its
blocks to ranks by arithmetic, and lists the blocks in which it takes part. It computes the pieces of a block only when
the block's turn has come, which bounds the memory of a plan.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from par_groups import GlobalTensor

from .deal import ByteShares, Rotation
from .files import Area, File, FileBlock
from .homes import Homes
from .overlap import BoxIndex, indexes_of
from .round_robin import RoundRobin
from .tasks import AssignedRun, BlockList, Blocks, HeldRun, RankPlan, parts_of

_READERS = 4  # ranks that may read one block from the page cache, which costs less than sending it
_RUNS = 16  # runs of a block up to which each rank writes its own run; more runs would be small writes
_HOLDERS = 64  # number of holders of a file up to which all of them may write into it
_WRITERS = 16  # number of writers of a file with more holders


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The layout and the plan of a save before it writes. Only `plan` differs between ranks.

    Args:
        tensors: All tensors of the checkpoint.
        files: All files of the checkpoint.
        plan: This rank's part of the work.
        owners: Rank that writes each file, by number of the file; None: several ranks may write into one file.
        writers: Ranks that write the blocks of each file; None: no caller needs them.
    """

    tensors: Sequence[GlobalTensor]
    files: Sequence[File]
    plan: RankPlan
    owners: Sequence[int] | None
    writers: Sequence[Sequence[int]] | None = None


class BlockPlanner:
    """The assignment of blocks to the ranks that write or read them.

    Args:
        tensors: All tensors and their holders.
        areas: Data areas of the files.
        rank: The rank whose part is computed.
        size: Number of ranks.
        owners: Rank that writes each file, by number of the file; None: several ranks may write into one file.
        hosts: Number of each rank's host; None: all ranks share one host.
        alone: Whether only one rank may write into a block; default False.
        apart: Whether each host writes separate files, so that any rank may write the blocks that it holds.
        window: Number of blocks that one request of a load reads, counted from the first block of a file; 0: blocks are
            read one by one.
        homes: Ranks that can read each block; None: every rank can read all blocks.
        names: Name of each file in `homes`.
    """

    def __init__(
        self,
        tensors: Sequence[GlobalTensor],
        areas: Sequence[Area],
        rank: int,
        size: int,
        *,
        owners: Sequence[int] | None = None,
        hosts: Sequence[int] | None = None,
        alone: bool = False,
        apart: bool = False,
        window: int = 0,
        homes: Homes | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._tensors, self._areas, self._rank, self._size = tensors, areas, rank, size
        self._owners, self._hosts, self._alone, self._apart = owners, hosts, alone or apart, apart
        self._by_window, self._window = window > 0, max(window, 1)
        self._homes, self._names = homes, names
        self._begins: dict[int, int] = {}  # by file: where its first area begins
        for area in areas:
            self._begins.setdefault(area.file, area.begin)
        self._round_robin = RoundRobin(size, self._window)
        # An area repeats the same pattern of tensors over and over, such as the layers of a model. The holders of each
        # pattern are computed once.
        self._seen: dict[tuple[int, tuple[tuple[int, ...], ...]], _Held] = {}
        self._indexes = indexes_of(tensors)

    def save(self) -> RankPlan:
        """Plan a save. One rank writes a block, or its holders write their runs of it. One replica sends each box."""
        return self._planned(saving=True, near=False)

    def load(self, *, near: bool) -> RankPlan:
        """Plan a load of every block that some rank needs.

        The holders of a block read their runs of it, or one rank reads the full block and sends its pieces to all
        holders. On one machine, a few ranks may read the same block.

        Args:
            near: Whether all ranks share a machine. A rank that needs much of a block then reads it from the page
                cache.
        """
        return self._planned(saving=False, near=near)

    def _planned(self, *, saving: bool, near: bool) -> RankPlan:
        """Assign every run of blocks, and list the blocks in which this rank takes part."""
        blocks = Blocks(self._tensors, self._indexes, self._areas, self._rank, hosts=self._hosts, saving=saving)
        listed = BlockList(blocks, self._dealt_out(saving=saving, near=near))
        return RankPlan(blocks, listed, max(self._round_robin.turns), window=self._window)

    def writers(self) -> "list[array[int]]":
        """Return the rank that writes each block of each area in a save without blocks that several ranks write."""
        found = []
        for area, runs in zip(self._areas, self._dealt_out(saving=True, near=False), strict=True):
            ranks = array("q", bytes(8 * area.count))
            for run in runs:
                if isinstance(run, HeldRun):
                    raise RuntimeError(f"blocks from {run.first} on have several writers; a bug of par-checkpoint")
                for rank, _, numbers in run.deal.segments(run.first, run.stop):
                    for number in numbers:
                        ranks[number] = rank
            found.append(ranks)
        return found

    def _dealt_out(self, *, saving: bool, near: bool) -> Iterator[list[AssignedRun | HeldRun]]:
        """Yield the runs of blocks of each area, in order."""
        # `writers` deals the blocks out once more, and must find the same ranks as `save`.
        self._round_robin = RoundRobin(self._size, self._window)
        if self._size == 1:
            for area in self._areas:
                yield [AssignedRun(Rotation(0, area.count, (0,), 0, (0,)), sends=False)]
            return
        # With one owner per file or one host per file, or with blocks that only some ranks can read, the number of
        # writers is limited already.
        is_free = bool(self._owners) or self._apart if saving else self._homes is not None
        shared = {} if is_free else self._shared(saving=saving)
        for number, area in enumerate(self._areas):
            self._seen.clear()
            if saving and self._owners:
                owner = (self._owners[area.file],)
                yield [self._round_robin.rotated(0, area.count, owner, sends=True)]
            elif number in shared:
                yield [AssignedRun(shared[number], sends=True)]
            else:
                yield list(self._free(number, area, saving=saving, near=near))

    def _shared(self, *, saving: bool) -> dict[int, ByteShares]:
        """Assign the areas with too many holders to some of the holders, by number of the area.

        Areas with the same holders are assigned together, one run of blocks after the other.
        """
        turns_so_far = self._round_robin.turns
        classes: dict[int, list[int]] = {}
        for number, area in enumerate(self._areas):
            holders = 0
            for boxes in {
                id(boxes): boxes for boxes in (self._tensors[tensor].boxes for tensor, _, _ in area.placed)
            }.values():
                # The holders are bits of one integer, which unites thousands of ranks quickly.
                holders |= boxes.all_holders
            if holders.bit_count() > _HOLDERS:
                classes.setdefault(holders, []).append(number)
        found = {}
        for bits, numbers in classes.items():
            ranks = [rank for rank, holds in enumerate(bits.to_bytes(self._size, "little")) if holds]
            lengths = [self._areas[number].count for number in numbers]
            # A chunk is large enough that no file has more than _WRITERS writers.
            chunk = max(-(-sum(lengths) // len(ranks)), -(-max(lengths) // _WRITERS) if saving else 1)
            chunk = -(-chunk // self._window) * self._window
            # The ranks with the fewest blocks so far write this file, so that many such files spread over all ranks.
            free = sorted(self._neighbours(ranks), key=turns_so_far.__getitem__)[: -(-sum(lengths) // chunk)]
            chosen = tuple(self._neighbours(free))
            turns, offset = self._round_robin.next_turns(chosen), 0
            for number, length in zip(numbers, lengths, strict=True):
                found[number] = ByteShares(0, length, chosen, offset, chunk, turns)
                offset += length
            for place, rank in enumerate(chosen):
                # The last of the chosen ranks may have a shorter chunk.
                turns_so_far[rank] = turns[place] + min(chunk, offset - place * chunk)
        return found

    def _neighbours(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks sorted by host."""
        hosts = self._hosts
        return sorted(ranks) if hosts is None else sorted(ranks, key=lambda rank: (hosts[rank], rank))

    def _free(self, number: int, area: Area, *, saving: bool, near: bool) -> Iterator[AssignedRun | HeldRun]:
        """Yield the runs of an area into which all of its holders may write."""
        for first, stop, begin, tensors in area.stretches():
            if not tensors:
                yield from self._run(number, first, stop, saving=saving, near=near)
                continue
            index, width = self._indexes[tensors[0]], self._tensors[tensors[0]].dtype.itemsize
            is_alone = len(tensors) == 1 and not index.cut.is_one_box
            if is_alone and self._in_runs(index, width, area.block, saving=saving):
                yield HeldRun(first, stop)
                continue
            reached = first
            edges = {element for tensor in tensors for element in self._indexes[tensor].cut.slices}
            # The holders change at such an edge. The block that contains it becomes a separate run, so that all blocks
            # of every other run have the same holders.
            for element in sorted(edges):
                block, inside = divmod(begin + element * width - area.begin, area.block)
                for end in (block, block + 1 if inside else block):
                    if reached < end < stop:
                        yield from self._run(number, reached, end, saving=saving, near=near)
                        reached = end
            yield from self._run(number, reached, stop, saving=saving, near=near)

    def _in_runs(self, index: BoxIndex, width: int, block: int, *, saving: bool) -> bool:
        """Return whether each holder should write or read its own part of every block of a tensor."""
        if self._alone if saving else self._homes is not None:
            return False
        if self._by_window and not index.cut.are_runs:  # an object store would need one request per run
            return False
        # On a load all replicas would read the same bytes. On a save only one of them writes.
        is_held_once = saving or len(index.boxes.ranks) == len(index.boxes)
        return is_held_once and index.cut.run * width * _RUNS >= block

    def _run(self, number: int, first: int, stop: int, *, saving: bool, near: bool) -> Iterator[AssignedRun | HeldRun]:
        """Assign a run of blocks by the number of bytes that each rank holds of the full run.

        Most blocks of a run are sharded identically. If one index of the first dim is larger than a block, the edge of
        a box may be inside, and then some blocks of the run lack some of these ranks.
        """
        area = self._areas[number]
        block = area.at(first, self._tensors, 0, (stop - first) * area.block)
        alike = block.size, tuple((id(self._indexes[span.tensor]), *span.place) for span in block.spans)
        if alike not in self._seen:
            self._seen[alike] = _Held(block, [self._indexes[span.tensor] for span in block.spans])
        held = self._seen[alike]
        # A load skips blocks that no rank needs.
        if not held.some and not saving:
            return
        # Blocks that no rank holds are written, too; the file's number spreads them over the ranks.
        main = held.main or (block.file % self._size,)
        if self._homes is not None and not saving:
            yield from self._where_kept(number, first, stop, main, held.some)
        # Every main rank can write the block without receiving anything, so replicas share the blocks.
        elif saving and held.is_whole:
            yield self._round_robin.rotated(first, stop, main, sends=False)
        elif (
            (not self._alone if saving else held.is_once)
            and stop == first + 1
            and not (self._by_window and not held.are_runs)
            and held.is_in_parts
        ):
            yield HeldRun(first, stop)
        elif self._by_window:
            before = (area.begin - self._begins[area.file]) // area.block
            yield from self._round_robin.in_windows(
                first, stop, main, file=area.file, before=before, sends=len(held.some) > 1
            )
        elif saving or not near:
            yield self._round_robin.rotated(first, stop, main, sends=saving or len(held.some) > 1)
        else:
            # On one machine the block is in the page cache after the first read. Reading it again is cheaper than a
            # message, but not for many ranks.
            readers = tuple(sorted(held.some if len(held.some) <= _READERS else held.much)) or main
            yield self._round_robin.together(first, stop, readers, sends=not held.some <= set(readers))

    def _where_kept(
        self, number: int, first: int, stop: int, main: tuple[int, ...], some: frozenset[int]
    ) -> Iterator[AssignedRun]:
        """Assign blocks that only some ranks can read, preferably to ranks that need most of a block.

        Args:
            number: Number of the area.
            first: The first block.
            stop: One past the last block.
            main: Ranks that need the most bytes of a block, or at least half as many.
            some: All ranks that need bytes of a block.
        """
        assert self._homes is not None  # noqa: S101 - it is asked before
        for low, high, seeing in self._homes.runs(self._names[self._areas[number].file], first, stop):
            among = set(seeing)
            # A reader that needs the block saves a message; a rank that only sees it must send everything.
            readers = tuple(rank for rank in main if rank in among) or tuple(sorted(some & among)) or seeing
            yield self._round_robin.rotated(low, high, readers, sends=len(some) > 1 or some != set(readers))


class _Held:
    """The holders of a run of blocks that are mostly sharded identically.

    If one index of the first dim is larger than a block, some blocks of the run may lack some of the holders.

    Args:
        block: All blocks of the run as one block.
        indexes: Boxes of the tensor of each span.
    """

    def __init__(self, block: FileBlock, indexes: Sequence[BoxIndex]) -> None:
        self._block = block
        spans = zip(block.spans, indexes, strict=True)
        overlaps = [(span, index.within(span.start, span.stop)) for span, index in spans]
        self._overlaps = [(span, overlap) for span, overlap in overlaps if overlap.boxes]
        self._held = [
            (rank, count * span.width)
            for span, overlap in self._overlaps
            for box, count in overlap.boxes.items()
            for rank in overlap.index.holders(box)
        ]

    @cached_property
    def some(self) -> frozenset[int]:
        """Ranks that hold any bytes of the run."""
        return frozenset(rank for rank, _ in self._held)

    @cached_property
    def main(self) -> tuple[int, ...]:
        """Ranks that hold at least half as many bytes as the rank with the most bytes, ascending."""
        most = max((size for _, size in self._held), default=0)
        return tuple(sorted({rank for rank, size in self._held if 2 * size >= most}))

    @cached_property
    def much(self) -> frozenset[int]:
        """Ranks that hold at least a quarter of the run."""
        return frozenset(rank for rank, size in self._held if 4 * size >= self._block.size)

    @cached_property
    def is_whole(self) -> bool:
        """Whether each of the main ranks holds the full run, which is also true without holders."""
        return all(
            overlap.index.held_by(rank) >= overlap.boxes.keys() for _, overlap in self._overlaps for rank in self.main
        )

    @cached_property
    def is_once(self) -> bool:
        """Whether no box has replicas."""
        return all(len(overlap.index.holders(box)) == 1 for _, overlap in self._overlaps for box in overlap.boxes)

    @property
    def are_runs(self) -> bool:
        """Whether the elements of each box are contiguous in the file."""
        return all(overlap.index.cut.are_runs for _, overlap in self._overlaps)

    @cached_property
    def is_in_parts(self) -> bool:
        """Whether the ranks hold the run in so few runs of bytes that each rank may write or read its own."""
        return bool(parts_of(self._block, self._overlaps, limit=_RUNS))
