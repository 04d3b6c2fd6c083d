"""Batches come to the device of their rank; here it is torch's "meta", which every machine has."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from par_data import ShardedDataLoader, move_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["first", "second"])


class Encoding(UserDict):
    """As tokenizers of Hugging Face give it: its own `to` changes it."""

    def to(self, device):
        raise AssertionError("the caller's encoding would be changed")


class Rows(list):
    """A list of the user's own."""


@dataclass
class Sample:
    """As a dataset may give it."""

    ids: torch.Tensor
    name: str


class Graph:
    """Moves itself, or claims to."""

    def __init__(self, moves=True):
        self.moves, self.device = moves, "cpu"

    def to(self, device):
        moved = Graph()
        moved.device = device
        return moved if self.moves else None


def test_tensors_in_containers_are_moved_and_the_rest_stays():
    ids = torch.arange(3)
    batch = {
        "x": [ids, None, "text", torch.Tensor],
        "pair": Pair(ids.double(), 3),
        "encoding": Encoding(ids=ids),
        "proxy": MappingProxyType({"ids": ids}),
        "rows": Rows([ids]),
        "sample": Sample(ids, "name"),
        "graph": Graph(),
    }
    found = move_to_device(batch, "meta")
    assert (found["x"][0].device, found["x"][0].dtype, found["x"][0].shape) == (META, torch.int64, (3,))
    assert found["x"][1:] == [None, "text", torch.Tensor]
    assert (type(found["pair"]), found["pair"].first.device, found["pair"].second) == (Pair, META, 3)
    assert (type(found["encoding"]), found["encoding"]["ids"].device) == (Encoding, META)
    assert (type(found["proxy"]), found["proxy"]["ids"].device) == (MappingProxyType, META)
    assert (type(found["rows"]), found["rows"][0].device) == (Rows, META)
    assert (found["sample"].ids.device, found["sample"].name) == (META, "name")
    assert found["graph"].device == META
    assert {each.device.type for each in (batch["x"][0], batch["encoding"]["ids"], batch["sample"].ids)} == {"cpu"}


def test_packed_sequences_move_as_torch_moves_them():
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    found = move_to_device(packed, META)
    assert (found.data.device, found.batch_sizes.device) == (META, torch.device("cpu"))


def test_to_that_returns_another_class_raises():
    with pytest.raises(
        TypeError, match=r"to\('meta'\) of a Graph in a batch returned a NoneType: it must return a Graph"
    ):
        move_to_device([Graph(moves=False)], META)


def test_nothing_is_touched_on_the_cpu():
    batch = {"x": torch.arange(3), "graph": Graph(moves=False)}
    assert move_to_device(batch, torch.device("cpu")) is batch


class Counts:
    """Stays where it is."""

    def to(self, device):
        return self


def test_object_whose_to_returns_itself_stays_the_same_object():
    counts = Counts()
    ids, same = move_to_device((torch.zeros(2, 4), counts), "meta")
    assert ids.is_meta
    assert same is counts


def test_loader_moves_its_batches_to_its_device():
    loader = DataLoader(TensorDataset(torch.randn(6, 3), torch.ones(6, 2)), batch_size=2)
    data = ShardedDataLoader(loader, rank=0, num_replicas=1, seed=0)
    data.device = META
    assert [[each.device for each in batch] for batch in data] == [[META, META]] * 3
