"""The formulas of traffic. That they hold is measured in test_measured.py."""

from dataclasses import replace

import pytest

from par_plan.costs.memory import ZeroSharding
from par_plan.costs.pipeline import pipeline_cost
from par_plan.costs.traffic import data_traffic, pipeline_traffic, tensor_traffic
from par_plan.inputs import NUMBER_WIDTHS
from par_plan.shape import ModelSlice, Shape, TensorSplit, split_of_mode

SHAPE = Shape(layers=4, width=64, heads=4, context=16)
WHOLE = ModelSlice(blocks=4, first=True, last=True)
ALONE = ZeroSharding(zero=0, ranks=1, elements=1000, chunk=100, chunks=10, gathered=300, stays=100, reduced=200)


def moved(transfers):
    return {move.what: (move.operations, move.bytes) for move in transfers}


def test_one_rank_sends_nothing():
    assert data_traffic(ALONE, NUMBER_WIDTHS["fp32"]) == []
    assert tensor_traffic(SHAPE, TensorSplit(), NUMBER_WIDTHS["fp32"], WHOLE, {16: 1}, ALONE) == []
    assert pipeline_traffic(SHAPE, TensorSplit(), pipeline_cost("1f1b", 1, 1).places[0], WHOLE, {16: 1}, 0) == []


@pytest.mark.parametrize(
    ("zero", "accumulates", "gradients", "parameters"),
    [
        (0, False, (10, 2 * 750), None),
        (1, False, (10, 750), (10, 750)),
        (2, True, (10, 750), (10, 750)),
        (3, False, (10, 750), (20, 2 * 750 - 75)),
        (3, True, (10, 750), (10, 750)),
    ],
)
def test_replicas(zero, accumulates, gradients, parameters):
    found = moved(data_traffic(replace(ALONE, zero=zero, ranks=4, accumulates=accumulates), NUMBER_WIDTHS["bf16"]))
    assert found["flags"] == (1, 2 * 4 * 4 * 3 / 4)
    for what, expected in (("gradients", gradients), ("parameters", parameters)):
        assert found.get(what) == (None if expected is None else (expected[0], 2 * expected[1]))


def test_twice_the_microbatches_are_twice_the_activations_and_one_sum_of_gradients():
    cut = split_of_mode("1d", 4, {"tensor": 4}, sequence=True)
    one, two = (moved(tensor_traffic(SHAPE, cut, NUMBER_WIDTHS["bf16"], WHOLE, {64: n}, ALONE)) for n in (1, 2))
    assert two["activations"] == tuple(2 * each for each in one["activations"])
    assert two["partial gradients"] == one["partial gradients"]


def test_messages_of_stages_are_fp32_with_headers_and_a_word_at_the_end():
    place = pipeline_cost("1f1b", 4, 8).places[1]
    found = moved(
        pipeline_traffic(SHAPE, TensorSplit(), place, ModelSlice(blocks=1, first=False, last=False), {32: 8}, 0)
    )
    assert found == {"activations": (2 * 8 + 2, 2 * 8 * (32 * 64 * 4 + 512) + 2 * 512)}


def test_a_tied_table_is_sent_between_two_ends_and_not_within_one():
    shape = Shape(layers=4, width=64, heads=4, context=16, tied=True)
    for part, expected in (
        (ModelSlice(blocks=1, first=True, last=False), 99),
        (ModelSlice(blocks=1, first=False, last=False), None),
        (ModelSlice(blocks=1, first=True, last=True), None),
    ):
        found = moved(pipeline_traffic(shape, TensorSplit(), pipeline_cost("1f1b", 4, 8).places[0], part, {32: 8}, 99))
        assert found.get("tied table") == (None if expected is None else (1, expected))
