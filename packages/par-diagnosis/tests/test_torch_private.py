"""Every private interface of torch that the package uses, called once."""

import pytest
import torch.distributed as dist

from par_diagnosis._torch_private import store_for_thread


@pytest.mark.ranks(2)
def test_store_for_thread_shares_keys_with_all_ranks():
    store = store_for_thread()
    store.add("met", 1)
    dist.barrier()
    assert store.add("met", 0) == 2
