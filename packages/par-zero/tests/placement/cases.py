"""Traces that the tests of placements share, and the least that any placement can move, by trying all."""

from itertools import combinations

from hypothesis import strategies as st

from par_zero import Moment, Trace

STEP = Moment(kind="step")
UNITS = tuple(f"h.{number}" for number in range(32))


def forward(*units, other=0):
    return [Moment(kind="forward", unit=unit, other=other) for unit in units]


def backward(*units, other=0):
    return [Moment(kind="backward", unit=unit, other=other) for unit in reversed(units)]


def training(units=UNITS, microbatches=1):
    return Trace((*(forward(*units) + backward(*units)) * microbatches, STEP))


@st.composite
def traces(draw, units=5, moments=14, equal=False):
    """A trace, sizes, and a budget in which it fits, but not all that it would like to keep."""
    names = UNITS[: draw(st.integers(1, units))]
    size = st.just(1) if equal else st.integers(1, 8)
    sizes = {name: draw(size) for name in names}
    unit = st.builds(
        Moment,
        kind=st.sampled_from(("forward", "backward")),
        unit=st.sampled_from(names),
        other=st.integers(0, 3 if equal else 6),
        held=st.lists(st.sampled_from(names), max_size=1).map(tuple),
    )
    made = draw(st.lists(st.one_of(*[unit] * 8, st.just(STEP)), min_size=1, max_size=moments))
    least = max(moment.other + sum(sizes[name] for name in moment.needs) for moment in made)
    return Trace(tuple(made)), sizes, least + draw(st.integers(0, 3 if equal else 12))


def least_moved(trace, sizes, budget):
    """The fewest bytes that anything can move which keeps within the budget: all that may be kept is tried."""
    cheapest = {frozenset(): 0}  # by what is on the device
    for moment in trace.moments:
        needed = frozenset(moment.needs)
        after: dict[frozenset[str], int] = {}
        for there, moved in cheapest.items():
            if moment.kind == "step":
                after[frozenset()] = min(moved, after.get(frozenset(), moved))
                continue
            total = moved + sum(sizes[unit] for unit in needed - there)
            others = there - needed
            for count in range(len(others) + 1):
                for kept in combinations(sorted(others), count):
                    held = needed.union(kept)
                    if moment.other + sum(sizes[unit] for unit in held) <= budget:
                        after[held] = min(total, after.get(held, total))
        cheapest = after
    return min(cheapest.values())
