"""Masks: the interval that each token sees, and what is refused."""

import pickle

import numpy as np
import pytest
import torch

from par_layers import Mask, Tokens

from .dense import dense


def whole(length, *documents):
    return Tokens(length, length, (documents or (length,),), (((0, length),),))


@pytest.mark.parametrize(
    ("mask", "documents", "expected"),
    [
        (Mask(), (4,), ["1111", "1111", "1111", "1111"]),
        (Mask(causal=True), (4,), ["1000", "1100", "1110", "1111"]),
        (Mask(causal=True, window=1), (3,), ["100", "010", "001"]),
        (Mask(causal=True, window=2), (4,), ["1000", "1100", "0110", "0011"]),
        (Mask(window=2), (4,), ["1100", "1110", "0111", "0011"]),
        (Mask(causal=True, prefix=2), (4,), ["1100", "1100", "1110", "1111"]),
        (Mask(causal=True, prefix=9), (3,), ["111", "111", "111"]),
        (Mask(chunk=2), (5,), ["11000", "11000", "00110", "00110", "00001"]),
        (Mask(causal=True, chunk=3), (5,), ["10000", "11000", "11100", "00010", "00011"]),
        (Mask(causal=True, chunk=3, window=2), (4,), ["1000", "1100", "0110", "0001"]),
        (Mask(causal=True), (1, 2), ["100", "010", "011"]),
        (Mask(causal=True, prefix=2), (2, 3), ["11000", "11000", "00110", "00110", "00111"]),
        (Mask(chunk=2), (3, 2), ["11000", "11000", "00100", "00011", "00011"]),
        (Mask.from_intervals([0, 0, 3], [3, 0, 3]), (3,), ["111", "000", "000"]),
        (Mask.from_intervals([0, 0, 0, 1], [4, 4, 4, 3]), (2, 2), ["1100", "1100", "0011", "0010"]),
    ],
    ids=repr,
)
def test_what_is_seen(mask, documents, expected):
    tokens = whole(sum(documents), *documents)
    first, last = mask.intervals(tokens)
    assert first.dtype == last.dtype == np.int64
    places = np.arange(tokens.length)
    seen = (places >= first[0][:, None]) & (places < last[0][:, None])
    assert ["".join("01"[int(bit)] for bit in row) for row in seen] == expected
    assert np.array_equal(seen, dense(mask, tokens)[0])


def test_rows_of_other_documents_and_padding():
    tokens = Tokens(3, 4, ((3,), (1, 2)), (((0, 2),), ((2, 4),)))
    first, last = Mask(causal=True).intervals(tokens)
    assert first.tolist() == [[0, 0, 0, 3], [0, 1, 1, 3]]
    assert last.tolist() == [[1, 2, 3, 3], [1, 2, 3, 3]]


def test_masks_are_keys():
    masks = [Mask(), Mask(causal=True), Mask(causal=True, window=3), Mask.from_intervals([0, 0], [1, 2])]
    copies = [pickle.loads(pickle.dumps(mask)) for mask in masks]
    assert len({*masks, *copies}) == len(masks)
    assert copies == masks
    assert Mask.from_intervals(torch.tensor([0, 0]), torch.tensor([1, 2])) == masks[-1]
    assert Mask(window=np.int64(4)) == Mask(window=4)
    assert repr(Mask(causal=True, window=3)) == "Mask(causal=True, window=3)"
    assert repr(masks[-1]) == repr(copies[-1]) != repr(Mask.from_intervals([0, 0], [2, 2]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 0}, "window must be 1 at least; it is 0"),
        ({"chunk": 0}, "chunk must be 1 at least; it is 0"),
        ({"prefix": -1, "causal": True}, "prefix must be 0 at least; it is -1"),
        ({"window": True}, "window must be a number of tokens; it is True"),
        ({"window": 2.5}, "window must be a number of tokens; it is 2.5"),
        ({"prefix": 3}, "prefix=3 needs causal=True: without it every token sees the document's first tokens already"),
        ({"prefix": 3, "window": 4}, "prefix=3 needs causal=True: .* in its window"),
        ({"prefix": 3, "window": 4, "causal": True}, "prefix=3 with window=4 is no mask of intervals"),
        ({"prefix": 3, "chunk": 4, "causal": True}, "prefix=3 with chunk=4 is no mask of intervals"),
    ],
)
def test_what_is_no_mask(arguments, words):
    with pytest.raises(ValueError, match=words):
        Mask(**arguments)


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        ([0, 0], [1], "first has 2 tokens and last has 1"),
        ([0, -1], [1, 2], r"token 1 cannot see tokens -1 to 2 of a row of 2; 0 <= first <= last <= 2"),
        ([0, 0], [1, 3], "token 1 cannot see tokens 0 to 3"),
        ([0, 2], [1, 1], "token 1 cannot see tokens 2 to 1"),
        ([0.0, 1.0], [1, 2], "first must be integers, one for each token of a row"),
        (np.ones((2, 2), bool), [1, 2], r"it is bool \[2, 2\]. Masks of pairs, \[S, S\], are not supported"),
        ([], [], "first must be integers"),
    ],
)
def test_what_are_no_intervals(first, last, words):
    with pytest.raises(ValueError, match=words):
        Mask.from_intervals(first, last)


def test_intervals_are_those_of_one_length():
    with pytest.raises(ValueError, match="the mask has intervals for 2 tokens, but the row has 3"):
        Mask.from_intervals([0, 0], [1, 2]).intervals(whole(3))
