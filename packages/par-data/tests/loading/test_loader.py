"""Shares of global batches, compared with the batches that the plain DataLoader gives. No process is needed for it."""

import itertools
import multiprocessing
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from par_data import ShardedDataLoader
from par_testing import storm


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"number": index, "pair": (torch.full((3,), index), f"name {index}")}


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from range(start, self.count, step)


class Shuffled(Sampler):
    """Draws from Python's random numbers, one at a time, and notes the epochs it was told."""

    def __init__(self, count):
        self.count = count
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        left = list(range(self.count))
        while left:
            yield left.pop((random.randrange(len(left)) + self.epoch) % len(left))


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from torch.randperm(7).tolist()


class Buckets(Sampler):
    """Batches of changing sizes."""

    def __len__(self):
        return 3

    def __iter__(self):
        yield from random.sample([[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]], 3)


class Noisy(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(()), random.random(), np.random.rand()


def parts(loader, replicas, seed=0):
    return [ShardedDataLoader(loader, rank=each, num_replicas=replicas, seed=seed) for each in range(replicas)]


def take(loader, count):
    """The next batches as lists of numbers; at the end of an epoch it goes on with the next."""
    taken = []
    while len(taken) < count:
        for batch in loader:
            taken.append(batch["number"].tolist() if isinstance(batch, dict) else batch.tolist())
            if len(taken) == count:
                break
    return taken


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def joined(loaders, count):
    """Global batches, put together from the shares of all ranks."""
    return [flat(shares) for shares in zip(*(take(loader, count) for loader in loaders), strict=True)]


def assert_equal(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_single_replica_returns_the_batches_of_the_dataloader():
    dataset = TensorDataset(torch.arange(17), torch.arange(34.0).view(17, 2))
    for options in ({}, {"drop_last": True}, {"num_workers": 2}, {"collate_fn": lambda samples: {"all": samples}}):
        plain = DataLoader(dataset, batch_size=4, **options)
        ours = ShardedDataLoader(plain, rank=0, num_replicas=1, seed=0)
        assert len(ours) == len(plain)
        assert (ours.dataset, ours.batch_size) == (dataset, 4)
        for epoch in range(2):
            assert ours.epoch == epoch
            for batch, expected in zip(ours, plain, strict=True):
                assert_equal(batch, expected)


def test_shares_are_contiguous_and_make_up_each_global_batch():
    plain = DataLoader(Numbers(33), batch_size=15)
    for replicas in (1, 3, 5):
        if replicas == 5:
            plain = DataLoader(Numbers(37), batch_size=15)  # a last batch of 7: two ranks get 2, three get 1
        loaders = parts(plain, replicas)
        for shares in zip(*loaders, plain, strict=True):
            *mine, whole = shares
            assert max(len(each["number"]) for each in mine) - min(len(each["number"]) for each in mine) <= 1
            assert_equal(torch.cat([each["number"] for each in mine]), whole["number"])
            assert_equal(torch.cat([each["pair"][0] for each in mine]), whole["pair"][0])
            assert flat(each["pair"][1] for each in mine) == list(whole["pair"][1])


def test_epoch_is_a_permutation_by_seed_and_epoch_only():
    loader = DataLoader(Numbers(15), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(9))
    torch.manual_seed(1)
    one = joined(parts(loader, 1), 6)
    torch.manual_seed(2)
    assert joined(parts(loader, 3), 6) == one
    assert sorted(flat(one[:3])) == sorted(flat(one[3:])) == list(range(15))
    assert one[:3] != one[3:]
    assert joined(parts(loader, 3, seed=1), 3) != one[:3]


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(Numbers(10), replacement=True, num_samples=9),
        SubsetRandomSampler(range(3, 12), generator=torch.Generator()),
        WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 9),
        Shuffled(9),
        [8, 7, 6, 5, 4, 3, 2, 1, 0],
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_sampler_is_equal_on_all_ranks_and_after_a_resume(sampler):
    loader = DataLoader(Numbers(12), batch_size=3, sampler=sampler)
    expected = joined(parts(loader, 1), 8)
    assert expected[:3] != expected[3:6] or isinstance(sampler, list)
    loaders = parts(loader, 3)
    for each in loaders:
        each.load_state_dict({"samples": 12})
        assert each.epoch == 1
    assert joined(loaders, 4) == expected[4:]
    assert getattr(sampler, "epoch", None) is None  # the user's own was not touched


def test_batches_of_a_batch_sampler_are_shared_out():
    loader = DataLoader(Numbers(10), batch_sampler=Buckets())
    expected = joined(parts(loader, 1), 7)
    assert sorted(map(len, expected[:3])) == [2, 3, 5]
    loaders = parts(loader, 2)
    assert joined(loaders, 7) == expected
    assert loaders[0].samples == sum(map(len, expected))
    for each in loaders:
        each.load_state_dict({"samples": 10 + len(expected[3])})
    assert joined(loaders, 3) == expected[4:]


def test_endless_sampler_has_one_epoch():
    loader = DataLoader(Numbers(7), batch_sampler=BatchSampler(Endless(), 4, drop_last=False))
    expected = joined(parts(loader, 1), 30)
    loaders = parts(loader, 2)
    for each in loaders:
        each.load_state_dict({"samples": 80})
    assert joined(loaders, 10) == expected[20:]
    assert (loaders[0].epoch, loaders[0].batch_size) == (0, 4)


@pytest.mark.parametrize(("kind", "workers"), [("map", 0), storm("map", 2), ("stream", 0), ("stream", 2)])
def test_loader_resumes_with_another_num_replicas(kind, workers):
    dataset = Numbers(17) if kind == "map" else Stream(18)  # two workers: 6 + 6 + 3 + 3
    loader = DataLoader(dataset, batch_size=6, num_workers=workers, shuffle=True if kind == "map" else None)
    expected = joined(parts(loader, 1), 8)
    for before, after in ((2, 3), (3, 1)):
        for steps in range(8):
            loaders = parts(loader, before)
            assert joined(loaders, steps) == expected[:steps]
            state = loaders[0].state_dict()
            assert state == {"samples": sum(map(len, expected[:steps]))}
            loaders = parts(loader, after)
            for each in loaders:
                each.load_state_dict(state)
            assert joined(loaders, 8 - steps) == expected[steps:]
            if workers:
                break  # starting workers is slow


def test_loop_returns_the_rest_of_the_epoch():
    loader = ShardedDataLoader(DataLoader(Numbers(9), batch_size=3), rank=0, num_replicas=1, seed=0)
    firsts = []
    for batch in loader:
        firsts.append(int(batch["number"][0]))
        break
    assert (loader.samples, loader.epoch, len(loader)) == (3, 0, 3)
    firsts += [int(batch["number"][0]) for batch in loader]
    assert firsts == [0, 3, 6]
    assert (loader.samples, loader.epoch) == (9, 1)
    assert [int(batch["number"][0]) for batch in loader] == firsts
    assert [int(next(iter(loader))["number"][0]) for _ in range(4)] == [0, 3, 6, 0]  # never an empty rest
    assert (loader.samples, loader.epoch) == (30, 3)


def test_nested_loops_over_one_loader_end():
    loader = ShardedDataLoader(DataLoader(Numbers(9), batch_size=3), rank=0, num_replicas=1, seed=0)
    assert sum(1 for _ in loader for _ in loader) == 2
    assert loader.epoch == 1


def test_position_between_epochs_begins_the_next_epoch():
    for dataset in (Numbers(6), Stream(6)):
        loader = ShardedDataLoader(DataLoader(dataset, batch_size=3), rank=0, num_replicas=1, seed=0)
        loader.load_state_dict({"samples": 12})
        assert loader.epoch == 2
        assert take(loader, 2) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dataset", [Noisy(), Subset(Noisy(), range(12))], ids=["one by one", "at once"])
def test_random_numbers_of_a_dataset_are_those_of_its_samples(dataset):
    def loader(workers=0):
        return ShardedDataLoader(
            DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers, collate_fn=noisy_collate),
            rank=1,
            num_replicas=2,
            seed=3,
        )

    whole = loader()
    expected = [*whole, *whole]  # two epochs
    assert len({float(number) for batch in expected for numbers in batch for number in numbers}) == 6 * 4 * 2
    one, two = loader(), loader(workers=2)
    two.load_state_dict({"samples": 16})
    assert_equal([*two, *two][:2], expected[4:])
    for _ in one:
        random.random(), torch.rand(3), np.random.rand()  # what the program draws changes nothing
    assert_equal(list(one), expected[3:])


