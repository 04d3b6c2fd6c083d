"""What ranks tell each other arrives whole, or is known not to."""

import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import _torch_private as private
from par_checkpoint._errors import UnansweredError
from par_checkpoint.transfer.ranks import Ranks
from par_testing import storm


@pytest.mark.ranks([storm(1), storm(2), 3])
@pytest.mark.parametrize("few", [0, 16])
def test_values_are_told_once_by_each_kind_of_rank(monkeypatch, few):
    monkeypatch.setattr("par_checkpoint.transfer.ranks._FEW", few)
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(dist.group.WORLD, timeout=300)
    for length in (0, 900, 5000):
        assert [(list(who), what) for who, what in ranks.distinct("x" * length)] == [(list(range(size)), "x" * length)]
        every = [([each], (each, "y" * length * each)) for each in range(size)]
        assert [(list(who), what) for who, what in ranks.distinct((rank, "y" * length * rank))] == every
        pairs = [(list(range(side, size, 2)), side) for side in range(min(size, 2))]
        assert [(list(who), what) for who, what in ranks.distinct(rank % 2)] == pairs
        assert ranks.broadcast("z" * length if rank == 0 else None) == "z" * length


@pytest.mark.ranks([storm(1), storm(2), storm(3), 5])
def test_bytes_come_up_to_the_first_rank_and_sums_to_all():
    rank, size, ranks = dist.get_rank(), dist.get_world_size(), Ranks(dist.group.WORLD, timeout=300)
    assert ranks.total([rank, 1, 1 << 40]) == [size * (size - 1) // 2, size, size << 40]
    assert ranks.total([]) == []
    for length in (0, 3, 3000):
        parts = sorted(bytes(part) for part in ranks.to_first(b"%d" % rank * length))
        assert parts == (sorted(b"%d" % each * length for each in range(size)) if rank == 0 else [])
    assert ranks.hosts() == [0] * size


@pytest.mark.ranks(2)
def test_what_all_are_told_comes_with_what_stays():
    rank, ranks = dist.get_rank(), Ranks(dist.group.WORLD, timeout=300)
    assert ranks.tell(lambda: ("mine", [rank, 5]), 2) == ("mine", [1, 10])

    def fail():
        if rank == 1:
            raise FileNotFoundError(2, "no such file")
        return "mine", [rank, 5]

    with pytest.raises(FileNotFoundError, match=r"rank 1: .*no such file"):
        ranks.tell(fail, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("few", [0, 16])
def test_a_message_that_was_never_filled_is_a_lost_rank(monkeypatch, few):
    monkeypatch.setattr("par_checkpoint.transfer.ranks._FEW", few)
    rank, ranks = dist.get_rank(), Ranks(dist.group.WORLD, timeout=300)
    broadcast, gather = Ranks._broadcast, private.all_gather_into

    def unfilled(self, data, size, root):
        told = broadcast(self, data, size, root)
        return told if root == rank else memoryview(bytes(size))

    def half_filled(gloo, every, mine, timeout):
        gather(gloo, every, mine, timeout)
        if every.dtype == torch.uint8:
            every.view(2, -1)[1 - rank] = 0

    monkeypatch.setattr(Ranks, "_broadcast", unfilled)
    monkeypatch.setattr("par_checkpoint.transfer.ranks.all_gather_into", half_filled)
    with pytest.raises(
        RuntimeError, match=f"message of rank {1 - rank} arrived incomplete: a rank of the group is gone"
    ):
        ranks.distinct(f"x{rank}" * 1000)
    if rank:
        with pytest.raises(RuntimeError, match="message of rank 0 arrived incomplete"):
            ranks.broadcast(None)
    else:
        ranks.broadcast("x")


@pytest.mark.ranks(2)
def test_ranks_that_never_met_wait_as_long_as_the_present_call_says(monkeypatch):
    monkeypatch.setattr(Ranks, "_meet", lambda ranks: ranks._met.clear())
    rank, byte = dist.get_rank(), torch.zeros(1, dtype=torch.uint8, device="cpu")  # gloo sends from the host
    for late in (0, 1):  # gloo waits on one side alone, for five times what it was made with
        ranks = Ranks(dist.group.WORLD, timeout=0.1)
        ranks.set_timeout(60.0)
        dist.barrier()
        if rank == late:
            time.sleep(0.7)
        (ranks.receive if rank else ranks.send)(byte, 1 - rank).wait()
        left = [thread.name for thread in threading.enumerate() if "connect" in thread.name]
        assert left == [], "which let go of what gloo gave them, and abort the process if it ends meanwhile"
    for late in (0, 1):
        ranks = Ranks(dist.group.WORLD, timeout=60.0)
        ranks.set_timeout(0.2)
        if rank != late:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                (ranks.receive if rank else ranks.send)(byte, 1 - rank).wait()
        dist.barrier()


@pytest.mark.storm
@pytest.mark.ranks(9)
def test_collectives_connect_no_other_ranks():
    """Of 8 others, a rank meets 6, those 1, 2 and 4 away on either side."""

    def sockets():
        return sum(link.is_socket() for link in Path("/proc/self/fd").iterdir())

    before, size = sockets(), dist.get_world_size()
    ranks = Ranks(dist.group.WORLD, timeout=60)
    dist.barrier()
    met = sockets()
    assert met - before <= 6 + 1  # and one that listens
    for length in (1, 5000):
        ranks.total([dist.get_rank()] * length)
        assert len(ranks.distinct("x" * length * dist.get_rank())) == size  # each rank tells it all others
        ranks.broadcast("y" * length)
        ranks.to_first(b"z" * length)
    assert sockets() <= met  # by which they have met, some may end late


@pytest.mark.ranks(2)
def test_a_sum_that_lacks_a_rank_is_a_lost_rank(monkeypatch):
    ranks = Ranks(dist.group.WORLD, timeout=300)

    class Alone:
        def allreduce(self, tensors):
            return self

        def wait(self, timeout):
            return True

    ranks._gloo = Alone()
    with pytest.raises(RuntimeError, match="1 of 2 ranks of the group have taken part"):
        ranks.agree(lambda: None)


@pytest.mark.ranks(2)
def test_a_text_that_cannot_be_encoded_is_raised_on_all_ranks():
    ranks = Ranks(dist.group.WORLD, 30.0)

    def fail():
        if ranks.rank:
            raise FileNotFoundError("weights-\udcff.bin")

    for act, knows in ((lambda: ranks.agree(fail), 2), (lambda: ranks.on_first(Path("/none/\udcff").stat), 0)):
        with pytest.raises(FileNotFoundError) as caught:
            act()
        if ranks.rank != knows:  # which has the error itself
            assert r"\udcff" in str(caught.value)
            assert str(caught.value).encode()


@pytest.mark.ranks(2)
def test_no_call_follows_one_that_has_failed():
    ranks = Ranks(dist.group.WORLD, timeout=300)
    begun = []

    class Failed:
        def wait(self, timeout):
            raise RuntimeError("Connection closed by peer")

        def is_completed(self):
            return True

    class Gloo:
        def allreduce(self, tensors):
            begun.append(tensors)
            return Failed()

    ranks._gloo = Gloo()
    # Ranks hear of a failure at different calls. Two kinds of calls that match would end the process.
    for call, given in ((Ranks.total, [1, 2, 3]), (Ranks.distinct, "text"), (Ranks.broadcast, "text")):
        with pytest.raises(UnansweredError, match=r"rank of 2 does not answer .Connection closed by peer"):
            call(ranks, given)
    assert len(begun) == 1
    # No error is kept with its frames: they hold the communicator, whose destructor waits for its calls.
    gone = weakref.ref(ranks)
    del ranks
    assert gone() is None
