"""From every kind of file to the batches of a run that is stopped and goes on: no row comes twice or is left out."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from par_data import MixtureDataset, PackedDataset, ShardedDataLoader, open_corpus, read_corpus
from par_testing import storm

BATCH, CONTEXT = 12, 48


def lines(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def make_text(tiny, folder, **options):
    return PackedDataset(read_corpus(tiny[1]["text"], tiny[0], folder), context=CONTEXT, **options)


def make_jsonl(tiny, folder, **options):
    return PackedDataset(read_corpus(tiny[1]["jsonl"], tiny[0], folder), context=CONTEXT, **options)


def make_parquet(tiny, folder):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": lines(tiny[1]["jsonl"])}), folder / "c.parquet", row_group_size=7)
    return PackedDataset(read_corpus(folder / "c.parquet", tiny[0], folder), context=CONTEXT)


def make_tokens(tiny, folder):
    """What another run has written, mapped as it is."""
    place = read_corpus(tiny[1]["text"], tiny[0], folder).path
    return PackedDataset(open_corpus(place), context=CONTEXT)


def make_stream(tiny, folder):
    return make_jsonl(tiny, folder, packing="stream")


def make_mixture(tiny, folder):
    return MixtureDataset({"text": make_text(tiny, folder), "jsonl": make_jsonl(tiny, folder)}, {"text": 2, "jsonl": 1})


KINDS = [
    *map(storm, (make_text, make_jsonl, make_tokens, make_parquet)),  # the mixture has most of them
    *(make_stream, make_mixture),
]


def parts(rows, replicas):
    plain = DataLoader(rows, batch_size=BATCH, sampler=rows.sampler, drop_last=True)
    return [ShardedDataLoader(plain, rank=each, num_replicas=replicas, seed=4) for each in range(replicas)]


def taken(loaders, count):
    """The rows of some global batches, put together from the shares of all ranks, as what is trained on."""
    found = []
    for _ in range(count):
        shares = [next(iter(loader)) for loader in loaders]
        whole = {name: torch.cat([share[name] for share in shares]) for name in shares[0]}
        found += [tuple(map(tuple, row)) for row in torch.stack(list(whole.values()), dim=1).tolist()]
    return found


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__.removeprefix("make_"))
def test_resume_on_1_to_4_ranks_repeats_and_skips_no_sequence(make, tiny, tmp_path):
    rows = make(tiny, tmp_path)
    of_epochs = [rows.count(epoch) // BATCH for epoch in range(2)]
    every = sum(of_epochs) + 1  # two epochs, and the beginning of the third
    expected = taken(parts(rows, 1), every)
    read = [tuple(tuple(part.tolist()) for part in rows[0, row].values()) for row in range(of_epochs[0] * BATCH)]
    assert expected[: of_epochs[0] * BATCH] == read
    found, state = [], parts(rows, 1)[0].state_dict()
    for steps, replicas in zip([1, 2, 0, 1, every - 4], [3, 2, 1, 4, 3], strict=True):
        loaders = parts(make(tiny, tmp_path), replicas)
        for loader in loaders:
            loader.load_state_dict(state)
        found += taken(loaders, steps)
        state = loaders[-1].state_dict()
    assert found == expected
    assert state["samples"] == len(expected)


def test_load_state_dict_rejects_other_data(tiny, tmp_path):
    [loader] = parts(make_text(tiny, tmp_path), 1)
    next(iter(loader))
    state = loader.state_dict()
    longer = tmp_path / "longer.txt"
    longer.write_text(Path(tiny[1]["text"]).read_text() + "one more line\n")
    corpus, more = (read_corpus(path, tiny[0], tmp_path) for path in (tiny[1]["text"], longer))
    for rows in (
        PackedDataset(more, context=CONTEXT),
        PackedDataset(corpus, context=CONTEXT - 1),
        PackedDataset(corpus, context=CONTEXT, packing="stream"),
        PackedDataset(corpus, context=CONTEXT, seed=1),
        PackedDataset(corpus, context=CONTEXT, documents=range(1, len(corpus))),
        MixtureDataset({"text": PackedDataset(corpus, context=CONTEXT)}),
    ):
        [other] = parts(rows, 1)
        with pytest.raises(
            ValueError, match=r"Dataset has other samples than the dataset of the saved position; restore"
        ):
            other.load_state_dict(state)
        assert other.samples == 0
    [same] = parts(PackedDataset(corpus, context=CONTEXT), 1)
    same.load_state_dict(state)
    same.load_state_dict({"samples": BATCH})  # of a loader that knew no digest
    assert same.samples == BATCH


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}], ids=str)
def test_torchdata_stateful_loader_is_a_dataloader(options):
    """It gives what a DataLoader gives, and goes on by our position, without a state of its own."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def batches(kind, state=None):
        loader = ShardedDataLoader(
            kind(TensorDataset(torch.arange(31)), batch_size=6, **options), rank=0, num_replicas=1, seed=2
        )
        loader.load_state_dict(state or {"samples": 0})
        return [batch.tolist() for [batch] in [*loader, *loader]]

    assert batches(stateful) == batches(DataLoader)
    assert batches(stateful, {"samples": 18}) == batches(DataLoader)[3:]
