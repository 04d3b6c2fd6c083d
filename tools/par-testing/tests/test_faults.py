import pytest

from par_testing import InjectedFault, fail_at


def test_raises_at_its_rank_and_step_only():
    fault = fail_at(rank=1, step=3)
    for rank, step in [(0, 3), (1, 2), (3, 1)]:
        fault.check(rank, step)
    with pytest.raises(InjectedFault, match="rank 1 fails at step 3"):
        fault.check(1, 3)


def test_mistakes():
    with pytest.raises(ValueError, match="how='explode': a rank can raise, kill, hang"):
        fail_at(0, 0, "explode")
    with pytest.raises(ValueError, match="counted from 0"):
        fail_at(-1, 0)


@pytest.mark.ranks(2, dies=(1,))
def test_kill():
    import torch.distributed as dist

    fault = fail_at(rank=1, step=2, how="kill")
    for step in range(3):
        fault.check(dist.get_rank(), step)
    assert dist.get_rank() == 0
