"""The program of a whole step, as it was done: what it says is checked and counted entry by entry. Pure arithmetic.

Events are what the model and the training loop do.
    F u   the forward of a unit begins              R u   it is computed again within backward
    B u   its backward begins                       C c   gradients of a chunk lie in its buffer
    S o   an optimizer steps                        E     a pass or a step ends

Actions are what par-zero does.
    gather u, free u      whole parameters of a unit at stage 3; at stages 1 and 2, gather c brings a stepped chunk
    zero c                a chunk is reduced of which this rank has no gradients
    scatter c, reduce c   the reduction of a chunk begins, by a reduce-scatter or by one all-reduce
    sum c                 its result is there
    release               buffers beyond those that are kept are given back
    send c                its result is written to a disk, and its memory given back
    cast c, drop c        gradients in the optimizer's dtype, made and dropped
    fetch p, evict p      a piece of an optimizer comes from the disk, and goes back
    step c, step p        a chunk or a piece is updated
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..layout.meter import BUFFERS, GRADIENTS, UNITS

_WIDTH = 100
"""Columns of a printed program."""


class ProgramEntry(NamedTuple):
    """One entry of the program of a step.

    Args:
        op: What happens, such as "F" or "gather".
        of: The unit by name, the chunk by the name of its first parameter, the piece, or the optimizer by number.
    """

    op: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.op}:{self.of}" if self.of else self.op


@dataclass(frozen=True, kw_only=True)
class ChunkBytes:
    """Bytes of a chunk.

    Args:
        unit: The unit that has it; None below stage 3.
        gradient: Bytes of a rank's gradients, before their sum.
        shard: Bytes of this rank's shard of the sum, where gradients are sharded; else 0.
        arriving: Bytes of the gradients as autograd makes them, until they are copied.
        cast: Bytes of the sum in the optimizer's dtype.
        received: Bytes that its reduction receives in a buffer of its own.
    """

    unit: str | None
    gradient: int
    shard: int
    arriving: int
    cast: int
    received: int


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """Memory between two steps that a step uses again.

    Args:
        gradients: Chunks that have memory for gradients.
        casts: Chunks that have gradients in the optimizer's dtype.
        filled: Chunks whose gradients wait for their sum, as after `no_sync`.
        borrowed: Bytes of the buffer of each chunk that has one.
        lent: Bytes of each buffer for gradients.
        received: Bytes of each buffer for what reductions receive.
    """

    gradients: frozenset[str] = frozenset()
    casts: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()
    borrowed: Mapping[str, int] = field(default_factory=dict)
    lent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class BufferSizes:
    """Sizes of buffers that are lent, as `Buffers` lends them.

    Args:
        free: Bytes of each buffer that nobody has borrowed.
        borrowed: Bytes of each that is borrowed, by borrower.
    """

    def __init__(self, free: Sequence[int], borrowed: Mapping[str, int] | None = None) -> None:
        self._free, self._lent = list(free), dict(borrowed or {})

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return sum(self._free) + sum(self._lent.values())

    def take(self, borrower: str, size: int) -> None:
        """Lend the smallest free buffer that has room, or a new one in place of the smallest, unless one is lent."""
        if borrower in self._lent:
            return
        self._free.sort()
        chosen = next((free for free in self._free if free >= size), None)
        if chosen is not None:
            self._free.remove(chosen)
        else:
            del self._free[:1]
        self._lent[borrower] = size if chosen is None else chosen

    def give_back(self, borrower: str) -> None:
        """Take back what was lent."""
        self._free.append(self._lent.pop(borrower))

    def keep(self, count: int) -> None:
        """Keep the largest free buffers alone."""
        self._free = sorted(self._free)[-count:]


@dataclass(frozen=True, kw_only=True)
class ZeroProgram:
    """What a rank has done in a step, entry by entry. It prints as text, a line or more for each pass.

    Args:
        entries: The entries, in their order.
        units: Bytes of each unit that is whole, by name; empty below stage 3.
        chunks: Bytes of each chunk, by name.
        shards_gradients: Whether gradients are sharded: a chunk borrows the buffer of its gradients.
        kept_buffers: Number of buffers that are kept when a pass ends.
        is_late: Whether a thread steps pieces while the next step begins, so that their entries belong to both.
        start: Memory that was there before.
    """

    entries: tuple[ProgramEntry, ...]
    units: Mapping[str, int]
    chunks: Mapping[str, ChunkBytes]
    shards_gradients: bool
    kept_buffers: int
    is_late: bool = False
    start: HeldMemory = field(default_factory=HeldMemory)

    def __str__(self) -> str:
        lines, line = [], ""
        for entry in map(str, self.entries):
            if line and len(line) + len(entry) >= _WIDTH:
                lines.append(line)
                line = ""
            line = f"{line} {entry}" if line else entry
            if entry == "E":
                lines.append(line)
                line = ""
        return "\n".join([*lines, line] if line else lines)

    def walk(self) -> Iterator[tuple[ProgramEntry, dict[str, int]]]:
        """Go through the entries, and yield each with the bytes by kind after it.

        Raises:
            ValueError: An entry lacks what it needs, such as a unit that runs and is not whole.
        """
        state = _LedgerState(self)
        for number, entry in enumerate(self.entries):
            try:
                state.apply(entry)
            except ValueError as error:
                raise ValueError(f"entry {number}, {entry}: {error}; a bug of par-zero") from None
            yield entry, state.bytes()

    def peak(self) -> dict[str, int]:
        """Return the bytes by kind at the moment of the step that takes most in all.

        Gradients that autograd has just made count at the moment when they are copied.
        """
        fullest: dict[str, int] = {}
        for entry, held in self.walk():
            if entry.op == "C":
                held[GRADIENTS] += self.chunks[entry.of].arriving
            if sum(held.values()) > sum(fullest.values()):
                fullest = held
        return fullest


class _LedgerState:
    """What is where between two entries."""

    def __init__(self, program: ZeroProgram) -> None:
        self._program, start = program, program.start
        self._whole: set[str] = set()
        self._stale: set[str] = set()  # units and chunks whose parameters were stepped, and not gathered since
        self._filled = set(start.filled)
        self._under_way: dict[str, str] = {}
        self._fetched: set[str] = set()  # pieces that are in memory
        self._gradients, self._casts = set(start.gradients), set(start.casts)
        self._lent, self._received = BufferSizes(start.lent, start.borrowed), BufferSizes(start.received)

    def bytes(self) -> dict[str, int]:
        """Bytes by kind."""
        chunks, sharded = self._program.chunks, self._program.shards_gradients
        gradients = (chunks[name].shard if sharded else chunks[name].gradient for name in self._gradients)
        return {
            UNITS: sum(self._program.units[unit] for unit in self._whole),
            GRADIENTS: sum(gradients) + sum(chunks[name].cast for name in self._casts),
            BUFFERS: self._lent.total + self._received.total,
        }

    def apply(self, entry: ProgramEntry) -> None:
        """Go on by an entry."""
        kind = "run" if entry.op in ("F", "R", "B") else "begin" if entry.op in ("scatter", "reduce") else entry.op
        follow = getattr(self, f"_{kind.lower()}", None)
        if follow is not None:  # an optimizer that steps changes nothing by itself
            follow(entry)

    def _run(self, entry: ProgramEntry) -> None:
        _need(entry.of in self._whole, "it is not whole")
        _need(entry.of not in self._stale, "its parameters are out of date")

    def _gather(self, entry: ProgramEntry) -> None:
        if entry.of in self._program.units:
            _need(entry.of not in self._whole, "it is whole already")
            self._whole.add(entry.of)
        self._stale.discard(entry.of)

    def _free(self, entry: ProgramEntry) -> None:
        _need(entry.of in self._whole, "it is not whole")
        self._whole.remove(entry.of)

    def _zero(self, entry: ProgramEntry) -> None:
        self._c(entry)

    def _c(self, entry: ProgramEntry) -> None:
        _need(entry.of not in self._stale, "its parameters are out of date")
        if not self._program.shards_gradients:
            self._gradients.add(entry.of)
        else:
            self._lent.take(entry.of, self._program.chunks[entry.of].gradient)
        self._filled.add(entry.of)

    def _begin(self, entry: ProgramEntry) -> None:
        _need(entry.of not in self._under_way, "it is under way already")
        _need(entry.of in self._filled, "it has no gradients")
        self._under_way[entry.of] = entry.op
        self._gradients.add(entry.of)
        if self._receives(entry.of):
            self._received.take(entry.of, self._program.chunks[entry.of].received)

    def _receives(self, chunk: str) -> bool:
        """Whether the reduction of a chunk under way has a buffer for what it receives."""
        return self._under_way[chunk] == "scatter" and self._program.chunks[chunk].received > 0

    def _sum(self, entry: ProgramEntry) -> None:
        _need(entry.of in self._under_way, "it is not under way")
        if self._receives(entry.of):
            self._received.give_back(entry.of)
        del self._under_way[entry.of]
        if self._program.shards_gradients:
            self._lent.give_back(entry.of)
        self._filled.discard(entry.of)

    def _cast(self, entry: ProgramEntry) -> None:
        self._casts.add(entry.of)

    def _drop(self, entry: ProgramEntry) -> None:
        self._casts.discard(entry.of)

    def _fetch(self, entry: ProgramEntry) -> None:
        self._fetched.add(entry.of)

    def _evict(self, entry: ProgramEntry) -> None:
        self._need_piece(entry)
        self._fetched.discard(entry.of)

    def _need_piece(self, entry: ProgramEntry) -> None:
        _need(self._program.is_late or entry.of in self._fetched, "it is not in memory")

    def _step(self, entry: ProgramEntry) -> None:
        chunk = self._program.chunks.get(entry.of)  # None for a piece of a chunk, whose state is fetched
        if chunk is None:
            self._need_piece(entry)
        _need(entry.of not in self._under_way, "its sum is not there")
        if chunk is not None and (chunk.unit is None or chunk.unit in self._whole):
            self._stale.add(chunk.unit or entry.of)

    def _send(self, entry: ProgramEntry) -> None:
        self._gradients.discard(entry.of)

    def _e(self, _: ProgramEntry) -> None:
        _need(not self._under_way, "reductions are under way")

    def _release(self, _: ProgramEntry) -> None:
        self._lent.keep(self._program.kept_buffers)
        self._received.keep(self._program.kept_buffers)


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
