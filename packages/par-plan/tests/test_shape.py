"""The arithmetic of a model's sizes."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from par_plan.costs.pipeline import pipeline_cost
from par_plan.shape import ModelSlice, Shape, TensorSplit, count, split_of_mode, why_not_sharded

SIZES = {"layers": 3, "width": 48, "heads": 4, "context": 12}


@given(
    layers=st.integers(1, 40), ranks=st.integers(1, 8), tied=st.booleans(), schedule=st.sampled_from(["1f1b", "zb_v"])
)
def test_parts_of_a_pipeline_add_up(layers, ranks, tied, schedule):
    shape, pipeline = Shape(**{**SIZES, "layers": layers}, tied=tied), pipeline_cost(schedule, ranks, 2 * ranks)
    assume(layers >= pipeline.stages)
    parts = [pipeline.part(place, layers) for place in pipeline.places]
    twice = tied and not any(part.first and part.last for part in parts)  # both ends have the table
    assert sum(count(shape, TensorSplit(), part).total for part in parts) == shape.parameters + twice * 256 * 48


def test_fewer_key_heads_and_another_mlp():
    shape = Shape(layers=1, width=64, heads=8, kv_heads=2, hidden=96, context=8)
    assert shape.attended == 64 + 2 * 16
    block = 64 * 96 + 96 + 64 * 64 + 64 + 2 * 64 * 96 + 96 + 64 + 4 * 64
    assert shape.parameters == block + (256 + 8) * 64 + 2 * 64 + 256 * 64


def test_six_operations_for_each_parameter_and_token_and_attention_beside():
    shape = Shape(layers=2, width=64, heads=4, context=32)
    matrices = 2 * 12 * 64 * 64 + 256 * 64
    whole = ModelSlice(blocks=2, first=True, last=True)
    assert shape.flops(whole) == (6 * matrices, 3 * 2 * 2 * 32 * 64)  # causal: half of 4 x context x width a block


@pytest.mark.parametrize(
    ("cut", "sizes", "word"),
    [
        (split_of_mode("1d", 3, {"tensor": 3}), {}, "model.heads is 4"),
        (split_of_mode("1d", 4, {"tensor": 4}, sequence=True), {"context": 10}, "model.context is 10"),
        (split_of_mode("3d", 64, {"output": 4, "input": 4, "weight": 4}), {"width": 40}, "model.width is 40"),
        (split_of_mode("1d", 4, {"tensor": 4}), {"kv_heads": 2}, "heads of keys is 2"),
    ],
)
def test_what_a_mode_cannot_cut_is_named(cut, sizes, word):
    assert word in why_not_sharded(Shape(**{**SIZES, **sizes}), cut)


def test_a_microbatch_that_a_mode_cannot_cut_is_named():
    square = split_of_mode("2d", 4, {"row": 2, "col": 2})
    assert why_not_sharded(Shape(**SIZES), square) is None
    assert "rows of a microbatch is 3" in why_not_sharded(Shape(**SIZES), square, 3)
    assert why_not_sharded(Shape(**SIZES), square, 4) is None


def test_sizes_that_make_no_model_are_refused():
    with pytest.raises(ValueError, match="layers=0: it must be 1 or more"):
        Shape(**{**SIZES, "layers": 0})
    with pytest.raises(ValueError, match="width=50, heads=4"):
        Shape(**{**SIZES, "width": 50})
    with pytest.raises(ValueError, match="no formulas for tensor mode 'ladder'"):
        split_of_mode("ladder", 4, {})
