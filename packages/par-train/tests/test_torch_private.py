"""Every API of torch that is not public, called once."""

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from par_train import _torch_private


def test_how_often_a_tensor_was_written():
    tensor = torch.ones(2)
    assert _torch_private.version_of(tensor) == 0
    assert _torch_private.version_of(tensor.zero_()) == 1


def test_the_leaves_of_nested_containers():
    tensor = torch.ones(2)
    assert _torch_private.tree_leaves({"a": [1, (tensor, 2.0)]}) == [1, tensor, 2.0]


class Told(IterableDataset):
    def __iter__(self):
        yield get_worker_info() is None
        _torch_private.forget_worker()
        yield get_worker_info() is None


def test_a_worker_that_does_not_know_that_it_is_one():
    assert list(DataLoader(Told(), batch_size=None, num_workers=1, multiprocessing_context="fork")) == [False, True]
