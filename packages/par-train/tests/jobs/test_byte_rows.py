from pathlib import Path

import numpy as np
import pytest

from par_data import FolderText, split_evenly
from par_train._errors import UserError
from par_train.jobs.byte_rows import text_rows
from par_train.jobs.options import DataOptions, ModelOptions, Options, TrainOptions
from par_train.jobs.text import check_size
from par_train.jobs.trainer import spread


def options(batch=4, **data):
    return Options(model=ModelOptions(context=16), train=TrainOptions(batch_size=batch), data=DataOptions(**data))


def text_of(train, held_out, documents=None):
    return FolderText(folder=Path("x"), files=1, train=train, held_out=held_out, documents=documents)


def test_text_rows_of_windows_hold_each_byte_once():
    text = bytes(range(1, 101))
    data = text_rows(options(), text_of(text, text[:40]))
    rows = [data.train[0, row] for row in range(data.train.count(0))]
    assert (data.train.count(0), data.held_out.count(0)) == (6, 2), "the rest that fills no window is left out"
    starts = sorted(int(row["input_ids"][0]) for row in rows)
    assert starts == [1, 17, 33, 49, 65, 81]
    assert starts != [int(row["input_ids"][0]) for row in rows], "in another order"
    for row in rows:
        assert row["input_ids"].diff().eq(1).all()
        assert row["labels"].tolist() == [-100, *row["input_ids"][1:].tolist()]
        assert row["position_ids"].tolist() == [*range(16)]


def test_text_rows_of_documents_pads_with_a_byte_that_no_text_has():
    text, lengths = bytes(range(1, 41)), np.array([10, 10, 10, 10])
    data = text_rows(options(packing="whole"), text_of(text, text, (lengths, lengths)))
    row = data.train[0, 0]
    assert row["input_ids"][10:].tolist() == [0] * 6
    assert row["labels"][10:].tolist() == [-100] * 6


@pytest.mark.parametrize(("train", "held_out"), [(63, 16), (64, 15)])
def test_check_size_of_too_little_text_raises(train, held_out):
    check_size(text_of(b"a" * 64, b"a" * 16), options())
    with pytest.raises(
        UserError, match=f"gives {train // 16} windows of .* and {held_out // 16} held out; a step needs"
    ):
        check_size(text_of(b"a" * train, b"a" * held_out), options())


def test_text_rows_of_too_few_documents_raises():
    text, lengths = b"a" * 40, np.array([20, 20])
    with pytest.raises(UserError, match=r"data\.folder 'x' fills 3 rows of 16 bytes, less than a batch of .* 9"):
        text_rows(options(9, packing="whole"), text_of(text, text, (lengths, lengths)))


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
def test_share_over_parts_makes_up_the_whole(parts):
    items = np.arange(10)
    shares = [split_evenly(items, index, parts) for index in range(parts)]
    assert list(np.concatenate(shares)) == list(items)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_spread_of_rows_is_even():
    assert list(spread(100, 4)) == [0, 25, 50, 75]
    assert list(spread(3, 4)) == [0, 1, 2]
