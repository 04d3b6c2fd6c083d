"""Loaders of other trainers whose ranks have seeded torch differently: one order on all, the same rows in a replica."""

import copy
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    random_split,
)

from par_data import get_random_states, hash_order, synchronize_draws

ROWS = 12


class Noisy(Dataset):
    """Rows with a random number of each kind."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index, torch.rand(()).item(), random.random(), np.random.rand()


class NoisyStream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(ROWS).tolist()
        yield from ((index, 0, 0, 0) for index in order)


class Shuffled(Sampler):
    """Draws from one of the program's generators."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(self.draw())


DRAWS = {
    "torch": lambda: torch.randperm(ROWS).tolist(),
    "random": lambda: random.sample(range(ROWS), ROWS),
    "numpy": lambda: np.random.permutation(ROWS).tolist(),
}


def collate(samples):
    return [*samples, (torch.rand(()).item(), random.random(), np.random.rand())]


def initialize_worker(worker):
    torch.manual_seed(torch.initial_seed() + initialize_worker.rank)  # as trainers do, by the rank


def program_states():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    return copy.deepcopy(get_random_states())  # numpy's is the holder itself


def read(make, rank, *, replica=None, replicas=1, epochs=1, resume=0):
    """What a rank reads, whose generators the strategy and the program have seeded by its number."""
    states = program_states()
    initialize_worker.rank = rank
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    loader = synchronize_draws(make(), states, rank=rank if replica is None else replica, num_replicas=replicas)
    if resume:
        loader.batch_sampler.set_epoch(resume)
    found = []
    for _ in range(epochs):
        for batch in loader:
            found.append(batch)
            torch.rand(3)  # as dropout does, on some ranks more than on others
            [torch.rand(1) for _ in range(rank)]
    return found


def indices_of(batches):
    return [row[0] for batch in batches for row in batch[:-1]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_data_ranks_draw_one_order_and_other_rows(draw, workers):
    def make():
        return DataLoader(
            Noisy(), batch_size=4, sampler=Shuffled(draw), collate_fn=collate, num_workers=workers,
            worker_init_fn=initialize_worker,
        )  # fmt: skip

    one, other = (read(make, rank, replicas=2, epochs=2) for rank in range(2))
    assert indices_of(one) == indices_of(other)
    assert sorted(indices_of(one)[:ROWS]) == list(range(ROWS))
    assert indices_of(one)[:ROWS] != indices_of(one)[ROWS:]
    noise = [{number for row in batch for number in row[-3:]} for batches in (one, other) for batch in batches]
    assert not any(a & b for number, a in enumerate(noise) for b in noise[number + 1 :])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_of_a_replica_read_the_same_rows(replicas, workers):
    def make():
        return DataLoader(
            Noisy(), batch_size=4, shuffle=True, collate_fn=collate, num_workers=workers,
            worker_init_fn=initialize_worker,
        )  # fmt: skip

    one, other = (read(make, rank, replica=0, replicas=replicas, epochs=2) for rank in range(2))
    assert one == other


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_is_read_alike_and_collated_by_replica(workers):
    def make():
        return DataLoader(NoisyStream(), batch_size=4, collate_fn=collate, num_workers=workers)

    one, same, other = (read(make, rank, replica=rank // 2, replicas=2, epochs=2) for rank in range(3))
    assert one == same
    assert indices_of(one) == indices_of(other)
    assert indices_of(one)[:ROWS] != indices_of(one)[ROWS:]
    assert [batch[-1] for batch in one] != [batch[-1] for batch in other]


def test_single_replica_reads_what_the_dataloader_reads():
    def make():
        return DataLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=collate)

    found = read(make, 1, replica=0, replicas=1, epochs=2)
    program_states()
    assert found == [batch for _ in range(2) for batch in make()]


def test_order_of_a_later_epoch_is_drawn_when_a_run_resumes():
    def make():
        return DataLoader(Noisy(), batch_size=4, sampler=SubsetRandomSampler(range(ROWS)), collate_fn=collate)

    expected = indices_of(read(make, 0, replicas=2, epochs=3))
    assert indices_of(read(make, 1, replicas=2, resume=2)) == expected[2 * ROWS :]


def test_programs_generators_go_on_as_if_nothing_was_drawn():
    states = program_states()
    loader = synchronize_draws(DataLoader(Noisy(), batch_size=4, shuffle=True), states, rank=0, num_replicas=2)
    torch.manual_seed(1)
    expected = torch.rand(6)
    torch.manual_seed(1)
    batches = iter(loader)
    found = [torch.rand(2) for _ in batches]
    assert torch.equal(torch.cat(found), expected)


def test_attributes_of_the_sampler_are_read_and_set_through():
    inner = BatchSampler(range(ROWS), 4, drop_last=False)
    states = program_states()
    loader = synchronize_draws(DataLoader(Noisy(), batch_sampler=inner), states, rank=0, num_replicas=1)
    assert (loader.batch_sampler.batch_size, len(loader)) == (4, 3)
    loader.batch_sampler.sampler = range(8)
    assert inner.sampler == range(8)
    assert len(loader) == 2
    with pytest.raises(AttributeError, match="absent"):
        loader.batch_sampler.absent  # noqa: B018


def test_order_of_samplers_tells_other_generators_and_indices():
    class Own(Sampler):
        def __init__(self, own, rank=0):
            self.own, self.rank = own, rank

    makes = [
        lambda seed: torch.Generator().manual_seed(seed),
        np.random.default_rng,
        np.random.RandomState,
        random.Random,
        lambda seed: [seed, 2],
        lambda seed: torch.tensor([seed]),
        lambda seed: Own(random.Random(seed)),
        lambda seed: [Own(random.Random(seed))],
        lambda seed: random_split(range(80), [40, 40], torch.Generator().manual_seed(seed))[0],
        lambda seed: ConcatDataset([Subset(range(8), [seed])]),
        lambda seed: seed,
    ]
    for make in makes:
        assert hash_order(Own(make(1))) == hash_order(Own(make(1), rank=1))
        assert hash_order(Own(make(1))) != hash_order(Own(make(2)))
        assert hash_order(Own(make(1)), leave_out=("own",)) == hash_order(Own(make(2)), leave_out=("own",))
