"""Placements: within the budget, with every unit, no worse than the simple ones, and the best where that is known."""

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_zero import Moment, Placement, Trace, ZeroProgram, place, register_policy, simulate
from par_zero.placement.policies import POLICIES
from par_zero.programs.ledger import ProgramEntry

from .cases import STEP, UNITS, backward, forward, least_moved, traces, training

POLICY = ("behind", "static", "next_use")
EQUAL = dict.fromkeys(UNITS, 10)
ROOM_FOR_12 = 120


def fetches(trace, policy, sizes=EQUAL, budget=ROOM_FOR_12):
    return sum(simulate(trace, sizes, place(trace, sizes, budget, policy)).fetched.values())


def moved(trace, sizes, budget, policy):
    ledger = simulate(trace, sizes, place(trace, sizes, budget, policy))
    assert not ledger.missing
    assert ledger.peak["device"] <= budget
    return sum(ledger.moved.values())


@register_policy("test: least recently used")
def lru(trace, sizes, budget):
    """What a cache does that knows nothing of what comes."""
    used: list[str] = []  # the latest last
    moves = []
    for moment in trace.moments:
        needed = [unit for unit in moment.needs if unit not in used]
        used = [unit for unit in used if unit not in moment.needs] + list(moment.needs)
        dropped = []
        while sum(sizes[unit] for unit in used) + moment.other > budget["device"]:
            dropped.append(used.pop(0))
        if moment.kind == "step":
            dropped, used = used, []
        moves.append((*((unit, "host") for unit in dropped), *((unit, "device") for unit in needed)))
    return Placement(home=dict.fromkeys(sizes, "host"), moves=tuple(moves))


@pytest.mark.parametrize(
    ("trace", "counts"),
    [
        (Trace(tuple(forward(*UNITS) * 2)), {"behind": 64, "test: least recently used": 64, "next_use": 52}),
        (training(), {"behind": 63, "test: least recently used": 52, "next_use": 52}),
        (training(microbatches=4), {"behind": 249, "test: least recently used": 172, "next_use": 172}),
    ],
    ids=["evaluated twice", "training", "four microbatches"],
)
def test_fetches_of_32_units_with_room_for_12(trace, counts):
    assert {policy: fetches(trace, policy) for policy in counts} == counts


def test_with_room_for_all_each_is_fetched_once_a_step_and_with_room_for_one_each_time():
    trace = training(microbatches=2)
    assert [fetches(trace, policy, budget=320) for policy in POLICY] == [125, 32, 32]
    assert [fetches(trace, policy, budget=10) for policy in POLICY] == [125, 125, 125]


@given(case=traces())
def test_no_policy_passes_the_budget_or_lacks_a_unit_and_what_looks_ahead_moves_least(case):
    behind, static, next_use = (moved(*case, policy) for policy in POLICY)
    assert next_use <= static <= behind


@given(case=traces(equal=True))
def test_of_units_of_one_size_nothing_moves_less_whatever_room_each_moment_has(case):
    assert moved(*case, "next_use") == least_moved(*case)


@given(case=traces())
def test_of_units_of_several_sizes_it_moves_hardly_more_than_the_least(case):
    """Of 20,000 such traces 14 moved more than the least, by 19 % at most; the least itself is NP-hard to find."""
    assert moved(*case, "next_use") <= 1.5 * least_moved(*case)


def test_activations_that_vary_leave_their_room_where_there_are_none():
    """Around the turn there is room for 3 units, elsewhere for 12: three of the turn are kept, or of the first."""
    low, high = UNITS[:16], UNITS[16:]
    turn = [*forward(*high, other=90), *backward(*high, other=90)]
    trace = Trace((*(forward(*low) + turn + backward(*low)) * 2, STEP))
    counts = {policy: fetches(trace, policy) for policy in POLICY}
    assert counts == {"behind": 125, "static": 123, "next_use": 110}


def test_a_budget_that_shrinks_moves_more_and_never_lacks_a_unit():
    counts = [fetches(training(), "next_use", budget=10 * room) for room in range(32, 0, -1)]
    assert counts == [32 + 32 - room for room in range(32, 0, -1)]


def test_a_unit_of_tied_parameters_stays_from_the_embedding_to_the_head_only_if_that_is_worth_it():
    trace = Trace((*forward("tied", *UNITS[:6], "tied"), *backward("tied", *UNITS[:6], "tied"), STEP))
    sizes = {**EQUAL, "tied": 40}
    wide, narrow = (simulate(trace, sizes, place(trace, sizes, budget)).fetched["tied"] for budget in (60, 50))
    assert (wide, narrow) == (1, 1)
    assert simulate(trace, sizes, place(trace, sizes, 40)).fetched["tied"] == 3


def test_what_runs_around_others_stays_while_they_run():
    inner = [Moment(kind="forward", unit=unit, held=("root",)) for unit in UNITS[:3]]
    trace = Trace((*forward("root"), *inner, STEP))
    sizes = {**EQUAL, "root": 5}
    for policy in POLICY:
        assert simulate(trace, sizes, place(trace, sizes, 15, policy)).fetched["root"] == 1
    with pytest.raises(ValueError, match="the budget of the device is 14 B, and 15 B are the least: 2 units 15 B"):
        place(trace, sizes, 14)


def test_an_evaluation_between_steps_leaves_its_last_units_to_the_training():
    trace = Trace((*forward(*UNITS), *training().moments))
    assert fetches(trace, "next_use") == 20 + 52
    assert fetches(trace, "behind") == 31 + 1 + 63


