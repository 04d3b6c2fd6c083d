"""What one rank reads for its group: every batch that a loader may give, and every error."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from par_data import ShardedDataLoader
from par_data.loading.broadcast import Broadcaster, read_message, write_message
from par_testing import count_collectives, for_each

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Sample:
    """As a dataset may give it."""

    ids: torch.Tensor
    name: str


@dataclass(frozen=True)
class Tokens:
    """What ranks of a sequence are given beside the batch: it has no tensor, and compares by its values."""

    length: int
    documents: tuple[tuple[int, ...], ...]


class Encoding(UserDict):
    """As tokenizers give it."""


class Rows(torch.Tensor):
    """A class of tensors of the user's own."""


def empty(size):
    return torch.empty(size, dtype=torch.uint8)


def sent(value):
    return read_message(write_message(value, empty))


DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4, 5)], ids=str)
def test_tensors_come_with_their_bits_dtype_and_shape(shape, dtype):
    value = torch.randint(0, 2, shape).to(dtype)
    found, again = sent((value, [value]))
    assert (found.dtype, found.shape) == (dtype, shape)
    assert torch.equal(found, value)
    assert again[0] is found, "one tensor stays one"


def test_message_round_trip_keeps_the_nesting():
    ids = torch.arange(6).view(2, 3)
    value = {
        "x": [ids, None, "text", 3, torch.Tensor, torch.float16],
        "pair": Pair(ids.double(), 3),
        "encoding": Encoding(ids=ids),
        "sample": Sample(ids, "name"),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "tokens": Tokens(4, ((4,),)),
        "rows": torch.ones(2).as_subclass(Rows),
        "sparse": torch.eye(3).to_sparse(),
        "number": ids.numpy(),
        "trained": torch.ones(2, requires_grad=True),
    }
    found = sent(value)
    assert list(found) == list(value)
    assert torch.equal(found["x"][0], ids)
    assert found["x"][1:] == value["x"][1:]
    assert (type(found["pair"]), type(found["encoding"]), type(found["sample"])) == (Pair, Encoding, Sample)
    assert torch.equal(found["pair"].first, ids.double())
    assert torch.equal(found["encoding"]["ids"], ids)
    assert (torch.equal(found["sample"].ids, ids), found["sample"].name) == (True, "name")
    assert isinstance(found["packed"], PackedSequence)
    assert torch.equal(found["packed"].data, value["packed"].data)
    assert found["tokens"] == value["tokens"]
    assert type(found["rows"]) is Rows
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert (found["number"] == ids.numpy()).all()
    assert found["trained"].requires_grad


def test_message_holds_only_visible_elements_of_a_view():
    whole = torch.randn(1000, 3, 4, 4)
    image = whole[:2].contiguous(memory_format=torch.channels_last)
    found = sent({"image": image, "part": whole[:2, :, ::2], "same": whole[:1].expand(5, 3, 4, 4)})
    assert found["image"].is_contiguous(memory_format=torch.channels_last)
    for name, value in (("image", image), ("part", whole[:2, :, ::2]), ("same", whole[:1].expand(5, 3, 4, 4))):
        assert torch.equal(found[name], value)
        assert found[name].stride() == value.clone().stride()
    assert write_message(whole[:2], empty).numel() < 2 * 3 * 4 * 4 * 4 + 512


def test_in_place_write_keeps_gradients_of_other_tensors():
    weight = torch.ones(2, requires_grad=True)
    inputs, labels = sent((torch.ones(2), torch.ones(2)))
    loss = (inputs * weight).sum()
    labels.fill_(0)  # as a loop does that leaves targets out
    loss.backward()
    assert weight.grad.tolist() == [1, 1]
    assert inputs.tolist() == [1, 1]


SIZES = [10, 10, 9, 5000, 5000, 4999, 1]
"""Numbers of the tensor in each message; the second of each pair is one broadcast."""


