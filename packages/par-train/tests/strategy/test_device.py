"""Batches come to the device of their rank; here it is torch's "meta", which every machine has."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from par_data import ShardedDataLoader, move_to_device
from par_layers import Tokens
from par_train import Plugin, Strategy
from par_train.strategy import batches as _batches
from par_train.strategy.plugins import DevicePlugin

META = torch.device("meta")


class Own(Plugin):
    """Takes care of devices itself."""

    name, controls_device = "own", True


def loader():
    return DataLoader(TensorDataset(torch.randn(6, 3), torch.ones(6, 2)), batch_size=2)


def test_device_plugin_sets_the_device_of_a_loader():
    data = ShardedDataLoader(loader(), rank=0, num_replicas=1, seed=0)
    assert DevicePlugin().setup_dataloader(data, SimpleNamespace(device=META)) is data
    assert [[each.device for each in batch] for batch in data] == [[META, META]] * 3


def test_execute_pipeline_moves_its_batch_unless_a_plugin_does(monkeypatch):
    taken = []
    monkeypatch.setattr(_batches, "move_to_device", lambda batch, device: taken.append(device) or batch)
    for plugins in ([], [Own()]):
        with Strategy(device="cpu", plugins=plugins) as strategy:
            module = nn.Linear(3, 2)
            model, optimizer = strategy.initialize(module, torch.optim.SGD(module.parameters(), lr=0.1))
            strategy.execute_pipeline(iter(loader()), model, nn.functional.mse_loss, optimizer)
    assert taken == [torch.device("cpu")]


def test_tokens_of_a_batch_stay_the_same_object():
    tokens = Tokens(4, 4, ((4,),), (((0, 4),),))
    ids, same = move_to_device((torch.zeros(2, 4), tokens), "meta")
    assert ids.is_meta
    assert same is tokens
