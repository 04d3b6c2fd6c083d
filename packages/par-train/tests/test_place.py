"""Batches come to the device of their rank; here it is torch's "meta", which every machine has."""

from collections import namedtuple

import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from par_train import GlobalDataLoader
from par_train._place import placed

META = torch.device("meta")
Pair = namedtuple("Pair", ["first", "second"])


class Encoding:
    """As tokenizers of Hugging Face give it."""

    def __init__(self, ids):
        self.ids = ids

    def to(self, device):
        return Encoding(self.ids.to(device))


def test_tensors_in_containers_are_moved_and_the_rest_stays():
    ids = torch.arange(3)
    found = placed({"x": [ids, None, "text"], "y": Pair(ids.double(), 3), "z": Encoding(ids)}, META)
    assert (found["x"][0].device, found["x"][0].dtype, found["x"][0].shape) == (META, torch.int64, (3,))
    assert found["x"][1:] == [None, "text"]
    assert (type(found["y"]), found["y"].first.device, found["y"].second) == (Pair, META, 3)
    assert found["z"].ids.device == META


def test_packed_sequences_move_as_torch_moves_them():
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    found = placed(packed, META)
    assert (found.data.device, found.batch_sizes.device) == (META, torch.device("cpu"))


def test_nothing_is_touched_on_the_cpu():
    batch = {"x": torch.arange(3)}
    assert placed(batch, torch.device("cpu")) is batch


def test_a_loader_gives_its_batches_where_it_is_told_to():
    plain = DataLoader(TensorDataset(torch.arange(6), torch.ones(6)), batch_size=2)
    loader = GlobalDataLoader(plain, replica=0, replicas=1, seed=0)
    loader.device = META
    assert [[each.device for each in batch] for batch in loader] == [[META, META]] * 3
