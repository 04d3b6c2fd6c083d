import pytest
import torch
import torch.distributed as dist

from par_testing import once


@pytest.mark.ranks([1, 3])
def test_what_rank_0_returns_is_there_on_every_rank():
    called = []

    def reference(number, *, shift):
        called.append(number)
        return {"rank": dist.get_rank(), "tensor": torch.full((2,), number + shift)}

    found = once(reference, 3, shift=4)
    assert found["rank"] == 0
    assert found["tensor"].tolist() == [7, 7]
    assert called == ([3] if dist.get_rank() == 0 else [])
