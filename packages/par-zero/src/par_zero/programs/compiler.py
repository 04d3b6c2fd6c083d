"""The compiler of a trace into the program of a pass. Pure arithmetic on unit numbers, without torch."""

from collections.abc import Sequence
from dataclasses import replace

from .entries import BACKWARD, FORWARD, RECOMPUTE, PassAction, PassEvent, PassProgram

ROOT = 0
"""Number of the unit with the parameters of no other unit. Any code may use them, so it stays to the end of a pass."""


def compile_pass(
    trace: Sequence[PassEvent], outer: Sequence[frozenset[int]], start: frozenset[int], *, prefetches: bool = True
) -> PassProgram:
    """Return the program of a pass. It gathers each unit one unit ahead, and frees it when the next unit begins.

    At most three units are gathered at a time: the root, the unit that runs, and the next unit.

    Args:
        trace: Events of the pass, in order.
        outer: Sets of unit numbers, one per unit: the units around it, which are in use while it runs.
        start: Numbers of the units that are gathered when the pass begins, such as after passes under `no_sync`.
        prefetches: Whether a unit is gathered before the event of the unit before it. False: as in a pass that follows
            no program. Default: True.
    """
    whole, kept, begun = set(start), set(start), list[int]()
    compiled = []
    for place, event in enumerate(trace):
        following = _next_unit(trace, place) if prefetches else None
        actions = list[PassAction]()
        if event.op == FORWARD:  # the backward before this forward has ended
            begun.clear()
        if not event.keeps:
            # The next unit stays even if nothing needs it now: the last two units of forward begin backward.
            in_use = {ROOT, event.unit, following, *outer[event.unit]}
            freed = [unit for unit in over_at(event, sorted(whole), begun, kept) if unit not in in_use]
            actions += [PassAction("free", unit) for unit in freed]
            whole.difference_update(freed)
            begun = [unit for unit in begun if unit not in freed]
        for unit in (event.unit, following):
            if unit is not None and unit not in whole:
                actions.append(PassAction("gather", unit))
                whole.add(unit)
                if event.keeps:
                    kept.add(unit)
        if event.op == BACKWARD and event.unit not in begun:
            begun.append(event.unit)
        compiled.append(tuple(actions))
    return PassProgram(tuple(trace), tuple(compiled), start)


def place_reductions(
    program: PassProgram, outer: Sequence[frozenset[int]], chunks: Sequence[Sequence[int]]
) -> PassProgram:
    """Return a program that also reduces the chunks of each unit, before the event that follows its backward.

    Backward has then finished for the unit, because autograd runs calls in the opposite order of forward. The chunks of
    the root and of units without a backward are reduced at the end of the pass.

    Args:
        program: Program of a pass.
        outer: Sets of unit numbers, one per unit: the units around it.
        chunks: Numbers of the trained chunks of each unit.
    """
    last = {event.unit: place for place, event in enumerate(program.trace) if event.op != FORWARD}
    compiled, open_units = [], list[int]()
    for place, (event, actions) in enumerate(zip(program.trace, program.actions, strict=True)):
        # The backward of a unit goes on while that of a unit within it begins.
        over = [unit for unit in open_units if unit != event.unit and unit not in outer[event.unit]]
        open_units = [unit for unit in open_units if unit not in over]
        if last.get(event.unit) == place and event.unit != ROOT:
            open_units.append(event.unit)
        reduced = tuple(PassAction("reduce", number) for unit in over for number in chunks[unit])
        # Reductions come first: a gather may wait for memory that they free, and other ranks may wait for them.
        compiled.append((*reduced, *actions))
    return replace(program, actions=tuple(compiled))


def over_at(event: PassEvent, whole: Sequence[int], begun: Sequence[int], kept: set[int]) -> list[int]:
    """Return the units that may be freed at an event. The caller excludes the units in use.

    Args:
        event: Event that begins.
        whole: Numbers of the gathered units.
        begun: Numbers of the units whose backward has begun in this pass.
        kept: Numbers of the units that stay gathered from earlier passes to their backward.
    """
    if event.op == FORWARD:
        return [unit for unit in whole if unit not in kept]
    # The backward that follows a recomputation needs the recomputed units.
    return [] if event.op == RECOMPUTE else [unit for unit in begun if unit in whole]


def _next_unit(trace: Sequence[PassEvent], place: int) -> int | None:
    """Return the next unit of a trace that differs from the unit at `place`. Skip the root, which is gathered once."""
    unit = trace[place].unit
    coming = (event.unit for event in trace[place + 1 :] if event.unit not in (unit, ROOT))
    return next(coming, None)


def find_event(trace: Sequence[PassEvent], event: PassEvent, at: int) -> int | None:
    """Return the index of an event in the rest of a program. Return None if the rest does not contain it.

    The search for a forward stops at a backward that reduces gradients.

    Args:
        trace: Events of the program.
        event: Event to find.
        at: Number of events that have passed.
    """
    for place in range(at, len(trace)):
        found = trace[place]
        if found == event:
            return place
        # The other ranks wait in that backward for this rank's gradients, so this rank must not pass it in forward.
        if event.op == FORWARD and found.op == BACKWARD and not found.keeps:
            return None
    return None