def noisy_collate(samples):
    return [torch.tensor([*sample, torch.rand(())], dtype=torch.float64) for sample in samples]


def test_loading_leaves_the_programs_random_numbers_unchanged():
    def draws():
        return torch.rand(()).item(), random.random(), np.random.rand()

    for dataset, shuffle in ((Noisy(), True), (Stream(12), None)):
        loader = ShardedDataLoader(DataLoader(dataset, batch_size=4, shuffle=shuffle), rank=0, num_replicas=1, seed=3)
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        expected = [draws() for _ in range(3)]
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        assert [draws() for _ in loader] == expected


class Opened(Dataset):
    file = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index, self.file, get_worker_info().dataset.file])


def open_file(worker):
    get_worker_info().dataset.file = 7


def test_workers_start_with_the_dataset_of_the_user_and_stay():
    plain = DataLoader(
        Opened(), batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=3, worker_init_fn=open_file
    )
    loader = ShardedDataLoader(plain, rank=1, num_replicas=2, seed=0)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[[2, 7, 7], [3, 7, 7]], [[6, 7, 7], [7, 7, 7]]]
    loader.load_state_dict({"samples": 4})
    assert [batch[:, 0].tolist() for batch in loader] == [[6, 7]]
    assert len(multiprocessing.active_children()) == 2
    del loader
    assert multiprocessing.active_children() == []  # they end with the loader, not when Python collects garbage


