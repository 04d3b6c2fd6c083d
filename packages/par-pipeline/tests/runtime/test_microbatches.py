"""Batches into microbatches and back, and what each counts."""

from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_pipeline import Microbatches, split_rows
from par_pipeline.runtime.feed import make_feed, shares
from par_pipeline.runtime.microbatches import merge, rows_of, split


@given(st.integers(1, 40), st.integers(1, 40))
def test_sizes_differ_by_one_at_most_and_join_to_the_batch(rows, microbatches):
    batch = {"x": torch.arange(rows * 3).view(rows, 3), "y": (torch.arange(rows), None), "scale": torch.tensor(2.0)}
    if rows < microbatches:
        with pytest.raises(ValueError, match=f"a batch of {rows} rows is smaller than the {microbatches} microbatches"):
            split_rows(batch, microbatches)
        return
    parts = split_rows(batch, microbatches)
    sizes = [len(part["x"]) for part in parts]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert all(part["scale"] == 2 and part["y"][1] is None for part in parts)
    assert torch.equal(merge([part["x"] for part in parts]), batch["x"])
    assert torch.equal(merge([part["y"] for part in parts])[0], batch["y"][0])


class Spans:
    """Something of each row, that is no tensor."""

    def __init__(self, spans):
        self.spans = list(spans)

    def rows(self, start, stop):
        return Spans(self.spans[start:stop])


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_value_with_rows_is_split_as_tensors_are(rows, microbatches):
    if rows < microbatches:
        return
    x, spans = torch.arange(rows), Spans(range(rows))
    feed = make_feed((x, spans), {"spans": spans}, None, microbatches, split_rows)  # keywords have no tensor
    for args, keywords in zip(feed.inputs, feed.kwargs, strict=True):
        assert args[0].tolist() == args[1].spans == keywords["spans"].spans


def test_a_value_with_rows_wants_a_tensor_beside_it():
    spans = Spans(range(4))
    with pytest.raises(ValueError, match=r"a Spans, which is split by its rows, .* Microbatches of it"):
        make_feed((), {"spans": spans}, None, 2, split_rows)
    with pytest.raises(ValueError, match="a batch of 1 rows is smaller than the 2 microbatches"):
        make_feed((), {"spans": spans}, torch.ones(1), 2, split_rows)
    halves = Microbatches([spans.rows(0, 1), spans.rows(1, 4)])
    feed = make_feed((), {"spans": halves}, torch.ones(4), 2, split_rows)
    assert [keywords["spans"] for keywords in feed.kwargs] == list(halves)


def test_unequal_rows_and_wrong_counts_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 3\] rows"):
        split_rows((torch.ones(3), torch.ones(2)), 2)
    with pytest.raises(ValueError, match="Microbatches gave 3 microbatches, but the schedule has 2"):
        split(Microbatches([1, 2, 3]), 2, split_rows)
    with pytest.raises(ValueError, match="`split` gave 1 microbatches, but the schedule has 2"):
        split(torch.ones(4), 2, lambda batch, count: [batch])


