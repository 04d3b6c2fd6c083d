"""Every API of torch that is not public, called once."""

import torch
from torch import nn

from par_train import _torch_private


def test_tree_leaves_of_nested_containers_are_in_order():
    tensor = torch.ones(2)
    assert _torch_private.tree_leaves({"a": [1, (tensor, 2.0)]}) == [1, tensor, 2.0]


def test_is_compiled_finds_modules_under_torch_compile():
    plain, called = nn.Linear(1, 1), nn.Linear(1, 1)
    called.compile(backend="eager")
    assert not _torch_private.is_compiled(plain)
    assert _torch_private.is_compiled(called)
    assert _torch_private.is_compiled(torch.compile(plain, backend="eager"))
