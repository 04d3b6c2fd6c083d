"""The programs of the first steps of a module that has not run yet. Pure arithmetic.

The trace is the registration order of the units: forward goes down, and backward and the gradients come up. It is
compiled like the trace of a pass that has run. The ledger then gives the bytes of each step before the first one.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..layout.units import RegisteredUnit
from .compiler import ROOT, compile_pass, place_reductions
from .entries import BACKWARD, FORWARD, PassEvent, PassProgram
from .ledger import HeldMemory, ProgramEntry, ZeroProgram


@dataclass(frozen=True, kw_only=True)
class RegisteredModel:
    """A sharded module that has not run yet.

    Args:
        sizes: Program without entries, whose chunks are in the order of their reductions.
        units: Units at stage 3, by number; empty below stage 3.
        optimizers: For each optimizer the names of its chunks, each with the names of its pieces. A chunk without
            pieces is updated as one.
        inflight: Largest number of chunks whose reductions are in flight. None: any number.
        gathers_after_step: Whether a step gathers the updated parameters, as at stages 1 and 2.
        waits: Whether chunks are reduced only when backward ends, below stage 3. Default: False.
    """

    sizes: ZeroProgram
    units: Sequence[RegisteredUnit]
    optimizers: Sequence[Mapping[str, Sequence[str]]]
    inflight: int | None
    gathers_after_step: bool
    waits: bool = False

    @property
    def trained(self) -> list[str]:
        """Names of the chunks that have gradients."""
        return [name for name, chunk in self.sizes.chunks.items() if chunk.gradient]


def predict_steps(
    model: RegisteredModel, *, passes: Sequence[bool] = (True,), accumulates: bool = False
) -> list[ZeroProgram]:
    """Return the programs of the first steps, until a step starts with the same memory as an earlier one.

    Each pass is one forward and one backward, in which every trained parameter gets its gradient. The last program is
    that of all later steps.

    Without a bound of the reductions in flight, no program says when a reduction ends: its memory counts until backward
    ends, and the buffers that a step finds are as large as any chunk. The bytes are then an upper bound.

    Args:
        model: Module, with its optimizers.
        passes: For each pass of a step, whether it reduces gradients. Passes under `no_sync` do not, and keep units
            gathered. Default: one pass, which reduces them.
        accumulates: Whether the gradients of a step are still there in the next one. Default: False, they are dropped
            between steps.
    """
    step = [entry for number, chunks in enumerate(model.optimizers) for entry in _step(model, number, chunks)]
    learned, start = set[bool](), HeldMemory()
    found: list[ZeroProgram] = []
    while not found or start not in [program.start for program in found[1:]]:
        kept = start if accumulates else replace(start, gradients=frozenset(), casts=frozenset())
        entries = [ProgramEntry("drop", name) for name in model.trained if name in start.casts - kept.casts]
        whole, summed, cast = frozenset[int](), set(kept.gradients), set(kept.casts)
        for reduces in passes:
            program = _program_of(model, whole, keeps=not reduces, is_learned=reduces in learned)
            # A pass follows the program of an earlier pass of its kind.
            learned.add(reduces)
            entries += _entries(model, program, whole, reduces=reduces, summed=summed, cast=cast)
            whole = frozenset[int]()
            if reduces:
                summed.update(model.trained)
                cast.update(model.trained)
            else:
                whole = frozenset(number for number, unit in enumerate(model.units) if unit.modules)
        found.append(replace(model.sizes, entries=(*entries, *step), start=start))
        start = _held_after(model, found[-1])
    return found


def _program_of(model: RegisteredModel, start: frozenset[int], *, keeps: bool, is_learned: bool) -> PassProgram:
    """Return the program of one pass.

    Args:
        model: Module.
        start: Numbers of the units that are gathered when the pass begins.
        keeps: Whether units stay gathered, as under `no_sync`.
        is_learned: Whether the ranks have recorded such a pass before, whose program this pass follows.
    """
    trace = [event._replace(keeps=keeps) for event in _trace_of(model.units)] if model.units else []
    outer = [unit.outer for unit in model.units]
    # The ranks compare before each gather of a pass that follows no program, and so prefetch no unit.
    if not is_learned:
        return compile_pass(trace, outer, start, prefetches=False)
    numbers = {name: number for number, name in enumerate(model.trained)}
    chunks = [[numbers[name] for name in numbers if model.sizes.chunks[name].unit == unit.name] for unit in model.units]
    return place_reductions(compile_pass(trace, outer, start), outer, chunks)


def _trace_of(units: Sequence[RegisteredUnit]) -> list[PassEvent]:
    """Return the events of a forward and a backward. A unit begins before the units within it, in both."""
    within: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        if unit.outer:
            # The innermost unit around it is the one that is itself within the others.
            within.setdefault(max(unit.outer, key=lambda other: len(units[other].outer)), []).append(number)

    def backward(number: int) -> Iterator[int]:
        yield number
        for inner in reversed(within.get(number, [])):
            yield from backward(inner)

    forward = [PassEvent(FORWARD, number) for number, unit in enumerate(units) for _ in range(unit.modules)]
    return forward + [PassEvent(BACKWARD, number) for number in backward(ROOT) for _ in range(units[number].modules)]


class ReductionQueue:
    """The reductions of a pass, in their order.

    Args:
        model: Module.
        order: Names of all trained chunks, in the order of their reductions.
        summed: Names of the chunks that have sums of earlier passes, to which this pass adds its own.
    """

    def __init__(self, model: RegisteredModel, order: Sequence[str], summed: Container[str] = ()) -> None:
        self._chunks, self._inflight, self._order = model.sizes.chunks, model.inflight, list(order)
        self._summed = summed
        self._due, self._taken, self._under_way = set[str](), set[str](), list[str]()

    def take(self, name: str) -> Iterator[ProgramEntry]:
        """Take the gradients of a chunk. If it is reduced next, it may use the buffer of a finished reduction."""
        if name == self._order[0]:
            yield from self._make_room()
        yield ProgramEntry("C", name)
        self._taken.add(name)

    def begin(self, due: Iterable[str]) -> Iterator[ProgramEntry]:
        """Begin the reductions that are next in the order and due, also those that were due before."""
        self._due.update(due)
        while self._order and self._order[0] in self._due:
            name = self._order[0]
            if name not in self._taken:
                yield from self.take(name)
            yield from self._make_room()
            in_place = self._chunks[name].is_pair and name not in self._summed
            yield ProgramEntry("reduce" if in_place else "scatter", name)
            self._under_way.append(self._order.pop(0))

    def take_rest(self) -> Iterator[ProgramEntry]:
        """Take the gradients of all other chunks, which stay until a later pass reduces them."""
        for name in self._order:
            if name not in self._taken:
                yield from self.take(name)

    def finish(self) -> Iterator[ProgramEntry]:
        """Wait for all reductions."""
        while self._under_way:
            yield from self._sum()

    def _make_room(self) -> Iterator[ProgramEntry]:
        while self._inflight is not None and len(self._under_way) >= self._inflight:
            yield from self._sum()

    def _sum(self) -> Iterator[ProgramEntry]:
        name = self._under_way.pop(0)
        yield ProgramEntry("sum", name)
        if self._chunks[name].is_written:
            yield ProgramEntry("send", name)


def _entries(
    model: RegisteredModel,
    program: PassProgram,
    start: Container[int],
    *,
    reduces: bool,
    summed: Container[str],
    cast: Container[str],
) -> Iterator[ProgramEntry]:
    """Yield the entries of a pass.

    Args:
        model: Module.
        program: Gathers, frees and reductions at stage 3; without events below stage 3. Without reductions, the ranks
            compare before each gather which chunks have all gradients, and reduce these.
        start: Numbers of the units that are gathered when the pass begins.
        reduces: Whether the pass reduces gradients. If not, units stay gathered.
        summed: Names of the chunks that have sums of earlier passes.
        cast: Names of the chunks whose gradients have memory of the optimizer's own.
    """
    names, chunks, trained = [unit.name for unit in model.units], model.sizes.chunks, model.trained
    order, early = _order_of(model, program)
    queue, compares = ReductionQueue(model, order, summed), not any(program.reductions)
    left = {unit.name: unit.modules for unit in model.units}  # modules whose backward has not begun
    whole, complete = {name for number, name in enumerate(names) if number in start}, list[str]()
    for place, (event, actions) in enumerate(zip((*program.trace, None), (*program.actions, ()), strict=True)):
        for action in actions:
            if action.op == "reduce":
                yield from queue.begin([trained[action.of]] if reduces else ())
                continue
            if action.op == "gather" and compares and reduces:
                yield from queue.begin(complete)
            yield ProgramEntry(action.op, names[action.of])
            (whole.remove if action.op == "free" else whole.add)(names[action.of])
        if event is not None:
            yield ProgramEntry(event.op, names[event.unit])
            left[names[event.unit]] -= event.op == BACKWARD
        # Below stage 3 no event says when backward begins for a module, so all chunks follow here.
        while len(complete) < len(trained) and not left.get(chunks[trained[len(complete)]].unit or "", 0):
            name = trained[len(complete)]
            complete.append(name)
            # With a bound, only the program may wait for the reduction whose buffer the chunk uses.
            if not names or model.inflight is None:
                yield from queue.take(name)
            if reduces and name in early[place]:
                yield from queue.begin([name])
    if reduces:
        yield from queue.begin(trained)
        yield from queue.finish()
    else:
        yield from queue.take_rest()
    yield ProgramEntry("release")
    if reduces:
        # Tensors are assembled when all units were freed, optimizer by optimizer.
        stepped = [name for own in model.optimizers for name in own if chunks[name].is_assembled]
        created = [name for name in trained if not chunks[name].is_assembled]
        yield from (ProgramEntry("cast", name) for name in created if chunks[name].cast and name not in cast)
        yield from (ProgramEntry("free", name) for name in names if name in whole)
        yield from (ProgramEntry("cast", name) for name in stepped if chunks[name].cast and name not in cast)
    yield ProgramEntry("E")


def _order_of(model: RegisteredModel, program: PassProgram) -> tuple[list[str], list[set[str]]]:
    """Return the chunks in the order of their reductions, and those that may begin early behind each event."""
    trained = model.trained
    if not model.units:
        return trained, [set(() if model.waits else trained)]
    placed = [{trained[number] for number in each} for each in program.reductions]
    first = [trained[number] for each in program.reductions for number in each]
    # Any code may use the parameters of the root, so its chunks are reduced last.
    root, rest = model.units[ROOT].name, [name for name in trained if name not in first]
    rest.sort(key=lambda name: model.sizes.chunks[name].unit == root)
    # A chunk that the program reduces next may begin before its place, and behind the last event any chunk.
    return [*first, *rest], [*placed[1:], *[set(trained if first else ())] * 2]


def _step(model: RegisteredModel, number: int, chunks: Mapping[str, Sequence[str]]) -> Iterator[ProgramEntry]:
    """Yield the entries of an optimizer's step."""
    yield ProgramEntry("S", str(number))
    pieces = [piece for names in chunks.values() for piece in names]
    # A thread updates the pieces in the order in which the next forward waits for them.
    for piece in reversed(pieces) if model.sizes.is_late else pieces:
        yield from (ProgramEntry(op, piece) for op in ("fetch", "step", "evict"))
    yield from (ProgramEntry("step", name) for name, names in chunks.items() if not names)
    # Forward reads the chunks in the opposite order of their gradients.
    yield from (ProgramEntry("gather", name) for name in reversed(list(chunks)) if model.gathers_after_step)
    yield ProgramEntry("E")


def _held_after(model: RegisteredModel, program: ZeroProgram) -> HeldMemory:
    """Return the memory after a step. Without a bound, any chunk may have returned its buffer last."""
    held = program.end()
    if model.inflight is not None:
        return held

    def largest(sizes: Sequence[int]) -> tuple[int, ...]:
        return (max(sizes, default=0),) * min(program.kept_buffers, len(sizes))

    # Two ranks sum in place, but not if they add to the sum of an earlier pass.
    scattered = {entry.of for entry in program.entries if entry.op == "scatter"}
    received = [program.chunks[name].received for name in model.trained if name in scattered]
    lent = [program.chunks[name].gradient for name in model.trained] if program.shards_gradients else []
    return replace(held, lent=largest(lent), received=largest([size for size in received if size]))
