"""What travels: each row that a rank sees and does not hold once, and no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from par_layers import Mask
from par_layers.context.balance import cut_tokens
from par_layers.context.fetch import Fetch, hops, transfers

from .dense import cut_rows, dense


def held(runs):
    return np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in runs)])


@settings(max_examples=60)
@given(cut_rows(), st.integers(1, 3))
def test_each_seen_row_once(row, copies):
    tokens, mask = row
    visible = dense(mask, tokens)
    rows = len(tokens.documents)
    batch = rows if rows > 1 else copies
    table = transfers(*mask.intervals(tokens), tokens)
    fetches = [Fetch(table, rank) for rank in range(tokens.ranks)]
    # What each rank sends, as numbers of (row of the batch, token), which an all-to-all brings to its places.
    sent = []
    for rank, fetch in enumerate(fetches):
        local = np.stack([tokens.index(rank) + 1000 * row for row in range(batch)]).ravel()
        sent.append(np.split(local[fetch.send_index(batch)], np.cumsum(fetch.send_splits(batch))[:-1]))
    for rank, fetch in enumerate(fetches):
        arrived = [sent[owner][rank] for owner in range(tokens.ranks)]
        assert [len(each) for each in arrived] == fetch.receive_splits(batch)
        message = np.concatenate(arrived)
        order = fetch.order(batch)
        buffer = message if order is None else message[order]
        expected = []
        for number in range(batch):
            needed = visible[number if rows > 1 else 0][tokens.index(rank)].any(0)
            needed[tokens.index(rank)] = False
            assert held(fetch.keys[number if rows > 1 else 0]).tolist() == np.flatnonzero(needed).tolist()
            expected.append(np.flatnonzero(needed) + 1000 * number)
        assert [len(each) for each in expected] == fetch.buffered(batch)
        assert buffer.tolist() == np.concatenate(expected).tolist()
        for part in np.split(fetch.send_index(batch), np.cumsum(fetch.send_splits(batch))[:-1]):
            assert len(set(part.tolist())) == len(part)
    received = np.array([sum(fetch.buffered(batch)) for fetch in fetches])
    assert np.array_equal(table.received() * (1 if rows > 1 else batch), received)


@settings(max_examples=40)
@given(cut_rows())
def test_keys_travel_as_far_as_they_are_seen(row):
    tokens, mask = row
    visible, ranks = dense(mask, tokens), tokens.ranks
    ring = hops(transfers(*mask.intervals(tokens), tokens))
    for owner in range(ranks):
        asked = [
            hop
            for hop in range(1, ranks)
            if visible[:, tokens.index((owner + hop) % ranks)][:, :, tokens.index(owner)].any()
        ]
        assert (ring.near[owner], ring.far[owner]) == (min(asked, default=0), max(asked, default=0))
        assert [hop for hop in range(1, ranks) if ring.travels(owner, hop)] == list(range(1, ring.far[owner] + 1))
        assert {rank for rank in range(ranks) if owner in ring.needed[rank]} == {(owner + hop) % ranks for hop in asked}
    assert ring.steps == max(ring.far)


def test_whole_documents_move_nothing():
    tokens = cut_tokens(64, 4, "contiguous", documents=[16, 7, 9, 16, 16])
    table = transfers(*Mask().intervals(tokens), tokens)
    assert table.received().tolist() == [0, 0, 0, 0]
    assert hops(table).steps == 0
    fetch = Fetch(table, 1)
    assert fetch.receive_splits(3) == fetch.send_splits(3) == [0, 0, 0, 0]
    assert fetch.keys == ((),)
    assert len(fetch.send_index(3)) == 0
    assert fetch.order(3) is None


def test_masks_whose_first_tokens_ascend_and_last_ones_do_not():
    """The second rank's first token sees all of the first rank's, its others none."""
    tokens = cut_tokens(8, 2, "contiguous")
    mask = Mask.from_intervals([0, 0, 0, 0, 0, 4, 4, 4], [1, 8, 2, 3, 7, 5, 6, 5])
    table = transfers(*mask.intervals(tokens), tokens)
    assert Fetch(table, 0).keys == (((4, 8),),)
    assert Fetch(table, 1).keys == (((0, 4),),)
    fewer = Mask.from_intervals([0, 1, 1, 1, 2, 2, 2, 2], [8, 2, 2, 2, 3, 3, 3, 3])
    assert Fetch(transfers(*fewer.intervals(tokens), tokens), 0).keys == (((4, 8),),)
    assert Fetch(transfers(*fewer.intervals(tokens), tokens), 1).keys == (((2, 3),),)


def test_a_window_moves_one_less_than_its_tokens():
    tokens = cut_tokens(64, 4, "contiguous")
    for window in (1, 2, 7, 17):
        table = transfers(*Mask(causal=True, window=window).intervals(tokens), tokens)
        assert table.received().tolist() == [0, *[window - 1] * 3]


def test_batches_of_other_rows_than_the_documents_have():
    tokens = cut_tokens(8, 2, "contiguous", documents=[[8], [3, 5]])
    fetch = Fetch(transfers(*Mask().intervals(tokens), tokens), 0)
    with pytest.raises(ValueError, match="tokens have documents for 2 rows, but the batch has 3"):
        fetch.receive_splits(3)
