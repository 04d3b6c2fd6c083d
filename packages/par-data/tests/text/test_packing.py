import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from par_data.text import packing as module
from par_data.text.packing import pack

LENGTHS = st.lists(st.integers(0, 40), max_size=60).map(lambda lengths: np.array(lengths, np.int64))
PACKINGS = st.sampled_from(["whole", "stream"])


def parts_of(pieces):
    """What lies in each row: number of the document, first token and number of tokens of each part."""
    rows = []
    for row in range(len(pieces)):
        one = pieces.sequence(row)
        assert len(one) == 1
        rows.append(list(zip(one.document.tolist(), one.begin.tolist(), one.length.tolist(), strict=True)))
    return rows


def tokens_of(parts):
    return [(document, begin + place) for document, begin, length in parts for place in range(length)]


def test_whole_packs_documents_first_fit():
    pieces = module._whole(np.arange(7), np.array([5, 4, 3, 2, 8, 1, 21]), 8)
    assert parts_of(pieces) == [
        [(0, 0, 5), (2, 0, 3)],
        [(1, 0, 4), (3, 0, 2), (5, 0, 1)],
        [(4, 0, 8)],
        [(6, 0, 8)],
        [(6, 8, 8)],
        [(6, 16, 5)],
    ]


def test_stream_fills_every_sequence():
    pieces = module._stream(np.array([2, 0, 1]), np.array([3, 9, 7]), 8)
    assert parts_of(pieces) == [[(2, 0, 3), (0, 0, 5)], [(0, 5, 4), (1, 0, 4)]]


@given(LENGTHS, st.integers(2, 17), PACKINGS, st.integers(0, 3), st.integers(0, 3))
def test_tokens_are_in_exactly_one_sequence(lengths, context, packing, seed, epoch):
    pieces = pack(lengths, context=context, packing=packing, seed=seed, epoch=epoch)
    rows = parts_of(pieces)
    found = [token for row in rows for token in tokens_of(row)]
    every = {(document, place) for document, length in enumerate(lengths) for place in range(length)}
    assert len(found) == len(set(found))
    assert all(row for row in rows)
    if packing == "stream":
        assert set(found) <= every
        assert len(every) - len(found) < context, "only what fills no row is left out"
        assert all(sum(length for _, _, length in row) == context for row in rows)
    else:
        assert set(found) == every
        assert all(sum(length for _, _, length in row) <= context for row in rows)
        whole = {document for document, length in enumerate(lengths) if 0 < length <= context}
        parts = [document for row in rows for document, _, _ in row]
        assert all(parts.count(document) == 1 for document in whole)


@settings(max_examples=25)
@given(LENGTHS, st.integers(2, 17), PACKINGS)
def test_rows_are_a_function_of_lengths_seed_and_epoch(lengths, context, packing):
    def made(seed, epoch):
        return parts_of(pack(lengths, context=context, packing=packing, seed=seed, epoch=epoch))

    assert made(1, 2) == made(1, 2)


def test_another_seed_or_epoch_is_another_order():
    lengths = np.arange(1, 200)
    made = [parts_of(pack(lengths, context=50, packing="whole", seed=s, epoch=e)) for s, e in ((0, 0), (0, 1), (1, 0))]
    assert made[0] != made[1] != made[2] != made[0]


@given(st.lists(st.integers(1, 9), max_size=80), st.integers(2, 9), st.integers(1, 7))
def test_windows_are_packed_one_after_the_other(lengths, context, window):
    """First-fit in each window by itself, as a loop over parts does it."""
    lengths = np.array(lengths, np.int64)
    cut = [min(context, length - begin) for length in lengths for begin in range(0, length, context)]
    expected, opened = [], 0
    for start in range(0, len(cut), window):
        room = []
        for length in cut[start : start + window]:
            row = next((row for row, left in enumerate(room) if left >= length), len(room))
            if row == len(room):
                room.append(context)
            room[row] -= length
            expected.append(opened + row)
        opened += len(room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WINDOW", window)
        patch.setattr(module, "_WINDOWS", 3)
        found = module._first_fit(np.array(cut, np.int64), context)
    assert np.concatenate([np.zeros(0, np.int64), *found]).tolist() == expected


def test_pack_of_nothing_has_no_sequences():
    for packing in ("whole", "stream"):
        for lengths in ([], [0, 0]):
            assert len(pack(np.array(lengths, np.int64), context=4, packing=packing, seed=0, epoch=0)) == 0
    assert len(pack(np.array([3]), context=4, packing="stream", seed=0, epoch=0)) == 0
