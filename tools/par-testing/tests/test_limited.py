import pytest
import torch
import torch.distributed as dist

from par_testing import limited_backend


@pytest.mark.ranks(2, backend="gloo")
def test_a_limited_backend_can_do_what_it_is_given_and_no_more():
    group = dist.new_group([0, 1], backend=limited_backend("allreduce"))
    assert dist.get_backend(group) == "limited"
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total, group=group)
    assert total == 3
    dist.barrier(group)
    with pytest.raises(RuntimeError):
        dist.broadcast(total, 0, group=group)
