"""What ranks tell each other arrives whole, or is known not to."""

import pytest
import torch
import torch.distributed as dist

from par_checkpoint._ranks import Ranks


@pytest.mark.ranks([1, 2, 3])
def test_every_rank_gets_the_values_of_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(dist.group.WORLD, timeout=20)
    values = [None, {"a": list(range(100 * size))}, "x" * size]
    for value in values:
        assert ranks.gather((rank, value)) == [(each, value) for each in range(size)]
    assert ranks.gather("y" * 100 * rank) == ["y" * 100 * each for each in range(size)], "of unequal lengths"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("which", [0, 1])
def test_a_message_that_was_never_filled_is_a_lost_rank(monkeypatch, which):
    ranks = Ranks(dist.group.WORLD, timeout=20)
    whole, calls = Ranks._all_gather, []

    def unfilled(self, mine):
        every = whole(self, mine)
        calls.append(mine)
        if len(calls) == which + 1:
            every[-mine.numel() :] = torch.randint(100, mine.shape, dtype=mine.dtype)
        return every

    monkeypatch.setattr(Ranks, "_all_gather", unfilled)
    with pytest.raises(RuntimeError, match="message of rank 1 never arrived whole: a rank of the group is gone"):
        ranks.gather("what rank 1 says")
