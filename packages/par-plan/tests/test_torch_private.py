"""Every API of torch that is not public, called once."""

import torch

from par_plan import _torch_private


def test_storage_key_on_meta_tells_shared_memory():
    tensor = torch.ones(4, device="meta")
    assert _torch_private.storage_key(tensor) == _torch_private.storage_key(tensor[1:])
    assert _torch_private.storage_key(tensor) != _torch_private.storage_key(torch.ones(4, device="meta"))


def test_containers_give_their_leaves_in_order():
    nested = ((1, [2]), {"three": 3})
    assert _torch_private.tree_leaves(nested) == [1, 2, 3]
    assert _torch_private.tree_map(lambda x: -x, nested) == ((-1, [-2]), {"three": -3})
