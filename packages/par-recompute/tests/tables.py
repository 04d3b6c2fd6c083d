"""Tables of layers, made by hand and drawn by chance."""

from hypothesis import strategies as st

from par_recompute import Made, Module, Saved, Table

MODULE = Module(flops=0, moved=1, obstacle=None)


def table(sizes, events, inputs=(0,)):
    names = {"": MODULE, **{event.module: MODULE for event in events if isinstance(event, Made)}}
    return Table(sizes=sizes, inputs=frozenset(inputs), events=tuple(events), modules=names, flops=10, moved=10)


@st.composite
def tables(draw):
    """Tables of modules that each make a storage out of an earlier one; some save it themselves, some have it saved."""
    sizes = draw(st.lists(st.integers(0, 50), min_size=2, max_size=8))
    events, maker = [], {}
    for output in range(1, len(sizes)):
        source = draw(st.integers(0, output - 1))
        if draw(st.booleans()):
            events.append(Saved(output, ()))
        made = Made(f"m{output}", source, maker.get(source, ()), draw(st.integers(0, 20)), 1)
        maker[output] = (len(events),)
        events.append(made)
        if draw(st.booleans()):
            events.append(Saved(output, maker[output]))
    return table(tuple(sizes), events)
