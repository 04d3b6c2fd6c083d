"""Spending a budget: the best there is, by brute force."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_plan.budget.savings import EXACT, Saving, spend

SIZES = st.integers(0, 40)
ITEMS = st.lists(st.tuples(SIZES, SIZES), max_size=12)


def items_of(pairs):
    return [Saving(str(number), size, seconds) for number, (size, seconds) in enumerate(pairs)]


def best(items, budget):
    return max(
        sum(item.seconds for item in chosen)
        for count in range(len(items) + 1)
        for chosen in itertools.combinations(items, count)
        if sum(item.bytes for item in chosen) <= budget
    )


@given(ITEMS.filter(lambda pairs: len(pairs) <= 8), st.integers(0, 200))
def test_no_other_choice_saves_more(pairs, budget):
    items = items_of(pairs)
    chosen = spend(items, budget)
    assert sum(item.bytes for item in chosen) <= budget
    assert sum(item.seconds for item in chosen) == best(items, budget)
    assert chosen == [item for item in items if item in chosen], "in the order of the items"


def test_of_twelve_items_no_other_choice_saves_more():
    pairs = [(7 * n % 31 + 3, 11 * n % 29 + 1) for n in range(12)]
    items = items_of(pairs)
    for budget in range(0, sum(size for size, _ in pairs) + 5, 9):
        assert sum(item.seconds for item in spend(items, budget)) == best(items, budget), budget


@given(st.lists(st.tuples(st.integers(1, 40), SIZES), min_size=EXACT + 1, max_size=60), st.integers(0, 900))
def test_of_many_items_it_is_within_one_item_of_the_best(pairs, budget):
    """The best is no more than what parts of items could save: the best first, and of the last one a part."""
    items = items_of(pairs)
    bound, left = 0.0, budget
    for item in sorted(items, key=lambda item: -item.seconds / item.bytes):
        part = min(1.0, left / item.bytes)
        bound, left = bound + part * item.seconds, left - part * item.bytes
    saved = sum(item.seconds for item in spend(items, budget))
    assert sum(item.bytes for item in spend(items, budget)) <= budget
    assert bound - max(item.seconds for item in items) <= saved <= bound + 1e-6


def test_thousands_of_items_take_no_time():
    assert len(spend([Saving(str(n), 1e6 + n, 1e-3 + n) for n in range(20_000)], 5e9)) > 4000


@pytest.mark.parametrize("wrong", [lambda: spend([], -1), lambda: Saving("a", -1, 0), lambda: Saving("a", 0, -1)])
def test_what_is_below_0_is_refused(wrong):
    with pytest.raises(ValueError, match="give 0 or more"):
        wrong()