def test_outputs_are_joined_where_their_shapes_allow_it():
    assert merge([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    uneven = [torch.ones(2, 3), torch.ones(2, 5)]
    assert merge(uneven) == uneven
    assert merge([{"a": torch.ones(1), "b": None}] * 2)["b"] is None
    assert rows_of((None, torch.tensor(3), torch.ones(4, 2))) == 4
    assert rows_of(5) is None


def test_outputs_that_are_no_alike_are_given_one_by_one():
    x = torch.ones(2)
    for one, other in [({"a": x}, {"b": x}), ({"a": x}, {}), (x, None), (x, x.sum()), (x.sum(), x), ((x,), [x])]:
        assert merge([one, other]) == [one, other]


def test_a_part_of_a_batch_may_be_split_already():
    feed = make_feed((torch.ones(4), Microbatches(["a", "b"])), {"mask": Microbatches([None, 1])}, None, 2, split_rows)
    assert [args[1] for args in feed.inputs] == ["a", "b"]
    assert feed.kwargs == [{"mask": None}, {"mask": 1}]
    with pytest.raises(ValueError, match="Microbatches gave 3 microbatches, but the schedule has 2"):
        split_rows({"mask": Microbatches([1, 2, 3])}, 2)


def test_a_batch_whose_tensors_nobody_sees_is_refused():
    with pytest.raises(TypeError, match="a UserDict, whose tensors cannot be split; give them in a dict"):
        split_rows(UserDict(tokens=torch.ones(4)), 2)
    assert split_rows((range(3), UserDict(a=1)), 2) == [(range(3), UserDict(a=1))] * 2


def test_a_custom_split_is_used_for_inputs_keywords_and_target():
    calls = []

    def halves(batch, count):
        calls.append(batch)
        return split_rows(batch, count)

    x = torch.ones(4)
    feed = make_feed((x,), {"mask": x}, x, 2, halves)
    assert len(calls) == 3
    assert len(feed.inputs[0]) == 1
    assert torch.equal(feed.kwargs[1]["mask"], torch.ones(2))


def test_items_of_given_microbatches_that_are_tuples_are_several_arguments():
    feed = make_feed((Microbatches([(1, 2), 3]),), {}, Microbatches(["a", "b"]), 2, split_rows)
    assert feed.inputs == [(1, 2), (3,)]
    assert feed.targets == ["a", "b"]


def test_a_microbatch_counts_by_its_rows_or_by_a_weight():
    x, y = torch.ones(5, 2), torch.tensor([1, -1, -1, 2, 3])
    feed = make_feed((x,), {}, y, 2, split_rows)
    assert shares(feed, None, None) == [3 / 5, 2 / 5]
    assert shares(feed, lambda target: (target >= 0).sum(), None) == [1 / 3, 2 / 3]
    without = make_feed((), {}, None, 4, split_rows)
    assert shares(without, None, None) == [1 / 4] * 4


def test_inputs_and_target_of_different_batches_are_refused():
    with pytest.raises(ValueError, match="microbatch 0 has 4 rows of inputs, but 3 of the target"):
        make_feed((torch.ones(8),), {}, torch.ones(6), 2, split_rows)


def test_rows_that_only_the_inputs_tell_count_beside_targets_without():
    x = torch.ones(5, 2)
    feed = make_feed((x,), {}, Microbatches([torch.tensor(1), torch.tensor(2)]), 2, split_rows)
    assert feed.rows == [3, 2]
    assert shares(feed, None, None) == [0.6, 0.4]


def test_target_in_a_dict_with_other_rows_is_refused():
    with pytest.raises(ValueError, match="microbatch 0 has 2 rows of inputs, but 4 of the target"):
        make_feed((torch.ones(4),), {}, {"boxes": torch.ones(8)}, 2, split_rows)
    assert make_feed((torch.ones(4),), {}, {"scale": torch.tensor(2.0)}, 2, split_rows).rows == [2, 2]


@pytest.mark.parametrize("size", [1, 3, 4, 16])  # 4: one for each microbatch
def test_keyword_with_other_rows_is_refused_by_name(size):
    powers = torch.ones(size)
    rule = rf"powers=\({size},\): .* has 8 in microbatches of \[2, 2, 2, 2\]; pass Microbatches\(\[powers\] \* 4\)"
    for inputs, target in [((torch.ones(8, 2),), None), ((), torch.ones(8))]:
        with pytest.raises(ValueError, match=rule):
            make_feed(inputs, {"powers": powers}, target, 4, split_rows)
        with pytest.raises(ValueError, match=rule):
            make_feed(inputs, {"mask": torch.ones(8), "powers": [{"of": powers}]}, target, 4, split_rows)
        feed = make_feed(inputs, {"powers": Microbatches([powers] * 4)}, target, 4, split_rows)
        assert all(each["powers"] is powers for each in feed.kwargs)


def test_keyword_beside_given_microbatches_fits_each_of_them():
    given = Microbatches([torch.ones(3), torch.ones(5)])
    with pytest.raises(ValueError, match=r"mask=\(8,\): .* has 8 in microbatches of \[3, 5\]"):
        make_feed((given,), {"mask": torch.ones(8)}, None, 2, split_rows)
    feed = make_feed((given,), {"mask": given, "scale": torch.tensor(2.0)}, None, 2, split_rows)
    assert [len(each["mask"]) for each in feed.kwargs] == [3, 5]


def test_keyword_is_given_whole_by_a_split_of_the_callers():
    def halves(batch, count):
        return [batch] * count if isinstance(batch, dict) else split_rows(batch, count)

    powers = torch.ones(3)
    feed = make_feed((torch.ones(4),), {"powers": powers}, None, 2, halves)
    assert all(each["powers"] is powers for each in feed.kwargs)
