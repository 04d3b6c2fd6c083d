from pathlib import Path

import numpy as np
import pytest

from par_train._errors import UserError
from par_train.data.shares import share
from par_train.jobs.options import ModelOptions
from par_train.jobs.order import DataOrder, check_size, spread, window_count
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
