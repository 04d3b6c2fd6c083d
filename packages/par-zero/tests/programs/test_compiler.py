"""Programs of passes as pure data: what is whole when, and where an event is found."""

from hypothesis import given
from hypothesis import strategies as st

from par_zero.programs.compiler import ROOT, compile_pass, find_event, place_reductions
from par_zero.programs.entries import PassEvent, PassProgram, digest_of

FLAT = [frozenset()] + [frozenset({ROOT})] * 5
EVENTS = st.builds(PassEvent, st.sampled_from("FRB"), st.integers(0, 5), st.booleans())


def text_of(program):
    found = []
    for actions, event in zip(program.actions, program.trace, strict=True):
        found += [f"{action.op}:{action.of}" for action in actions]
        found.append(f"{event.op}:{event.unit}")
    return " ".join(found)


def trace_of(text, *, keeps=False):
    return [PassEvent(op, int(unit), keeps) for op, unit in (each.split(":") for each in text.split())]


def test_a_step_gathers_one_unit_ahead_and_keeps_the_last_two_for_backward():
    trace = trace_of("F:0 F:1 F:2 F:3 B:0 B:3 B:2 B:1")
    expected = "gather:0 gather:1 F:0 gather:2 F:1 free:1 gather:3 F:2 F:3 B:0 B:3 free:3 gather:1 B:2 free:2 B:1"
    assert text_of(compile_pass(trace, FLAT, frozenset())) == expected


def test_recomputed_units_stay_until_their_own_backward():
    trace = trace_of("F:1 F:2 F:3 R:1 R:2 B:2 B:1")
    expected = "gather:1 gather:2 F:1 free:1 gather:3 F:2 free:2 gather:1 F:3 gather:2 R:1 R:2 B:2 free:2 B:1"
    assert text_of(compile_pass(trace, FLAT, frozenset())) == expected


def test_what_no_sync_keeps_is_freed_in_backward_alone():
    trace = [*trace_of("F:1 F:2 B:2 B:1", keeps=True), *trace_of("F:1 F:2 B:2 B:1")]
    assert text_of(compile_pass(trace, FLAT, frozenset())) == "gather:1 gather:2 F:1 F:2 B:2 B:1 F:1 F:2 B:2 free:2 B:1"


def reduced(text, *, outer=FLAT):
    return text_of(place_reductions(without_actions(trace_of(text)), outer, CHUNKS))


def without_actions(trace):
    return PassProgram(tuple(trace), ((),) * len(trace))


CHUNKS = [[9], [1], [2, 20], [3], [4], [5]]


def test_chunks_are_reduced_before_the_event_after_their_backward():
    expected = "F:0 F:1 F:2 F:3 B:0 B:3 reduce:3 B:2 reduce:2 reduce:20 B:1"
    assert reduced("F:0 F:1 F:2 F:3 B:0 B:3 B:2 B:1") == expected


def test_unit_that_runs_twice_is_reduced_after_its_last_backward():
    assert reduced("B:2 B:1 R:2 B:2 B:3") == "B:2 B:1 reduce:1 R:2 B:2 reduce:2 reduce:20 B:3"


def test_outer_unit_is_reduced_after_the_units_within_it():
    outer = [frozenset(), frozenset({ROOT, 2}), *FLAT[2:]]
    assert reduced("B:2 B:1 B:3", outer=outer) == "B:2 B:1 reduce:2 reduce:20 reduce:1 B:3"


@given(trace=st.lists(EVENTS, max_size=40))
def test_every_chunk_is_reduced_at_most_once(trace):
    program = place_reductions(without_actions(trace), FLAT, CHUNKS)
    found = [number for numbers in program.reductions for number in numbers]
    assert len(found) == len(set(found))
    assert program.trace == tuple(trace)


@given(trace=st.lists(EVENTS, max_size=40), start=st.frozensets(st.integers(0, 5)))
def test_every_unit_is_whole_when_its_event_comes(trace, start):
    whole = set(start)
    for actions, event in zip(compile_pass(trace, FLAT, start).actions, trace, strict=True):
        for op, unit in actions:
            assert (unit in whole) == (op == "free")
            whole ^= {unit}
        assert event.unit in whole


@given(trace=st.lists(st.builds(lambda unit: PassEvent("F", unit), st.integers(0, 5)), max_size=40))
def test_a_forward_has_the_root_and_two_units_whole_at_most(trace):
    whole = set()
    for actions in compile_pass(trace, FLAT, frozenset()).actions:
        for op, unit in actions:
            whole = whole - {unit} if op == "free" else whole | {unit}
        assert len(whole - {ROOT}) <= 2


@given(trace=st.lists(EVENTS, max_size=20), event=EVENTS, at=st.integers(0, 20))
def test_a_forward_is_not_found_behind_a_backward_that_reduces(trace, event, at):
    place = find_event(trace, event, at)
    assert place is None or (place >= at and trace[place] == event)
    passed = trace[at:] if place is None else trace[at:place]
    reduces = any(each.op == "B" and not each.keeps for each in passed)
    if place is None:
        assert event not in trace[at:] or (event.op == "F" and reduces)
    else:
        assert not (event.op == "F" and reduces)


@given(first=st.lists(EVENTS, max_size=10), second=st.lists(EVENTS, max_size=10))
def test_digests_of_different_traces_differ(first, second):
    assert (digest_of(first) == digest_of(second)) == (first == second)
