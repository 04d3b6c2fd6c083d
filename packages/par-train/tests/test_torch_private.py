"""Every API of torch that is not public, called once."""

import torch

from par_train import _torch_private


def test_how_often_a_tensor_was_written():
    tensor = torch.ones(2)
    assert _torch_private.version_of(tensor) == 0
    assert _torch_private.version_of(tensor.zero_()) == 1


def test_the_leaves_of_nested_containers():
    tensor = torch.ones(2)
    assert _torch_private.tree_leaves({"a": [1, (tensor, 2.0)]}) == [1, tensor, 2.0]
