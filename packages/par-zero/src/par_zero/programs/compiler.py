"""From the trace of a pass to its program. Pure arithmetic: it knows units by number, and nothing of torch."""

from collections.abc import Sequence

from .entries import BACKWARD, FORWARD, RECOMPUTE, PassEvent, PassProgram, PassSegment, UnitAction

ROOT = 0
"""Number of the unit that holds what belongs to no other: anybody may use it at any time, so it stays to the end."""


def compile_pass(trace: Sequence[PassEvent], outer: Sequence[frozenset[int]], start: frozenset[int]) -> PassProgram:
    """Return the program of a pass: each unit is freed when the next one begins, and gathered one unit ahead.

    At most three units are whole at a time: the root, the one that runs, and the next one.

    Args:
        trace: Events of the pass, in their order.
        outer: For each unit by number, the units around it, which are in use while it runs.
        start: Units that are whole when the pass begins, as after passes under `no_sync`.
    """
    whole, kept, begun = set(start), set(start), list[int]()
    segments = []
    for place, event in enumerate(trace):
        following = _next_unit(trace, place)
        actions = []
        if event.op == FORWARD:  # the backward before it, if there was one, has ended
            begun.clear()
        if not event.keeps:
            in_use = {ROOT, event.unit, following, *outer[event.unit]}
            freed = [unit for unit in over_at(event, sorted(whole), begun, kept) if unit not in in_use]
            actions += [UnitAction("free", unit) for unit in freed]
            whole.difference_update(freed)
            begun = [unit for unit in begun if unit not in freed]
        for unit in (event.unit, following):
            if unit is not None and unit not in whole:
                actions.append(UnitAction("gather", unit))
                whole.add(unit)
                if event.keeps:
                    kept.add(unit)
        if event.op == BACKWARD and event.unit not in begun:
            begun.append(event.unit)
        segments.append(PassSegment(tuple(actions), event))
    return PassProgram(tuple(segments))


def over_at(event: PassEvent, whole: Sequence[int], begun: Sequence[int], kept: set[int]) -> list[int]:
    """Return the units that nothing needs for now when an event comes, as far as they are not in use.

    Args:
        event: The event.
        whole: Units that are whole.
        begun: Units whose backward has begun in this pass.
        kept: Units that stay whole from earlier passes to their backward.
    """
    if event.op == FORWARD:
        return [unit for unit in whole if unit not in kept]
    # What is computed again within backward is needed by the backward that follows.
    return [] if event.op == RECOMPUTE else [unit for unit in begun if unit in whole]


def _next_unit(trace: Sequence[PassEvent], place: int) -> int | None:
    """The unit that is needed next beside the one at a place, but for the root, which is gathered once."""
    unit = trace[place].unit
    coming = (event.unit for event in trace[place + 1 :] if event.unit not in (unit, ROOT))
    return next(coming, None)


def find_event(segments: Sequence[PassSegment], event: PassEvent, at: int) -> int | None:
    """Return the place of an event in what is to come of a pass; None if it is not to come.

    A forward is not looked for behind a backward that reduces gradients: other ranks wait for those first.

    Args:
        segments: Segments of the pass.
        event: The event.
        at: Number of segments that are over.
    """
    for place in range(at, len(segments)):
        found = segments[place].event
        if found == event:
            return place
        if event.op == FORWARD and found.op == BACKWARD and not found.keeps:
            return None
    return None
