"""Streams that say how they are sharded: which ranks open which shards, in the same order under any number of ranks."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from par_data import ShardedDataLoader
from par_groups import ProcessGroups, Topology
from par_testing import for_each

BATCH = 12


class Shards(IterableDataset):
    """Shards of numbers: shard s has 100 s, 100 s + 1 ... Notes which are opened."""

    def __init__(self, sizes, numbers=None, opened=None):
        self.sizes = sizes
        self.numbers = list(range(len(sizes))) if numbers is None else numbers
        self.opened = [] if opened is None else opened
        self.epoch = 0

    @property
    def num_shards(self):
        return len(self.numbers)

    def shard(self, num_shards, index):
        return type(self)(self.sizes, self.numbers[index::num_shards], self.opened)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in self.numbers:
            self.opened.append(number)
            for place in range(self.sizes[number]):
                yield 100 * number + place, self.epoch, random.random()


class Skipping(Shards):
    """Goes on behind some samples by itself, and notes it."""

    skipped = 0

    def skip(self, count):
        self.opened.append(f"skips {count}")
        later = type(self)(self.sizes, self.numbers, self.opened)
        later.skipped = count
        return later

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.skipped, None)


def parts(dataset, replicas, **options):
    plain = DataLoader(dataset, batch_size=BATCH, **options)
    return [ShardedDataLoader(plain, rank=each, num_replicas=replicas, seed=3) for each in range(replicas)]


def taken(loaders, count):
    """Global batches of (number, epoch, drawn), put together from the shares of all ranks."""
    found = []
    for _ in range(count):
        shares = [next(iter(loader)) for loader in loaders]
        found.append([torch.cat([share[part] for share in shares]).tolist() for part in range(3)])
    return found


SIZES = [9, 10, 11, 12, 13, 9, 10, 11]


@pytest.mark.parametrize(("shards", "lanes"), [(8, 6), (5, 4), (4, 4), (3, 3), (30, 12)])
def test_lanes_fill_their_places_until_the_first_one_ends(shards, lanes):
    sizes = [SIZES[number % 8] for number in range(shards)]
    [loader] = parts(Shards(sizes), 1)
    each = BATCH // lanes
    streams = [
        [100 * s + place for s in range(lane, shards, lanes) for place in range(sizes[s])] for lane in range(lanes)
    ]
    batches = min(len(stream) for stream in streams) // each
    expected = [[number for stream in streams for number in stream[n * each : (n + 1) * each]] for n in range(batches)]
    for epoch in range(2):
        assert [batch[0].tolist() for batch in loader] == expected
        assert (loader.epoch, loader.samples) == (epoch + 1, (epoch + 1) * BATCH * batches)
    with pytest.raises(TypeError, match="ends with the first lane that ends"):
        len(loader)


@pytest.mark.parametrize("kind", [Shards, Skipping])
def test_lanes_resume_on_other_ranks_and_with_a_worker(kind):
    expected = taken(parts(kind(SIZES), 1), 12)
    assert len({number for batch in expected for number in batch[2]}) > 100, "random numbers differ"
    assert {epoch for batch in expected for epoch in batch[1]} == {0, 1, 2}
    for replicas, steps in itertools.product((1, 2, 3, 4), (0, 3, 4, 5, 8)):
        before = parts(kind(SIZES), replicas)
        assert taken(before, steps) == expected[:steps]
        after = parts(kind(SIZES), replicas % 4 + 1)
        for loader in after:
            loader.load_state_dict(before[0].state_dict())
        assert taken(after, 12 - steps) == expected[steps:], (replicas, steps)


def test_persistent_worker_reads_the_lanes_of_each_epoch():
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    expected = taken(parts(Shards(SIZES), 1), 9)
    loaders = parts(Shards(SIZES), 2, **options)
    assert taken(loaders, 9) == expected
    for loader in loaders:
        loader.load_state_dict({"samples": 2 * BATCH, "epoch": 0, "begin": 0, "lanes": 6})
    assert taken(loaders, 7) == expected[2:]


def test_lanes_resume_with_skip_of_the_dataset():
    dataset = Skipping([24] * 6)
    [loader] = parts(dataset, 1)
    loader.load_state_dict({"samples": 3 * BATCH, "epoch": 0, "begin": 0, "lanes": 6})
    assert taken([loader], 1)[0][0] == [100 * lane + 6 + place for lane in range(6) for place in range(2)]
    assert dataset.opened.count("skips 6") == 6


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"samples": 24},
            "saved with 1 lanes, and this stream has 6: .*; use the batch_size and the number of",
        ),
        ({"samples": 24, "epoch": 0, "begin": 0, "lanes": 4}, "saved with 4 lanes, and this stream has 6"),
        ({"samples": 25, "epoch": 0, "begin": 0, "lanes": 6}, "is 1 samples inside a global batch of 12"),
    ],
)
def test_load_state_dict_rejects_another_number_of_lanes(state, words):
    with pytest.raises(ValueError, match=words):
        parts(Shards(SIZES), 1)[0].load_state_dict(state)


def test_lanes_reject_two_workers_and_a_stream_without_lanes():
    with pytest.raises(ValueError, match=r"num_workers=2: .* a stream of 6 lanes; set num_workers=1"):
        parts(Shards(SIZES), 1, num_workers=2)
    with pytest.raises(ValueError, match="saved with 6 lanes, and this stream has 1"):
        parts(Shards([30]), 1)[0].load_state_dict({"samples": 0, "epoch": 0, "begin": 0, "lanes": 6})


class Broken(Shards):
    """A shard of which one sample cannot be read."""

    def __iter__(self):
        for sample in super().__iter__():
            if sample[0] == 203:
                raise OSError("shard 2 is broken")
            yield sample


RUNS = {"four data ranks": {"data": 4, "pipeline": 1}, "two of two pipeline ranks": {"data": 2, "pipeline": 2}}


@for_each(name=RUNS)
@pytest.mark.ranks(4)
def test_rank_opens_only_the_shards_of_its_own_lanes(name):
    """Six lanes of two samples a batch: of four ranks with three samples each, two share a lane."""
    expected = taken(parts(Shards(SIZES), 1), 9)
    dataset = Shards(SIZES)
    with ProcessGroups(Topology(RUNS[name])) as groups:
        replica, replicas = groups.rank("data"), groups.size("data")
        plain = DataLoader(dataset, batch_size=BATCH)
        shared = {"replica_group": groups["pipeline"], "data_group": groups["data"]}
        loader = ShardedDataLoader(plain, rank=replica, num_replicas=replicas, seed=3, **shared)
        for batch in expected:
            own = slice(replica * BATCH // replicas, (replica + 1) * BATCH // replicas)
            assert [part.tolist() for part in next(iter(loader))] == [part[own] for part in batch]
        reads = groups.rank("pipeline") == 0
        lanes = range(replica * 6 // replicas, -(-(replica + 1) * 6 // replicas))
        assert {number % 6 for number in dataset.opened} == (set(lanes) if reads else set())
        loader.load_state_dict({"samples": 4 * BATCH, "epoch": 0, "begin": 0, "lanes": 6})
        assert next(iter(loader))[0].tolist() == expected[4][0][own]


@pytest.mark.ranks(2)
def test_unreadable_shard_of_one_data_rank_raises_on_all_ranks():
    plain = DataLoader(Broken([8, 8, 8, 8]), batch_size=4)
    loader = ShardedDataLoader(plain, rank=dist.get_rank(), num_replicas=2, seed=0, data_group=dist.group.WORLD)
    for _ in range(3):
        next(iter(loader))
    with pytest.raises(OSError if dist.get_rank() else ValueError, match=r"^(rank 1: OSError: )?shard 2 is broken$"):
        next(iter(loader))
