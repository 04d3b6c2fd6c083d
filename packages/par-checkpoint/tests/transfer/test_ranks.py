"""What ranks tell each other arrives whole, or is known not to."""

import pytest
import torch
import torch.distributed as dist

from par_checkpoint.transfer.ranks import Ranks


@pytest.mark.ranks([1, 2, 3])
def test_every_rank_gets_the_values_of_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(dist.group.WORLD, timeout=20)
    for size_ in (0, 900, 1100, 5000):  # with the head, and in a round of their own
        values = [None, {"a": list(range(size_))}, "x" * size_]
        for value in values:
            assert ranks.gather((rank, value)) == [(each, value) for each in range(size)]
        assert ranks.gather("y" * size_ * rank) == ["y" * size_ * each for each in range(size)], "of unequal lengths"
        for root in range(size):
            mine = "z" * size_ if rank == root else None
            assert ranks.gather(mine) == ["z" * size_ if each == root else None for each in range(size)], "of one alone"


@pytest.mark.ranks(3)
def test_short_messages_take_one_round_and_the_long_one_of_a_rank_goes_out_once(monkeypatch):
    rank, ranks, sizes = dist.get_rank(), Ranks(dist.group.WORLD, timeout=20), []
    for name in ("_all_gather", "_broadcast"):
        act = getattr(Ranks, name)
        noted = lambda self, data, size, *root, name=name, act=act: (  # noqa: E731
            sizes.append((name, size)) or act(self, data, size, *root)
        )
        monkeypatch.setattr(Ranks, name, noted)
    ranks.gather(rank)
    assert sizes == [("_all_gather", 1024)]
    ranks.gather(b"x" * 10_000 if rank == 1 else None)
    assert [name for name, _ in sizes[1:]] == ["_all_gather", "_broadcast"]
    ranks.gather(b"x" * 10_000 if rank else None)
    assert [name for name, _ in sizes[3:]] == ["_all_gather", "_all_gather"]
    assert all(10_000 < size < 10_100 for _, size in (sizes[2], sizes[4]))


@pytest.mark.ranks(2)
def test_what_all_are_told_comes_with_what_stays():
    rank, ranks = dist.get_rank(), Ranks(dist.group.WORLD, timeout=20)
    assert ranks.share(lambda: ("mine", rank)) == ("mine", [0, 1])

    def fail():
        if rank == 1:
            raise FileNotFoundError(2, "no such file")
        return "mine", rank

    with pytest.raises(FileNotFoundError, match=r"rank 1: .*no such file"):
        ranks.share(fail)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [10, 5000])
@pytest.mark.parametrize("which", [0, 1])
def test_a_message_that_was_never_filled_is_a_lost_rank(monkeypatch, which, length):
    ranks = Ranks(dist.group.WORLD, timeout=20)
    whole, calls = Ranks._all_gather, []

    def unfilled(self, data, size):
        every = whole(self, data, size)
        calls.append(size)
        if len(calls) == min(which, length // 5000) + 1:
            every[-1][:] = bytes(torch.randint(100, (size,), dtype=torch.uint8).tolist())
        return every

    monkeypatch.setattr(Ranks, "_all_gather", unfilled)
    with pytest.raises(RuntimeError, match="message of rank 1 never arrived whole: a rank of the group is gone"):
        ranks.gather("x" * length)
