"""One choice a layer within a budget, against every combination."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_recompute import Choice, knapsack

CHOICES = st.lists(
    st.builds(Choice, st.just(frozenset()), st.integers(0, 900), st.integers(0, 50).map(float)), min_size=1, max_size=5
)


@given(st.lists(CHOICES, min_size=1, max_size=4), st.integers(0, 2000))
def test_it_is_the_best_combination(frontiers, budget):
    # Whole numbers are summed, so seconds are exact.
    fitting = [some for some in product(*frontiers) if sum(choice.bytes for choice in some) <= budget]
    if not fitting:
        least = sum(min(choice.bytes for choice in choices) for choices in frontiers)
        with pytest.raises(ValueError, match=rf"and {least} bytes"):
            knapsack(frontiers, budget)
        return
    chosen = knapsack(frontiers, budget)
    assert all(choice in choices for choice, choices in zip(chosen, frontiers, strict=True))
    assert sum(choice.bytes for choice in chosen) <= budget
    assert sum(choice.seconds for choice in chosen) == min(sum(choice.seconds for choice in some) for some in fitting)


LAYER = [
    Choice(frozenset(), 7_919_000_001, 0.0),
    Choice(frozenset("a"), 5_000_000_019, 1.0),
    Choice(frozenset("b"), 10, 5.0),
]


def test_large_sizes_without_a_common_divisor_stay_within_the_budget():
    layers, most = [LAYER] * 200, 200 * 7_919_000_001
    for part in range(20):
        budget = 2_000 + most * part // 19
        chosen = knapsack(layers, budget)
        assert sum(choice.bytes for choice in chosen) <= budget
        # What rounding costs is under one layer's worth in each hundred.
        linear = 1_000 * (1 - budget / most)
        assert sum(choice.seconds for choice in chosen) <= linear + 10
    assert {choice.seconds for choice in chosen} == {0.0}


def test_the_least_is_enough_and_a_byte_less_is_not():
    assert [choice.bytes for choice in knapsack([LAYER, LAYER], 20)] == [10, 10]
    with pytest.raises(ValueError, match=r"the budget is 19 bytes \(19 B\), and 20 bytes \(20 B\) are the least"):
        knapsack([LAYER, LAYER], 19)


def test_no_layers_need_nothing_and_a_layer_needs_a_choice():
    assert knapsack([], 0) == []
    with pytest.raises(ValueError, match=r"frontiers\[1\] has no choice; give each layer at least one"):
        knapsack([LAYER, []], 10)
