"""The best choices of a layer, against every subset of its modules."""

from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given

from par_recompute import Choice, Made, Saved, frontier, kept

from ..tables import table, tables


def subsets(names):
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


@given(tables())
def test_no_subset_beats_the_frontier(table):
    choices = frontier(table, 1.0, bandwidth=1.0)
    assert choices[0] == Choice(frozenset(), kept(table, ()), 0.0) or choices[0].bytes < kept(table, ())
    for one, other in pairwise(choices):
        assert one.bytes > other.bytes
        assert one.seconds < other.seconds
    events = {event.module: event for event in table.events if isinstance(event, Made)}
    for names in subsets(table.candidates):
        seconds = sum(events[name].flops + events[name].moved for name in names)
        assert any(choice.bytes <= kept(table, names) and choice.seconds <= seconds for choice in choices)
    for choice in choices:
        assert kept(table, choice.dropped) == choice.bytes


def test_the_whole_layer_is_a_choice_unless_it_may_not_be():
    one = table((1, 10), [Made("norm", 0, (), 0, 5), Saved(1, (0,)), Saved(0, ())])
    wide = table((0, 10), [Saved(1, ())])
    assert [choice.dropped for choice in frontier(one, 1.0)] == [frozenset(), {"norm"}]
    assert [choice.dropped for choice in frontier(wide, 1.0)] == [frozenset(), {""}]
    assert [choice.dropped for choice in frontier(wide, 1.0, whole=False)] == [frozenset()]


def test_with_many_modules_the_best_are_added_one_by_one():
    events = []
    for number in range(20):
        events += [Made(f"m{number}", 0, (), number + 1, 0), Saved(number + 1, (2 * number,))]
    choices = frontier(table((0, *(10 for _ in range(20))), events), 1.0, whole=False)
    assert [choice.bytes for choice in choices] == list(range(200, -1, -10))
    assert choices[3].dropped == {"m0", "m1", "m2"}


def test_seconds_are_operations_and_bytes_by_their_rates():
    one = table((1, 10), [Made("fc", 0, (), 8, 6), Saved(1, (0,))])
    assert frontier(one, 4.0, bandwidth=2.0, whole=False)[-1].seconds == 8 / 4 + 6 / 2
    assert frontier(one, 4.0, whole=False)[-1].seconds == 8 / 4 + 6 / 0.04


@pytest.mark.parametrize("rates", [{"rate": 0.0}, {"rate": 1.0, "bandwidth": -1.0}])
def test_rates_are_above_zero(rates):
    with pytest.raises(ValueError, match="give what the device does in a second, above 0"):
        frontier(table((1,), []), **rates)
