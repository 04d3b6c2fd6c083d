"""Rows of packed documents: what they hold, and that a run sees the same ones however it is cut and resumed."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from par_data import Corpus, PackedDataset, ShardedDataLoader

PADDING = 999


def corpus_of(lengths, trained=None):
    """Documents whose tokens tell which document and which place they are of: 100 d + place + 1."""
    tokens = [100 * document + place + 1 for document, length in enumerate(lengths) for place in range(length)]
    return Corpus(
        path=Path(),
        format="text",
        tokens=np.array(tokens, np.uint32),
        documents=np.cumsum([0, *lengths]).astype(np.uint64),
        hashes=np.zeros(len(lengths), np.uint64),
        trained=None if trained is None else np.packbits(np.array(trained, np.uint8), bitorder="little"),
        vocabulary=100,
        padding=PADDING,
    )


def rows_of(rows, epoch=0):
    return [rows[epoch, row] for row in range(rows.count(epoch))]


def test_positions_restart_at_each_document_and_padding():
    rows = PackedDataset(corpus_of([3, 4]), context=9, seed=1)
    [row] = rows_of(rows)
    first, second = (0, 1) if row["input_ids"][0] == 1 else (1, 0)
    lengths = [[3, 4][first], [3, 4][second]]
    ids = [100 * d + place + 1 for d, n in zip((first, second), lengths, strict=True) for place in range(n)]
    assert row["input_ids"].tolist() == [*ids, PADDING, PADDING]
    assert row["position_ids"].tolist() == [*range(lengths[0]), *range(lengths[1]), 0, 1]
    labels = [*ids]
    labels[0] = labels[lengths[0]] = -100
    assert row["labels"].tolist() == [*labels, -100, -100]
    assert row.keys() == {"input_ids", "position_ids", "labels"}, (
        "with an attention_mask documents would see each other"
    )
    assert {value.dtype for value in row.values()} == {torch.int64}


def test_split_document_restarts_in_its_next_sequence():
    rows = rows_of(PackedDataset(corpus_of([10]), context=4))
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, PADDING, PADDING]]
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2, 3]] * 2 + [[0, 1, 0, 1]]
    assert [row["labels"].tolist() for row in rows] == [[-100, 2, 3, 4], [-100, 6, 7, 8], [-100, 10, -100, -100]]
    streamed = rows_of(PackedDataset(corpus_of([10]), context=4, packing="stream"))
    assert [row["input_ids"].tolist() for row in streamed] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_token_that_is_not_a_target_is_only_an_input():
    trained = [0, 0, 1, 1, 0, 1, 1, 1, 0, 1]
    rows = PackedDataset(corpus_of([5, 3, 2], trained), context=5, packing="whole")
    labels = {int(row["input_ids"][0]): row["labels"].tolist() for row in rows_of(rows)}
    assert labels[1] == [-100, -100, 3, 4, -100]
    [others] = [value for key, value in labels.items() if key != 1]
    assert sorted(label for label in others if label != -100) == [102, 103, 202]


def test_only_the_documents_that_are_named_are_taken():
    rows = PackedDataset(corpus_of([3, 4, 5, 2]), context=6, documents=np.array([1, 3]))
    found = {int(token) // 100 for row in rows_of(rows) for token in row["input_ids"] if token != PADDING}
    assert found == {1, 3}


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)
PACKINGS = st.sampled_from(["whole", "stream"])


@given(LENGTHS, st.integers(2, 12), PACKINGS, st.integers(0, 2))
def test_targets_follow_tokens_of_their_own_document(lengths, context, packing, epoch):
    corpus = corpus_of(lengths)
    if sum(lengths) < context and packing == "stream":
        return
    rows = PackedDataset(corpus, context=context, packing=packing, seed=3)
    for row in rows_of(rows, epoch):
        ids, positions, labels = (row[name].tolist() for name in ("input_ids", "position_ids", "labels"))
        for place, label in enumerate(labels):
            if label != -100:
                assert label == ids[place] == ids[place - 1] + 1
                assert positions[place] == positions[place - 1] + 1
            elif ids[place] != PADDING:
                assert positions[place] == 0


def loader_of(rows, batch_size, **options):
    return DataLoader(rows, batch_size=batch_size, sampler=rows.sampler, drop_last=True, **options)


def taken(loaders, batches):
    """The ids of the rows of some global batches, and where the loaders then stand."""
    found = []
    for _ in range(batches):
        parts = [next(iter(loader))["input_ids"] for loader in loaders]
        found.append(torch.cat(parts).tolist())
    return found, loaders[0].state_dict()


@settings(max_examples=30)  # each runs three loaders
@given(LENGTHS, PACKINGS, st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 3, 6]), st.integers(0, 7))
def test_packed_dataset_resumes_on_other_ranks(lengths, packing, before, after, stop):
    rows = PackedDataset(corpus_of([*lengths, 80]), context=6, packing=packing, seed=5)  # a batch in each epoch

    def loaders(replicas):
        loader = loader_of(rows, 6)
        return [ShardedDataLoader(loader, rank=rank, num_replicas=replicas, seed=0) for rank in range(replicas)]

    uninterrupted, _ = taken(loaders(1), 8)
    first, state = taken(loaders(before), stop)
    resumed = loaders(after)
    for loader in resumed:
        loader.load_state_dict(state)
    rest, _ = taken(resumed, 8 - stop)
    assert first + rest == uninterrupted


def test_position_counts_sequences_and_epochs_differ():
    rows = PackedDataset(corpus_of([5, 4, 3, 2, 1] * 7), context=6, seed=5)
    loader = ShardedDataLoader(loader_of(rows, 2), rank=0, num_replicas=1, seed=0)
    epochs = [[batch["input_ids"] for batch in loader] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [rows.count(0) // 2, rows.count(1) // 2]
    assert loader.samples == 2 * (len(epochs[0]) + len(epochs[1]))
    assert not torch.equal(epochs[0][0], epochs[1][0])


def test_workers_load_the_same_sequences():
    rows = PackedDataset(corpus_of([5, 4, 3, 2, 1] * 7), context=6, seed=5)
    alone = [row["labels"] for row in loader_of(rows, 2)]
    workers = [row["labels"] for row in loader_of(rows, 2, num_workers=2, multiprocessing_context="fork")]
    assert all(torch.equal(a, b) for a, b in zip(alone, workers, strict=True))
    assert len(alone) == rows.count(0) // 2
    again = pickle.loads(pickle.dumps(rows))
    assert torch.equal(again[1, 0]["labels"], rows[1, 0]["labels"])


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"context": 1}, "context=1: .*; use at least 2 tokens"),
        ({"context": 8, "packing": "tight"}, "packing='tight' is unknown; use 'whole' or 'stream'"),
        ({"context": 8, "packing": "stream"}, "2 documents of 7 tokens do not fill a sequence of context=8; add text"),
        (
            {"context": 8, "documents": np.zeros(0, np.int64)},
            "0 documents of 0 tokens do not fill a sequence of context=8",
        ),
    ],
)
def test_packed_dataset_rejects_wrong_options(keywords, words):
    with pytest.raises(ValueError, match=words):
        PackedDataset(corpus_of([3, 4]), **keywords)