def test_stream_gets_set_epoch_and_equal_random_numbers():
    class Drawn(IterableDataset):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for _ in range(8):
                yield self.epoch + random.random()

    loaders = parts(DataLoader(Drawn(), batch_size=4), 2)
    expected = take(ShardedDataLoader(DataLoader(Drawn(), batch_size=4), rank=0, num_replicas=1, seed=0), 6)
    assert joined(loaders, 6) == expected
    assert [int(batch[0]) for batch in expected] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(TypeError, match="has no len"):
        len(loaders[0])


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
def test_uneven_shards_make_up_the_batches_of_one_rank(replicas):
    plain = partial(DataLoader, Numbers(24), batch_size=12, shuffle=True)
    whole = take(ShardedDataLoader(plain(), rank=0, num_replicas=1, seed=0), 4)
    loaders = [
        ShardedDataLoader(plain(), rank=rank, num_replicas=replicas, seed=0, uneven=True) for rank in range(replicas)
    ]
    assert joined(loaders, 4) == whole


def test_uneven_batch_smaller_than_the_ranks_raises():
    with pytest.raises(ValueError, match="a global batch has 2 samples, fewer than num_replicas=3"):
        ShardedDataLoader(DataLoader(Numbers(4), batch_size=2), rank=0, num_replicas=3, seed=0, uneven=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 5}, ["batch_size=5", "num_replicas=2 must divide it", "use batch_size=4"]),
        ({"batch_size": 1}, ["batch_size=1", "num_replicas=2 must divide it", "use batch_size=2"]),
        ({"batch_size": 6}, ["a global batch has 1 samples", "num_replicas=2", "drop_last=True"]),
        ({"batch_size": None}, ["batch_size=None", "set a batch_size"]),
        (
            {"batch_size": 2, "sampler": DistributedSampler(Numbers(13), num_replicas=2, rank=0)},
            ["DistributedSampler", "shuffle=True"],
        ),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(Numbers(13), num_replicas=2, rank=0), 2, True)},
            ["DistributedSampler"],
        ),
    ],
)
def test_constructor_rejects_batches_that_cannot_be_sharded(options, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are below
        parts(DataLoader(Numbers(13), **options), 2)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_batch_with_fewer_samples_than_ranks_raises_on_all():
    for loader in (DataLoader(Stream(7), batch_size=3), DataLoader(Numbers(10), batch_sampler=Buckets())):
        for each in parts(loader, 3):
            with pytest.raises(ValueError, match=r"a global batch has [12] samples, fewer than num_replicas=3"):
                take(each, 4)


@pytest.mark.parametrize(
    ("count", "samples", "words"),
    [
        (9, 4, "is 1 samples inside a global batch of 3"),
        (9, -3, "samples=-3 in the saved position"),
        (9, 2.5, "samples=2.5 in the saved position"),
        (0, 3, "the position is 3 samples further on, but epoch 0 has no batch"),
    ],
)
def test_load_state_dict_rejects_an_impossible_position(count, samples, words):
    for dataset in (Numbers(count), Stream(count)):
        loader = ShardedDataLoader(DataLoader(dataset, batch_size=3), rank=0, num_replicas=1, seed=0)
        with pytest.raises(ValueError, match=words):
            loader.load_state_dict({"samples": samples})


def test_constructor_rejects_a_list_and_a_rank_out_of_range():
    with pytest.raises(TypeError, match="loader is a list"):
        ShardedDataLoader([1, 2], rank=0, num_replicas=1, seed=0)
    with pytest.raises(ValueError, match="rank=2, num_replicas=2"):
        ShardedDataLoader(DataLoader(Numbers(4)), rank=2, num_replicas=2, seed=0)


class OwnGenerator(Sampler):
    """Draws the order from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, make, draw):
        self.random, self.draw = make(), draw

    def __len__(self):
        return 12

    def __iter__(self):
        return iter([int(each) for each in self.draw(self.random)])


class Counting(Sampler):
    """Counts its epochs itself."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 12

    def __iter__(self):
        yield from torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1


class Chained(Sampler):
    """Holds other samplers in a list."""

    def __init__(self, samplers):
        self.samplers = samplers

    def __len__(self):
        return 12

    def __iter__(self):
        return itertools.islice(itertools.chain(*self.samplers), 12)


OWN_GENERATORS = {
    "torch": lambda: OwnGenerator(torch.Generator, lambda own: torch.randperm(12, generator=own)),
    "numpy": lambda: OwnGenerator(np.random.default_rng, lambda own: own.permutation(12)),
    "RandomState": lambda: OwnGenerator(np.random.RandomState, lambda own: own.permutation(12)),
    "random": lambda: OwnGenerator(random.Random, lambda own: own.sample(range(12), 12)),
    "inside": lambda: Chained([OwnGenerator(np.random.default_rng, lambda own: own.permutation(12))]),
    "counting": Counting,
}


@pytest.mark.parametrize("make", OWN_GENERATORS.values(), ids=OWN_GENERATORS)
def test_order_of_a_sampler_with_a_generator_resumes(make):
    """Under any number of replicas, in a new process, and in the one that has read on."""
    dataset = TensorDataset(torch.arange(12))
    collate = {"collate_fn": lambda samples: torch.stack([number for (number,) in samples])}

    def loaders(replicas):
        return parts(DataLoader(dataset, batch_size=4, sampler=make(), **collate), replicas)

    [whole] = loaders(1)
    expected = take(whole, 9)  # three epochs
    epochs = [flat(expected[3 * epoch : 3 * epoch + 3]) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for replicas, loaded in ((1, [whole]), (1, loaders(1)), (2, loaders(2))):
        for loader in loaded:
            loader.load_state_dict({"samples": 16})
        assert joined(loaded, 5) == expected[4:], replicas
