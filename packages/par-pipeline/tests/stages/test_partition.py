import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from par_pipeline import partition
from par_pipeline.stages import layer_costs as _layer_costs

SIZES = [(1, 1), (4, 4), (10, 4), (15, 4), (17, 8), (123, 16), (123, 122)]


def sizes(ranges):
    return [len(each) for each in ranges]


@pytest.mark.parametrize(("layers", "parts"), SIZES)
def test_uniform_parts_cover_all_layers_and_differ_by_at_most_one_the_larger_last(layers, parts):
    ranges = partition(layers, parts)
    assert [layer for each in ranges for layer in each] == list(range(layers))
    assert len(ranges) == parts
    assert max(sizes(ranges)) - min(sizes(ranges)) <= 1
    assert sizes(ranges) == sorted(sizes(ranges))


def cuts(count, parts):
    """Every way to cut so many layers into so many parts."""
    for ends in itertools.combinations(range(1, count), parts - 1):
        yield [range(*pair) for pair in itertools.pairwise((0, *ends, count))]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=11).flatmap(
        lambda w: st.tuples(st.just(w), st.integers(1, len(w)))
    )
)
def test_the_largest_part_is_as_small_as_any_cut_makes_it_and_the_parts_as_equal(case):
    weights, parts = case

    def rank(ranges):
        sums = [sum(weights[layer] for layer in each) for each in ranges]
        return max(sums), sum(size * size for size in sums)

    ranges = partition(len(weights), parts, weights)
    assert [layer for each in ranges for layer in each] == list(range(len(weights)))
    assert len(ranges) == parts
    assert all(ranges)
    if any(weights):
        assert rank(ranges) == min(rank(each) for each in cuts(len(weights), parts))


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=9).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, len(w))))
)
def test_weights_that_are_no_whole_numbers_are_cut_as_well_within_rounding(case):
    weights, parts = case

    def largest(ranges):
        return max(math.fsum(weights[layer] for layer in each) for each in ranges)

    best = min(largest(each) for each in cuts(len(weights), parts))
    # Sums of nine numbers up to a million, each rounded: far below a millionth.
    assert largest(partition(len(weights), parts, weights)) <= best + 1e-6


def test_parts_are_cut_better_than_by_filling_each_up_to_the_mean():
    assert partition(5, 3, [4, 1, 1, 4, 4]) == [range(2), range(2, 4), range(4, 5)]


def test_equal_weights_are_spread_rather_than_packed():
    assert sorted(sizes(partition(10, 4, [3] * 10))) == [2, 2, 3, 3]


def test_a_thousand_layers_are_cut_exactly():
    weights = [(7 * layer) % 13 + 1 for layer in range(1000)]
    ranges = partition(1000, 64, weights)
    largest = max(sum(weights[layer] for layer in each) for each in ranges)

    def needed(limit):
        count, size = 1, 0
        for weight in weights:
            count, size = (count, size + weight) if size + weight <= limit else (count + 1, weight)
        return count

    assert needed(largest) <= 64 < needed(largest - 1)


def test_parameters_are_counted_layer_by_layer():
    layers = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 100))
    assert partition(layers, 3, "parameter") == [range(1), range(1, 4), range(4, 5)]
    assert partition([nn.GELU() for _ in range(4)], 2, "parameter") == [range(2), range(2, 4)]


class Busy(nn.Module):
    """Takes so many seconds of a clock of its own: a machine that is busy otherwise would let the test fail."""

    now = 0.0

    def __init__(self, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.seconds = seconds
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, entry):
        self.calls += 1
        Busy.now += self.seconds
        return nn.functional.dropout(entry @ self.weight, 0.5)


def test_time_is_measured_and_leaves_layers_and_random_numbers_alone(monkeypatch):
    monkeypatch.setattr(_layer_costs, "_now", lambda: Busy.now)
    layers = [Busy(1), Busy(1), Busy(3)]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert partition(layers, 2, "time", sample=torch.randn(4, 4, generator=torch.Generator())) == [
        range(2),
        range(2, 3),
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(layer.weight.grad is None and layer.calls == 0 for layer in layers)


def test_layers_that_write_into_their_input_are_measured_and_leave_the_sample():
    sample = -torch.ones(2, 3)
    assert len(partition([nn.ReLU(inplace=True), nn.Linear(3, 3)], 2, "time", sample=sample)) == 2
    assert torch.equal(sample, -torch.ones(2, 3))


def test_weights_may_be_an_array():
    numpy = pytest.importorskip("numpy")
    assert partition(3, 2, numpy.array([1, 1, 4])) == [range(2), range(2, 3)]


def test_time_takes_integer_inputs_and_layers_without_gradients():
    layers = [nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2).requires_grad_(False)]
    assert len(partition(layers, 3, "time", sample=torch.arange(6).view(2, 3))) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4), "3 layers cannot be cut into 4 parts; ask for 1 to 3"),
        (([1, 2], 3), "2 layers cannot be cut into 3 parts"),
        ((3, 0), "3 layers cannot be cut into 0 parts"),
        ((3, 2, "even"), "no method is called 'even'; use one of uniform, parameter, time, or a list of weights"),
        ((3, 2, [1, 2]), "there are 2 weights for 3 layers; give one for each"),
        ((2, 2, [1, -1]), "the weight -1 must be a finite number of at least 0"),
        ((2, 2, [1, math.nan]), "the weight nan must be a finite number of at least 0"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 2.0), "parts must be a whole number"),
        ((3, True), "parts must be a whole number"),
        ((3, 2, "parameter"), "'parameter' measures the layers themselves; give them, not their number"),
        ((["a", "b"], 2, "parameter"), r"layer 0 is a str, which has no parameters\(\) to count"),
        (([nn.GELU(), nn.GELU()], 2, "time"), "the method 'time' runs the layers; give sample="),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        partition(*arguments)
