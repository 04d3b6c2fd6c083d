"""Who holds which tokens, and the places in documents."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings

from par_layers import Tokens
from par_layers.context.balance import cut_tokens, static_tokens

from .dense import cut_rows


@settings(max_examples=30)
@given(cut_rows())
def test_places(row):
    tokens, _ = row
    text = [
        [(number, place) for number, length in enumerate(documents) for place in range(length)]
        for documents in tokens.documents
    ]
    indices = [tokens.index(rank) for rank in range(tokens.ranks)]
    assert sorted(np.concatenate(indices).tolist()) == list(range(tokens.padded))
    assert np.concatenate(indices)[tokens.home()].tolist() == list(range(tokens.length))
    for rank, index in enumerate(indices):
        assert len(index) == tokens.local
        for number, words in enumerate(text):
            for token, position, following in zip(
                index, tokens.positions(rank)[number], tokens.following(rank)[number], strict=True
            ):
                if token >= tokens.length:
                    assert (position, following) == (0, -1)
                    continue
                assert position == words[token][1]
                last = token + 1 == tokens.length or words[token + 1][0] != words[token][0]
                assert following == (-1 if last else token + 1)


def test_keys_and_pickles():
    tokens = cut_tokens(64, 4, "zigzag", documents=[40, 24])
    again = pickle.loads(pickle.dumps(tokens))
    assert again == tokens
    assert hash(again) == hash(tokens)
    assert {tokens: 1}[again] == 1
    assert tokens != cut_tokens(64, 4, "zigzag", documents=[24, 40])
    assert cut_tokens(64, 4, "zigzag", documents=[40, 24]) is tokens  # planned once


def test_rows_of_a_batch():
    tokens = cut_tokens(8, 2, "contiguous", documents=[[8], [3, 5], [3, 5]])
    assert tokens.rows(0, 2).documents == ((8,), (3, 5))
    assert tokens.rows(1, 3).documents == ((3, 5),)  # one for all
    assert tokens.rows(0, 2).runs == tokens.runs
    one = cut_tokens(8, 2, "contiguous", documents=[3, 5])
    assert one.rows(1, 7) is one
    with pytest.raises(ValueError, match="rows 2 to 4 are not rows of a batch of 3"):
        tokens.rows(2, 4)


def test_groups_that_exchange_tokens_for_heads():
    tokens = cut_tokens(64, 4, "zigzag", inner=2)
    outer = tokens.merged(2)
    assert outer == cut_tokens(64, 2, "zigzag")
    for group in range(2):
        together = np.concatenate([tokens.index(2 * group), tokens.index(2 * group + 1)])
        assert np.array_equal(together, outer.index(group))
    assert tokens.merged(1) == tokens
    assert cut_tokens(64, 4, "auto", inner=4).merged(4).runs == (((0, 64),),)
    with pytest.raises(ValueError, match="4 ranks do not divide into groups of 3"):
        tokens.merged(3)
    with pytest.raises(ValueError, match="do not hold their tokens in ascending order; cut with inner=2"):
        cut_tokens(64, 4, "zigzag").merged(2)


def test_the_cut_of_layers_without_tokens():
    assert static_tokens(16, 4) == cut_tokens(64, 4)
    assert static_tokens(16, 4, "contiguous").runs[1] == ((16, 32),)
    assert static_tokens(7, 1).runs == (((0, 7),),)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 4, ((0,),), (((0, 4),),)), "a row must have 1 token at least; its length is 0"),
        ((4, 4, (), (((0, 4),),)), r"documents=\(\) has no row"),
        ((4, 4, ((4, 0),), (((0, 4),),)), r"documents must have 1 token at least each; their lengths are \[4, 0\]"),
        ((4, 4, ((5, -1),), (((0, 4),),)), "documents must have 1 token at least each"),
        ((4, 4, ((3,),), (((0, 4),),)), r"documents \[3\] have 3 tokens together, but the row has 4"),
        ((4, 4, ((4,),), (((0, 2),), ((3, 4),))), "runs must hold each token from 0 to 4 on one rank"),
        ((4, 4, ((4,),), (((0, 3),), ((2, 4),))), "runs must hold each token from 0 to 4 on one rank"),
        ((4, 2, ((4,),), (((0, 2),),)), "runs must hold each token from 0 to 2"),
        ((4, 4, ((4,),), (((0, 3),), ((3, 4),))), r"each rank must hold equally many tokens; they hold \[1, 3\]"),
        ((4, 4, ((4,),), (((2, 4), (0, 2)),)), "a rank's runs must ascend and not touch"),
    ],
)
def test_what_is_no_cut(arguments, words):
    with pytest.raises(ValueError, match=words):
        Tokens(*arguments)
