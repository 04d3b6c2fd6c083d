"""The program of a complete step, as it was executed: entries that are checked and counted. Pure arithmetic.

Events of the model and of the training loop:

- `F u`: the forward of a unit begins.
- `R u`: the recomputation of a unit within backward begins.
- `B u`: the backward of a unit begins.
- `C c`: the gradients of a chunk are in its buffer.
- `S o`: an optimizer steps.
- `E`: a pass or a step ends.

Actions of par-zero:

- `gather u`, `free u`: the full parameters of a unit are gathered and freed, at stage 3.
- `gather c`: the updated parameters of a chunk are gathered, at stages 1 and 2.
- `zero c`: this rank has no gradients of a chunk, and reduces zeros.
- `scatter c`, `reduce c`: the reduction of a chunk begins, as a reduce-scatter or as one all-reduce.
- `sum c`: the result of the reduction is available.
- `release`: buffers are freed, except the kept ones.
- `send c`: the result is written to a disk, and its memory is freed; or it is copied to the host of an accelerator, and
  its memory counts as a buffer until two later sums are copied, or until buffers are freed.
- `cast c`, `drop c`: gradients in memory of the optimizer's own are created and dropped: in its dtype, or assembled.
- `fetch p`, `evict p`: a piece of an offloaded optimizer is read from the disk and written back.
- `step c`, `step p`: a chunk or a piece is updated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ..layout.buffers import BufferPool
from ..layout.meter import BUFFERS, GRADIENTS, UNITS

_WIDTH = 100
"""Columns of a printed program."""


class ProgramEntry(NamedTuple):
    """One entry of the program of a step.

    Args:
        op: Event or action, such as "F" or "gather".
        of: Name of the unit, name of the chunk's first parameter, name of the piece, or number of the optimizer.
            Default: empty, for "E" and "release".
    """

    op: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.op}:{self.of}" if self.of else self.op


@dataclass(frozen=True, kw_only=True)
class ChunkBytes:
    """The bytes of a chunk.

    Args:
        unit: Name of the unit of the chunk; None below stage 3.
        full: Bytes of the full parameters, as the module uses them.
        gradient: Bytes of one rank's gradients before the reduction; 0 if the chunk is not trained.
        shard: Bytes of this rank's shard of the sum; 0 if gradients are not sharded.
        arriving: Bytes of the gradients that autograd allocates, until they are copied.
        cast: Bytes of the sum in memory of the optimizer's own: in its dtype, or as tensors that are assembled for it.
        received: Bytes of the separate receive buffer of a reduce-scatter.
        share: Index of its data-parallel group: 0 for `group` of `shard`, then `expert_groups`. Default: 0.
        is_pair: Whether one all-reduce sums the gradients of two ranks in place. Default: False.
        is_written: Whether the sum is written to a disk, or copied to the host of an accelerator. Default: False.
        is_assembled: Whether the optimizer steps assembled tensors, after all units were freed. Default: False.
    """

    unit: str | None
    full: int
    gradient: int
    shard: int
    arriving: int
    cast: int
    received: int
    share: int = 0
    is_pair: bool = False
    is_written: bool = False
    is_assembled: bool = False


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """Memory that stays allocated between two steps.

    Args:
        gradients: Chunks that have memory for gradients.
        casts: Chunks whose gradients have memory of the optimizer's own.
        filled: Chunks whose gradients are not reduced yet, such as after `no_sync`.
        borrowed: Bytes of the borrowed buffer, by chunk.
        lent: Bytes of each free buffer for gradients.
        received: Bytes of each free receive buffer.
    """

    gradients: frozenset[str] = frozenset()
    casts: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()
    borrowed: Mapping[str, int] = field(default_factory=dict)
    lent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ZeroProgram:
    """The actions of one rank in a step, entry by entry. `str()` gives at least one line per pass.

    Args:
        entries: Entries, in order.
        units: Bytes of each unit's full parameters, by name; empty below stage 3.
        chunks: Bytes of each chunk, by name.
        shards_gradients: Whether gradients are sharded. A chunk then borrows the buffer of its gradients.
        kept_buffers: Number of buffers that stay allocated when a pass ends.
        is_late: Whether a thread may step pieces while the next step begins. A fetch and its evict may then be
            recorded in different steps. Default: False.
        sending: Largest number of bytes of sums that stay on an accelerator while they are copied to its host.
            Default: 0, as on a CPU.
        start: Memory that was allocated before the step. Default: none.
    """

    entries: tuple[ProgramEntry, ...]
    units: Mapping[str, int]
    chunks: Mapping[str, ChunkBytes]
    shards_gradients: bool
    kept_buffers: int
    is_late: bool = False
    sending: int = 0
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
        """Yield each entry with the bytes by kind after it.

        Raises:
            ValueError: A precondition of an entry does not hold, such as a unit that runs and is not gathered.
        """
        yield from self._apply(_LedgerState(self))

    def _apply(self, state: "_LedgerState") -> Iterator[tuple[ProgramEntry, dict[str, int]]]:
        for number, entry in enumerate(self.entries):
            try:
                state.apply(entry)
            except ValueError as error:
                raise ValueError(f"entry {number}, {entry}: {error}; a bug of par-zero") from None
            yield entry, state.bytes()

    def end(self) -> HeldMemory:
        """Return the memory that stays allocated after the last entry, in which another step may start."""
        state = _LedgerState(self)
        for _ in self._apply(state):
            pass
        return state.held()

    def peak(self, *ops: str) -> dict[str, int]:
        """Return the bytes by kind at the entry with the largest sum of bytes.

        Gradients that autograd has just allocated count at the entry that copies them.

        Args:
            ops: Events and actions to consider, such as "C" and "gather". Default: all of them.
        """
        fullest = dict.fromkeys((UNITS, GRADIENTS, BUFFERS), 0)
        for entry, held in self.walk():
            if ops and entry.op not in ops:
                continue
            # Autograd's own gradients and the buffer exist at the same time during the copy, and only then.
            if entry.op == "C":
                held[GRADIENTS] += self.chunks[entry.of].arriving
            if sum(held.values()) > sum(fullest.values()):
                fullest = held
        return fullest


class _LedgerState:
    """The state between two entries: gathered units, gradients, buffers and reductions in flight."""

    def __init__(self, program: ZeroProgram) -> None:
        self._program, start = program, program.start
        self._whole: set[str] = set()
        self._stale: set[str] = set()  # units and chunks whose parameters were stepped, and not gathered since
        self._filled = set(start.filled)
        self._under_way: set[str] = set()
        self._fetched: set[str] = set()  # pieces that are in memory
        self._gradients, self._casts = set(start.gradients), set(start.casts)
        # The pools of a step make tensors by the same rule. Here a buffer is the number of its bytes.
        self._lent, self._received = BufferPool(int, int, start.lent), BufferPool(int, int, start.received)
        self._borrowed, self._receiving = dict(start.borrowed), dict[str, int]()
        self._sending: list[int] = []  # bytes of the sums that are copied to the host, in their order
        self._lent.total += sum(self._borrowed.values())

    def bytes(self) -> dict[str, int]:
        """Return the bytes by kind."""
        chunks, sharded = self._program.chunks, self._program.shards_gradients
        gradients = (chunks[name].shard if sharded else chunks[name].gradient for name in self._gradients)
        return {
            UNITS: sum(self._program.units[unit] for unit in self._whole),
            GRADIENTS: sum(gradients) + sum(chunks[name].cast for name in self._casts),
            BUFFERS: self._lent.total + self._received.total + sum(self._sending),
        }

    def held(self) -> HeldMemory:
        """Return the memory that stays allocated now."""
        return HeldMemory(
            gradients=frozenset(self._gradients),
            casts=frozenset(self._casts),
            filled=frozenset(self._filled),
            borrowed=self._borrowed,
            lent=tuple(sorted(self._lent.free)),
            received=tuple(sorted(self._received.free)),
        )

    def apply(self, entry: ProgramEntry) -> None:
        """Advance the state by one entry.

        Args:
            entry: Next entry of the program.
        """
        # `S` changes no memory: a `step` entry follows for each updated chunk or piece.
        if entry.op != "S":
            self._methods[entry.op](self, entry)

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

    def _fill(self, entry: ProgramEntry) -> None:
        _need(entry.of not in self._stale, "its parameters are out of date")
        if not self._program.shards_gradients:
            self._gradients.add(entry.of)
        elif entry.of not in self._borrowed:
            self._borrowed[entry.of] = self._lent.take(self._program.chunks[entry.of].gradient)
        self._filled.add(entry.of)

    def _begin(self, entry: ProgramEntry) -> None:
        _need(entry.of not in self._under_way, "it is under way already")
        _need(entry.of in self._filled, "it has no gradients")
        self._under_way.add(entry.of)
        self._gradients.add(entry.of)
        if entry.op == "scatter" and (received := self._program.chunks[entry.of].received):
            self._receiving[entry.of] = self._received.take(received)

    def _sum(self, entry: ProgramEntry) -> None:
        _need(entry.of in self._under_way, "it is not under way")
        self._under_way.remove(entry.of)
        if entry.of in self._receiving:
            self._received.free.append(self._receiving.pop(entry.of))
        if self._program.shards_gradients:
            self._lent.free.append(self._borrowed.pop(entry.of))
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
        # A late piece may have been fetched in the step before, which this program does not contain.
        _need(self._program.is_late or entry.of in self._fetched, "it is not in memory")

    def _step(self, entry: ProgramEntry) -> None:
        chunk = self._program.chunks.get(entry.of)  # None for a piece of a chunk, whose state is fetched
        if chunk is None:
            self._need_piece(entry)
        _need(entry.of not in self._under_way, "its sum is not there")
        # A freed unit cannot be out of date: its next gather reads the stepped shards.
        if chunk is not None and (chunk.unit is None or chunk.unit in self._whole):
            self._stale.add(chunk.unit or entry.of)

    def _send(self, entry: ProgramEntry) -> None:
        self._gradients.discard(entry.of)
        # The memory of a copy's source is free when the stream that computes has waited for the copy.
        if self._program.sending:
            self._sending.append(self._program.chunks[entry.of].shard)
            while sum(self._sending) > self._program.sending:
                self._sending.pop(0)

    def _end(self, _: ProgramEntry) -> None:
        _need(not self._under_way, "reductions are under way")

    def _release(self, _: ProgramEntry) -> None:
        self._lent.keep(self._program.kept_buffers)
        self._received.keep(self._program.kept_buffers)
        self._sending.clear()

    _methods: ClassVar[Mapping[str, Callable[["_LedgerState", ProgramEntry], None]]] = {
        **dict.fromkeys(("F", "R", "B"), _run),
        **dict.fromkeys(("C", "zero"), _fill),  # zeros take the same buffer as gradients
        **dict.fromkeys(("scatter", "reduce"), _begin),
        "gather": _gather,
        "free": _free,
        "sum": _sum,
        "send": _send,
        "release": _release,
        "E": _end,
        "cast": _cast,
        "drop": _drop,
        "fetch": _fetch,
        "evict": _evict,
        "step": _step,
    }


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
