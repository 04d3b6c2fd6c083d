"""Every API of torch that is not public, called once."""

import sys

import torch

from par_train import _torch_private


def test_tree_leaves_of_nested_containers_are_in_order():
    tensor = torch.ones(2)
    assert _torch_private.tree_leaves({"a": [1, (tensor, 2.0)]}) == [1, tensor, 2.0]


def test_compiler_of_torch_is_imported():
    _torch_private.import_compiler()
    assert "torch._dynamo" in sys.modules