@given(traces(), st.sampled_from((*POLICY, "test: least recently used")))
def test_simulated_peak_equals_the_ledger(drawn, policy):
    trace, sizes, budget = drawn
    found, entries, needs = place(trace, sizes, budget, policy), [], []
    for moment, moves in zip(trace.moments, found.moves, strict=True):
        entries += [ProgramEntry("gather" if tier == "device" else "free", unit) for unit, tier in moves]
        needs += [0] * (len(entries) - len(needs))
        if moment.kind == "step":  # which frees what the policy has left
            gathered = Counter({entry.of: 0 for entry in entries})
            for entry in entries:
                gathered[entry.of] += {"gather": 1, "free": -1}.get(entry.op, 0)
            entries += [ProgramEntry("free", unit) for unit, count in gathered.items() if count]
        else:
            entries += [ProgramEntry("F", unit) for unit in moment.needs]
        needs += [moment.other] * (len(entries) - len(needs))
    program = ZeroProgram(entries=tuple(entries), units=sizes, chunks={}, shards_gradients=False, kept_buffers=0)
    held = [other + after["units"] for (_, after), other in zip(program.walk(), needs, strict=True)]
    others = [moment.other for moment in trace.moments]
    assert max([*held, *others]) == simulate(trace, sizes, found).peak["device"]


def test_two_orders_in_turn_are_one_trace():
    trace = Trace((*training(UNITS[:16]).moments, *training(UNITS[16:]).moments))
    assert fetches(trace, "next_use") == 2 * (16 + 4)


def test_a_unit_is_fetched_a_moment_before_it_is_needed_where_there_is_room():
    trace = training(UNITS[:3])
    placement = place(trace, dict.fromkeys(UNITS[:3], 10), 20)
    assert placement.moves[0] == (("h.0", "device"), ("h.1", "device"))
    assert placement.moves[1] == (("h.0", "host"), ("h.2", "device"))
    tight = place(trace, dict.fromkeys(UNITS[:3], 10), 10)
    assert tight.moves[1] == (("h.0", "host"), ("h.1", "device"))


def test_units_lie_in_the_quickest_tier_that_has_room_those_that_are_fetched_most_first():
    trace = Trace((*forward("a", "b", "a", "c", "a"), STEP))
    sizes = {"a": 10, "b": 10, "c": 10}
    placement = place(trace, sizes, {"device": 10, "host": 20, "disk": 20}, "behind")
    assert placement.home == {"a": "host", "b": "host", "c": "disk"}
    ledger = simulate(trace, sizes, placement)
    assert ledger.moved == {("host", "device"): 40, ("disk", "device"): 10}
    assert ledger.peak == {"host": 20, "disk": 10, "device": 10}


def test_four_thousand_moments_are_placed_at_once():
    """In seconds of this process, whatever else the machine does: 0.3 measured, and minutes by the square."""
    trace = training(microbatches=62)
    sizes = {unit: 10 + number for number, unit in enumerate(UNITS)}
    begun = time.process_time()
    place(trace, sizes, 300)
    assert len(trace.moments) == 3969
    assert time.process_time() - begun < 60


def test_an_empty_trace_moves_nothing():
    assert place(Trace(()), EQUAL, 0).moves == ()


@pytest.mark.parametrize(
    ("budget", "error", "words"),
    [
        (
            9,
            ValueError,
            "the budget of the device is 9 B, and 10 B are the least: one unit 10 B, other 0 B .moment 0, "
            "forward of 'h.0'.; give more, or make units smaller",
        ),
        ({"host": 10}, ValueError, r"budget is \{'host': 10\}, without the device; give its bytes"),
        ({"device": 10, "tape": 10}, ValueError, "budget has 'tape'; it can have device, host, disk"),
        ("80 apples", ValueError, "budget='80 apples': a size is a number and one of B, KB"),
        (None, TypeError, "budget=None: a size is bytes or a text; pass a number such as 5_000_000, or '80GB'"),
        ({"device": 20, "host": 100}, ValueError, "the budget has 100 B of the host, and all units have 320 B"),
    ],
)
def test_budgets_that_are_refused(budget, error, words):
    with pytest.raises(error, match=words):
        place(training(), EQUAL, budget)


def test_units_and_policies_that_are_refused():
    with pytest.raises(ValueError, match=r"sizes have no 'h\.1', which the trace needs; give the bytes of every unit"):
        place(training(), {"h.0": 1}, 10)
    with pytest.raises(ValueError, match=r"sizes\['h\.0'\] is -1 bytes; give 0 or more"):
        place(Trace(()), {"h.0": -1}, 10)
    with pytest.raises(ValueError, match="no policy is called 'next'; did you mean 'next_use'"):
        place(training(), EQUAL, ROOM_FOR_12, "next")
    with pytest.raises(
        ValueError, match="moves of 0 moments, and the trace has 65; give the trace that it was made of"
    ):
        simulate(training(), EQUAL, Placement(home={}, moves=()))
    with pytest.raises(ValueError, match="the policy 'static' is registered twice, by"):
        register_policy("static")(lru)


@pytest.mark.parametrize(
    ("fetched", "words"),
    [
        ((), "the policy 'test: wrong' lacks a unit at moment 0, forward of 'h.0'; have it fetch what a moment needs"),
        (UNITS, "the policy 'test: wrong' takes 320 B of the device, whose budget is 120 B; have it keep less"),
    ],
)
def test_a_policy_of_somebody_else_is_checked(monkeypatch, fetched, words):
    def wrong(trace, sizes, budget):
        first = tuple((unit, "device") for unit in fetched)
        return Placement(home=dict.fromkeys(sizes, "host"), moves=(first, *[()] * (len(trace.moments) - 1)))

    monkeypatch.setitem(POLICIES._entries, "test: wrong", wrong)
    with pytest.raises(ValueError, match=words):
        place(training(), EQUAL, ROOM_FOR_12, "test: wrong")
