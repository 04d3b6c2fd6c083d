from pathlib import Path

import numpy as np
import pytest

from par_data import share
from par_train._errors import UserError
from par_train.jobs.options import ModelOptions
from par_train.jobs.order import DataOrder, TextRows, TextWindows, check_size, spread, window_count
from par_train.jobs.text import Text


def test_every_window_has_a_byte_behind_it():
    assert [window_count(size, 4) for size in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_an_epoch_is_a_permutation():
    order = DataOrder(windows=10, seed=0)
    assert sorted(order.batch(0, 10)) == list(range(10))
    assert sorted(order.batch(10, 10)) == list(range(10))
    assert list(order.batch(0, 10)) != list(order.batch(10, 10))


def test_order_depends_on_seed_and_position_alone():
    order, fresh = DataOrder(windows=10, seed=1), DataOrder(windows=10, seed=1)
    one_by_one = [int(order.batch(position, 1)[0]) for position in range(35)]
    assert list(fresh.batch(0, 35)) == one_by_one
    assert list(fresh.batch(7, 16)) == one_by_one[7:23]
    assert list(DataOrder(windows=10, seed=2).batch(0, 10)) != one_by_one[:10]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
def test_shares_make_up_the_whole(parts):
    items = np.arange(10)
    shares = [share(items, index, parts) for index in range(parts)]
    assert list(np.concatenate(shares)) == list(items)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_validation_windows_are_spread_evenly():
    assert list(spread(100, 4)) == [0, 25, 50, 75]
    assert list(spread(3, 4)) == [0, 1, 2]


@pytest.mark.parametrize(("train", "held_out", "what"), [(64, 17, "for training"), (65, 16, "held out")])
def test_too_little_text_is_named(train, held_out, what):
    model = ModelOptions(context=16)
    check_size(Text(folder=Path("x"), files=1, train=b"a" * 65, held_out=b"a" * 17), model)
    with pytest.raises(UserError, match=f"bytes {what}, less than . windows of model.context 16"):
        check_size(Text(folder=Path("x"), files=1, train=b"a" * train, held_out=b"a" * held_out), model)


def test_windows_and_what_fills_them_up():
    windows = TextWindows(bytes(range(20)), 4)
    inputs, targets = windows.take(np.array([2, 0]), np.array([0, 3, 4, 5]))
    assert len(windows) == 4
    assert inputs.tolist() == [[8, 11, 0, 0], [0, 3, 0, 0]]
    assert targets.tolist() == [[9, 12, -100, -100], [1, 4, -100, -100]]
    assert (windows.documents(np.array([1])), windows.counts(np.array([1, 2])).tolist()) == (None, [4, 4])


@pytest.mark.parametrize("packing", ["whole", "stream"])
def test_rows_hold_each_byte_once_and_targets_stay_inside_documents(packing):
    lengths, text = np.array([5, 1, 9, 2, 3, 1, 14, 1]), bytes(range(1, 37))
    rows = TextRows(text, lengths, 8, packing, seed=3)
    every, ends = np.arange(len(rows)), {*np.cumsum(lengths).tolist()}
    inputs, targets = rows.take(every, np.arange(10))
    found = inputs[inputs > 0].tolist()
    assert len(found) == len({*found}) == (36 if packing == "whole" else 32)  # a rest that fills no row is left out
    assert (targets >= 0).sum(1).tolist() == rows.counts(every).tolist()
    for row, documents in enumerate(rows.documents(every)):
        assert sum(documents) == 8
        at = 0
        for length in documents:
            document, following = inputs[row, at : at + length], targets[row, at : at + length]
            assert following[-1] == -100
            assert following[:-1].tolist() == (document[1:].tolist() if document[0] else [-100] * (length - 1))
            if document[0]:
                assert not ends & {*range(document[0], document[-1])}  # bytes are numbered: none but the last ends one
            at += length
    assert (inputs[:, 8:] == 0).all()
    assert (targets[:, 8:] == -100).all()
    some = rows.take(every[1:3], np.array([7, 2]))
    assert (some[0] == inputs[1:3][:, [7, 2]]).all()
    assert (some[1] == targets[1:3][:, [7, 2]]).all()
    again = TextRows(text, lengths, 8, packing, seed=3)
    assert (again.take(every, np.arange(8))[0] == inputs[:, :8]).all()