@pytest.mark.ranks(2)
def test_message_of_the_last_size_takes_one_broadcast():
    reader = Broadcaster(dist.group.WORLD)
    broadcasts = []
    for size in SIZES:
        with count_collectives() as counted:
            found = reader.read(lambda size=size: {"x": torch.arange(size)} if dist.get_rank() == 0 else 1 / 0)
        assert found["x"].tolist() == list(range(size))
        broadcasts.append(counted.calls("broadcast"))
    assert broadcasts == [1, 1, 1, 2, 1, 1, 1]


@pytest.mark.ranks(2)
def test_read_error_of_the_first_rank_raises_on_all():
    reader = Broadcaster(dist.group.WORLD)
    reads = dist.get_rank() == 0

    def fail():
        raise OSError("no such file: part-3.parquet")

    with pytest.raises(OSError if reads else ValueError) as caught:
        reader.read(fail)
    assert str(caught.value) == f"{'' if reads else 'rank 0: OSError: '}no such file: part-3.parquet"
    with pytest.raises(ValueError, match=r"a batch cannot be sent .* or let every rank load its own batches"):
        reader.read(lambda: [torch.ones(2), lambda: None])
    assert reader.read(lambda: "goes on") == "goes on"


class Read(Dataset):
    """Notes what is read; and what is below 0 cannot be."""

    def __init__(self, count, wrong=None):
        self.count, self.wrong, self.read = count, wrong, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        if index == self.wrong:
            raise OSError(f"sample {index} is broken")
        return {"number": index, "noise": torch.rand(2)}


class Streamed(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        worker = get_worker_info()
        begin, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.dataset[index] for index in range(begin, len(self.dataset), step))


def flat(batches):
    return [(batch["number"].tolist(), batch["noise"].tolist()) for batch in batches]


KINDS = {
    "map": {"shuffle": True},
    "workers": {"shuffle": True, "num_workers": 1, "multiprocessing_context": "fork"},
    "stream": {},
}
forks_with_threads = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@forks_with_threads
@for_each(kind=KINDS)
@pytest.mark.ranks(2)
def test_replica_group_broadcasts_what_each_rank_would_read(kind):
    def loader(dataset, group=None, replica=1):
        plain = DataLoader(Streamed(dataset) if kind == "stream" else dataset, batch_size=4, **KINDS[kind])
        return ShardedDataLoader(plain, rank=replica, num_replicas=2, seed=3, replica_group=group)

    alone, shared, dataset = loader(Read(14)), Read(14), Read(14)
    expected = flat([*alone, *alone])
    ours = loader(dataset, dist.group.WORLD)
    state = torch.get_rng_state()
    found = flat(list(ours))
    assert (ours.samples, ours.epoch) == (14, 1)
    assert found + flat(list(ours)) == expected
    assert torch.equal(state, torch.get_rng_state()), "nothing of the program was drawn"
    assert bool(dataset.read) == (dist.get_rank() == 0 and kind != "workers")
    resumed = loader(shared, dist.group.WORLD)
    resumed.load_state_dict({"samples": 14 + 8})
    assert (resumed.epoch, resumed.samples) == (1, 22)
    assert flat(list(resumed)) == expected[6:]
    assert bool(shared.read) == (dist.get_rank() == 0 and kind != "workers")


@pytest.mark.ranks(2)
def test_unreadable_sample_and_bad_position_raise_on_all_ranks():
    plain = DataLoader(Read(8, wrong=5), batch_size=2)
    loader = ShardedDataLoader(plain, rank=0, num_replicas=1, seed=0, replica_group=dist.group.WORLD)
    reads = dist.get_rank() == 0
    batches = iter(loader)
    assert [next(batches)["number"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError if reads else ValueError, match="sample 5 is broken"):
        next(batches)
    with pytest.raises(ValueError, match="is 1 samples inside a global batch of 2"):
        loader.load_state_dict({"samples": 3})
