"""Rows of several corpora in one order."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from par_data import MixtureDataset, PackedDataset, ShardedDataLoader
from par_data.text.corpus import Corpus
from par_data.text.mixture import interleave


def rows(first, number, *, context=4, packing="stream", seed=0):
    """Rows of documents whose only token is their number, `first` and on."""
    lengths = np.full(number, context) if packing == "stream" else np.arange(number) % context + 1
    corpus = Corpus(
        path=None,
        format="text",
        tokens=np.repeat(np.arange(first, first + number), lengths).astype(np.uint32),
        documents=np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64),
        hashes=np.zeros(number, np.uint64),
        trained=None,
        vocabulary=10**6,
        padding=0,
    )
    return PackedDataset(corpus, context=context, packing=packing, seed=seed)


@settings(max_examples=200)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    begin=st.integers(0, 10**6),
)
def test_interleave_holds_each_sources_fraction_in_any_range(weights, cuts, begin):
    number = sum(cuts)
    source, nth = interleave(weights, begin, number)
    starts = itertools.accumulate(cuts[:-1], initial=begin)
    parts = [interleave(weights, start, cut) for start, cut in zip(starts, cuts, strict=True)]
    assert np.concatenate([each for each, _ in parts]).tolist() == source.tolist()
    assert np.concatenate([each for _, each in parts]).tolist() == nth.tolist()
    for index, weight in enumerate(weights):
        mine = nth[source == index]
        assert mine.tolist() == list(range(mine[0], mine[0] + len(mine))) if len(mine) else True
        expected = number * weight / sum(weights)
        assert abs(len(mine) - expected) <= 1 + len(weights) * weight / sum(weights)
        if len(mine):
            assert abs(mine[0] - begin * weight / sum(weights)) <= 1 + len(weights) * weight / sum(weights)


def test_mixture_begins_in_the_order_of_its_weights():
    source, nth = interleave([2, 1], 0, 6)
    assert source.tolist() == [0, 0, 1, 0, 0, 1] or source.tolist() == [0, 1, 0, 0, 1, 0]
    assert nth[source == 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_without_weights_each_row_comes_once_an_epoch(packing):
    one, two = rows(0, 30, packing=packing), rows(100, 13, packing=packing, seed=1)
    mixed = MixtureDataset({"one": one, "two": two})
    for epoch in range(3):
        assert mixed.count(epoch) == one.count(epoch) + two.count(epoch)
        assert mixed.counts(epoch) == [one.count(epoch), two.count(epoch)]
        found = [mixed[index]["input_ids"].tolist() for index in iter(sampled(mixed, epoch))]
        every = [(source, row) for source in (one, two) for row in range(source.count(epoch))]
        alone = [source[epoch, row]["input_ids"].tolist() for source, row in every]
        assert sorted(found) == sorted(alone)


def sampled(dataset, epoch):
    sampler = dataset.sampler
    sampler.set_epoch(epoch)
    return sampler


def test_weighted_sources_start_their_epochs_independently():
    one, two = rows(0, 5, packing="whole"), rows(100, 40)
    mixed = MixtureDataset({"one": one, "two": two}, {"one": 3, "two": 1})
    found = [mixed[index]["input_ids"].tolist() for epoch in range(4) for index in sampled(mixed, epoch)]
    of_one = [each for each in found if each[0] < 100]
    of_two = [each for each in found if each[0] >= 100]
    assert len(of_two) == pytest.approx(len(found) / 4, abs=1)
    epochs = ((epoch, row) for epoch in itertools.count() for row in range(one.count(epoch)))
    assert of_one == [one[index]["input_ids"].tolist() for index in itertools.islice(epochs, len(of_one))]
    epochs = ((epoch, row) for epoch in itertools.count() for row in range(two.count(epoch)))
    assert of_two == [two[index]["input_ids"].tolist() for index in itertools.islice(epochs, len(of_two))]


def test_mixture_resumes_with_other_ranks_and_workers():
    mixed = MixtureDataset({"one": rows(0, 30, packing="whole"), "two": rows(100, 11)}, {"one": 1, "two": 2.5})

    def loader(replica=0, replicas=1, workers=0):
        plain = DataLoader(mixed, batch_size=12, sampler=mixed.sampler, drop_last=True, num_workers=workers)
        return ShardedDataLoader(plain, rank=replica, num_replicas=replicas, seed=3)

    def batches(some, number):
        found = []
        while len(found) < number:
            found += [batch["input_ids"].tolist() for batch in itertools.islice(some, number - len(found))]
        return found

    whole = batches(loader(), 9)
    for replicas in (1, 2, 3, 4):
        shares = [loader(replica, replicas, workers=int(replicas == 2)) for replica in range(replicas)]
        for share in shares:
            share.load_state_dict({"samples": 12 * 5})
        parts = [batches(share, 4) for share in shares]
        assert [list(itertools.chain(*batch)) for batch in zip(*parts, strict=True)] == whole[5:]


def test_pickled_mixture_has_no_index_of_an_epoch():
    mixed = MixtureDataset({"one": rows(0, 30)}, {"one": 1})
    before, size = mixed[0, 3], len(pickle.dumps(mixed))
    assert size == len(pickle.dumps(pickle.loads(pickle.dumps(mixed))))
    assert pickle.loads(pickle.dumps(mixed))[0, 3]["input_ids"].tolist() == before["input_ids"].tolist()


def test_mixture_rejects_wrong_sources_and_weights():
    one, two = rows(0, 5), rows(0, 5, context=8)
    for sources, weights, words in (
        ({}, None, r"sources=\{\}: there must be at least one"),
        (
            {"one": one, "two": two},
            None,
            r"sources have sequences of \{'one': 4, 'two': 8\} tokens: .*; use one context",
        ),
        ({"one": one}, {"two": 1}, "weights has 'two', which is not a source; use the names one"),
        ({"one": one}, {"one": 0}, r"weights\['one'\]=0: it must be above 0; set another, or remove the source"),
        ({"one": one}, {"one": float("nan")}, r"weights\['one'\]=nan: it must be above 0"),
        ({"one": one, "two": one}, {"one": 1}, "weights has no 'two': every source needs a weight"),
    ):
        with pytest.raises(ValueError, match=words):
            MixtureDataset(sources, weights)
