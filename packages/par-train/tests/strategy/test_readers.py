"""One rank of each replica reads the batches of all of them; under every axis, and after a resume under another one."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, random_split

from par_data import ShardedDataLoader
from par_groups import ProcessGroups, Topology
from par_testing import for_each
from par_train import Strategy

BATCH, COUNT = 12, 31  # the last batch of an epoch has 7, which no number of ranks below divides


class Read(Dataset):
    """Notes what is read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((4,), index), torch.rand(3)


def plain(dataset):
    return DataLoader(dataset, batch_size=BATCH, shuffle=True)


def expected(replica, replicas):
    """The batches of two epochs, as each rank of a replica would read them."""
    loader = ShardedDataLoader(plain(Read()), rank=replica, num_replicas=replicas, seed=5)
    return [*loader, *loader]


def assert_goes_on(parallel, state, begin, steps, broadcasts=True):
    """Takes some batches from a position on, which lies behind `begin` batches, and gives the new position."""
    with Strategy(parallel=parallel, seed=5, broadcast_batches=broadcasts) as strategy:
        groups, dataset = strategy.groups, Read()
        loader = strategy.initialize(plain(dataset))
        loader.transform = None  # sequence ranks would have other parts of the same batches
        loader.load_state_dict(state)
        mine = expected(groups.rank("data"), groups.size("data"))[begin : begin + steps]
        for batch in mine:
            assert all(map(torch.equal, next(iter(loader)), batch)), (parallel, begin)
        replica = [rank for rank in range(dist.get_world_size()) if is_in_replica(rank, groups)]
        reads = not broadcasts or dist.get_rank() == replica[0]
        assert len(dataset.read) == (sum(len(batch[0]) for batch in mine) if reads else 0)
        return loader.state_dict()


def is_in_replica(rank, groups):
    return groups.topology.index("data", rank) == groups.rank("data")


def assert_all_go_on(*parallels):
    state, begin = {"samples": 0}, 0
    for parallel, steps in zip(parallels, (1, 2, 1, 1, 1), strict=False):
        state = assert_goes_on(parallel, state, begin, steps)
        begin += steps


TENSOR = {"size": 2, "mode": "1d"}


@pytest.mark.ranks(4)
def test_one_rank_of_each_replica_reads_and_a_run_goes_on_under_other_axes():
    """Two data ranks with tensor, pipeline and sequence ranks, then four, then one."""
    assert_all_go_on({"tensor": TENSOR}, {"pipeline": 2}, {"sequence": 2}, {}, {"tensor": {"size": 4, "mode": "2d"}})
    assert_goes_on({"tensor": TENSOR}, {"samples": BATCH}, 1, 2, broadcasts=False)


@pytest.mark.ranks(6)
def test_three_data_ranks_go_on_where_others_stopped():
    assert_all_go_on({"pipeline": 3}, {"tensor": TENSOR}, {"pipeline": 3, "sequence": 2}, {"sequence": 2})


@pytest.mark.ranks(2)
def test_groups_that_are_given_get_what_readers_need():
    topology = Topology.from_config({"tensor": TENSOR}, 2)
    with ProcessGroups(topology) as groups, Strategy(parallel=groups) as strategy:
        dataset = Read()
        loader = strategy.initialize(plain(dataset))
        assert sum(len(batch[0]) for batch in loader) == COUNT
        assert len(dataset.read) == (COUNT if dist.get_rank() == 0 else 0)


@pytest.mark.ranks(2)
def test_ranks_that_read_otherwise_are_refused():
    with pytest.raises(ValueError, match="rank 1 has other options than rank 0"):
        Strategy(broadcast_batches=dist.get_rank() == 0)
    with pytest.raises(TypeError, match="broadcast_batches='one': it must be a bool; pass True or False"):
        Strategy(broadcast_batches="one")


@pytest.mark.ranks(2)
def test_a_file_that_the_reader_misses_is_one_line_on_all_ranks():
    class Missing(Read):
        def __getitem__(self, index):
            raise FileNotFoundError(f"sample {index} is in no file")

    with Strategy(parallel={"pipeline": 2}) as strategy:
        loader = strategy.initialize(plain(Missing()))
        with pytest.raises(
            (FileNotFoundError, ValueError), match=r"^(rank 0: FileNotFoundError: )?sample \d+ is in no"
        ):
            next(iter(loader))


def split_per_rank():
    return DataLoader(random_split(range(40), [32, 8])[0], batch_size=BATCH, shuffle=True)


def listed_per_rank():
    return DataLoader(range(40), batch_size=BATCH, sampler=torch.randperm(40).tolist())


@for_each(make=(split_per_rank, listed_per_rank))
@pytest.mark.ranks(2)
def test_rows_drawn_on_each_rank_raise(make):
    """Each rank has split the dataset, or shuffled it, with random numbers of its own."""
    torch.manual_seed(dist.get_rank())
    with (
        Strategy() as strategy,
        pytest.raises(ValueError, match=r"ranks \[1\] would draw another order than rank 0.*from one seed"),
    ):
        strategy.initialize(make())
    torch.manual_seed(0)
    with Strategy() as strategy:
        assert list(strategy.initialize(make()))
