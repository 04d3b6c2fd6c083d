"""Batches come to the device of their rank; here it is torch's "meta", which every machine has."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from par_layers import Tokens
from par_train import GlobalDataLoader, Plugin, Strategy
from par_train.data.place import placed
from par_train.strategy import strategy as _strategy
from par_train.strategy.plugins import Device

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


class Own(Plugin):
    """Takes care of devices itself."""

    name, controls_device = "own", True


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
    found = placed(batch, "meta")
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
    found = placed(packed, META)
    assert (found.data.device, found.batch_sizes.device) == (META, torch.device("cpu"))


def test_what_does_not_give_itself_is_refused():
    with pytest.raises(TypeError, match=r"to\('meta'\) of a Graph in a batch gave a NoneType; make it give the Graph"):
        placed([Graph(moves=False)], META)


def test_nothing_is_touched_on_the_cpu():
    batch = {"x": torch.arange(3), "graph": Graph(moves=False)}
    assert placed(batch, torch.device("cpu")) is batch


def loader():
    return DataLoader(TensorDataset(torch.randn(6, 3), torch.ones(6, 2)), batch_size=2)


def test_a_loader_gives_its_batches_where_the_strategy_computes():
    data = GlobalDataLoader(loader(), replica=0, replicas=1, seed=0)
    assert Device().setup_dataloader(data, SimpleNamespace(device=META)) is data
    assert [[each.device for each in batch] for batch in data] == [[META, META]] * 3


def test_a_step_in_microbatches_takes_its_batch_there_unless_a_plugin_sees_to_that(monkeypatch):
    taken = []
    monkeypatch.setattr(_strategy, "placed", lambda batch, device: taken.append(device) or batch)
    for plugins in ([], [Own()]):
        with Strategy(device="cpu", plugins=plugins) as strategy:
            module = nn.Linear(3, 2)
            model, optimizer = strategy.initialize(module, torch.optim.SGD(module.parameters(), lr=0.1))
            strategy.execute_pipeline(iter(loader()), model, nn.functional.mse_loss, optimizer)
    assert taken == [torch.device("cpu")]


def test_who_has_which_tokens_stays_the_object_that_it_is():
    tokens = Tokens(4, 4, ((4,),), (((0, 4),),))
    ids, same = placed((torch.zeros(2, 4), tokens), "meta")
    assert ids.is_meta
    assert same is tokens
