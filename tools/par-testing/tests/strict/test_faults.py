"""Each fault that would be a hang or a wrong number with NCCL is a named error on every rank, not a hang."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

from par_testing import Strict, StrictError, label


def fails(body, words):
    """A body fails on this rank, with these words."""
    with pytest.raises(StrictError) as caught:
        body()
    assert re.search(words, str(caught.value)), str(caught.value)


def collective(name, size=4, dtype=torch.float32, root=0, op=dist.ReduceOp.SUM):
    """One collective of the world, waited for."""
    x = torch.ones(size, dtype=dtype)
    whole = torch.ones(size * dist.get_world_size(), dtype=dtype)
    if name == "all_reduce":
        dist.all_reduce(x, op)
    elif name == "broadcast":
        dist.broadcast(x, root)
    elif name == "all_gather":
        dist.all_gather_single(whole, x)
    else:
        dist.reduce_scatter_single(x, whole)


HERE = r" at test_faults\.py:\d+ < test_faults\.py:\d+ < test_faults\.py:\d+"
DIFFER = {
    "order": (
        {"name": "all_gather"},
        {"name": "reduce_scatter"},
        r"operation 1 of communicator 0\[0, 1\]: rank 0 issued all_gather\(4 float32\)"
        + HERE
        + r", rank 1 reduce_scatter\(8 float32 sum\)"
        + HERE,
    ),
    "shape": (
        {"size": 4},
        {"size": 5},
        r"rank 0 issued all_reduce\(4 float32 sum\).*rank 1 all_reduce\(5 float32 sum\)",
    ),
    "dtype": ({}, {"dtype": torch.float64}, r"all_reduce\(4 float32 sum\).*all_reduce\(4 float64 sum\)"),
    "reduction": ({}, {"op": dist.ReduceOp.MAX}, r"all_reduce\(4 float32 sum\).*all_reduce\(4 float32 max\)"),
    "root": (
        {"name": "broadcast"},
        {"name": "broadcast", "root": 1},
        r"broadcast\(4 float32 root 0\).*broadcast\(4 float32 root 1\)",
    ),
}


@pytest.mark.ranks(2, backend="strict")
@pytest.mark.parametrize("case", DIFFER)
def test_ranks_that_ask_for_different_things(case):
    *asked, words = DIFFER[case]
    fails(lambda: collective(**{"name": "all_reduce", **asked[dist.get_rank()]}), words)


@pytest.mark.ranks(2, backend="strict")
def test_splits_that_do_not_fit():
    rank = dist.get_rank()
    sends = [[1, 3], [2, 2]][rank]
    expects = [[1, 2], [2, 2]][rank]  # rank 1 sends 2 to rank 0, and expects 2 where rank 0 sends 3
    words = r"operation 1 of communicator 0\[0, 1\]: rank 0 sends 3 elements to rank 1, which expects 2"
    fails(lambda: dist.all_to_all_single(torch.ones(sum(expects)), torch.ones(4), expects, sends), words)


@pytest.mark.ranks(2, backend="strict")
def test_equal_shapes_of_different_things():
    """Two units' weights would be mixed, and nobody would know."""
    x = label(torch.ones(4), f"blocks.{dist.get_rank()}")
    words = r"all_reduce\(4 float32 'blocks.0' sum\).*all_reduce\(4 float32 'blocks.1' sum\)"
    fails(lambda: dist.all_reduce(x), words)


@pytest.mark.ranks(2, backend="strict")
def test_an_output_that_was_not_waited_for_is_no_number():
    x = torch.full((3,), 2.0)
    work = dist.all_reduce(x, async_op=True)
    flags = torch.tensor([True, False])
    other = dist.all_reduce(flags, dist.ReduceOp.MIN, async_op=True)
    assert x.isnan().all()
    assert flags.tolist() == [True, True]
    assert x._version == flags._version == 0
    other.wait()  # and with it all that its communicator did before
    assert x.tolist() == [4.0] * 3
    assert flags.tolist() == [True, False]
    work.wait()
    work.wait()


WRITTEN = {
    "input": (lambda x, whole: x.zero_(), r"rank \d, all_gather\(4 float32\).* its input, float32\[4\], was written"),
    "output": (lambda x, whole: whole[5:].zero_(), r"its output, float32\[8\], was written while in flight"),
    "memory": (lambda x, whole: whole.untyped_storage().resize_(0), r"the memory of its float32\[8\] was freed while"),
}


@pytest.mark.ranks(2, backend="strict")
@pytest.mark.parametrize("case", WRITTEN)
def test_memory_that_is_touched_in_flight(case):
    write, words = WRITTEN[case]
    x, whole = torch.ones(4), torch.ones(8)
    work = dist.all_gather_single(whole, x, async_op=True)
    write(x, whole)
    fails(work.wait, words)


@pytest.mark.ranks(2, backend="strict")
def test_the_own_share_of_a_gather_in_place_may_be_read():
    whole = torch.arange(8.0)
    share = whole.chunk(2)[dist.get_rank()]
    kept = share.clone()
    work = dist.all_gather_single(whole, share, async_op=True)
    assert torch.equal(share, kept)
    assert whole.isnan().sum() == 4
    work.wait()
    assert torch.equal(whole, torch.arange(8.0))


@pytest.mark.ranks(2, backend="strict")
def test_two_communicators_in_a_circle():
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    order = (first, second) if dist.get_rank() == 0 else (second, first)

    def body():
        for group in order:
            dist.all_reduce(torch.ones(2), group=group)

    words = (
        r"ranks wait for each other for ever: rank 0 waits for operation 1 of communicator \w+\[0, 1\], all_reduce"
        r".*, which rank 1 has not issued; rank 1 waits for operation 1 of communicator .*, which rank 0 has not issued"
    )
    fails(body, words)


@pytest.mark.ranks(3, backend="strict")
def test_three_ranks_in_a_circle_over_three_groups():
    groups = [dist.new_group([rank, (rank + 1) % 3]) for rank in range(3)]
    mine = dist.get_rank()
    fails(lambda: dist.all_reduce(torch.ones(1), group=groups[mine]), r"rank 0 waits .* rank 1 waits .* rank 2 waits ")


@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=1))
def test_two_communicators_that_are_crossed_but_not_waited_for_need_two_slots():
    crossed(lambda body: fails(body, r"before which rank \d must end operation 1 of communicator"))


@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=2))
def test_two_communicators_that_are_crossed_run_with_two_slots():
    crossed(lambda body: body())


def crossed(run):
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    order = (first, second) if dist.get_rank() == 0 else (second, first)
    tensors = [torch.ones(2), torch.ones(2)]

    def body():
        works = [dist.all_reduce(each, group=group, async_op=True) for each, group in zip(tensors, order, strict=True)]
        for work in works:
            work.wait()
        assert torch.cat(tensors).tolist() == [2.0] * 4

    run(body)


@pytest.mark.ranks(3, backend="strict")
def test_a_collective_that_is_missing_on_one_rank():
    """Which returns from its test all the same."""
    if dist.get_rank() != 1:
        words = r"operation 1 of communicator 0\[0, 1, 2\], barrier\(\) at .*, which rank 1 has not issued; rank 1 has"
        fails(dist.barrier, words)


@pytest.mark.ranks(2, backend="strict", dies=(1,))
def test_a_rank_that_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fails(dist.barrier, r"which rank 1 has not issued; rank 1 has vanished")


@pytest.mark.ranks(2, backend="strict")
def test_messages_that_do_not_meet():
    other = 1 - dist.get_rank()
    words = r"messages of \[0, 1\]: rank 0 issued send\(2 float32 to 1\) at .*, rank 1 send\(2 float32 to 0\)"
    fails(lambda: dist.send(torch.ones(2), other), words)


@pytest.mark.ranks(2, backend="strict")
@pytest.mark.parametrize("batched", [False, True])
def test_messages_of_different_sizes(batched):
    rank, x = dist.get_rank(), torch.ones(2 + dist.get_rank())

    def body():
        ask = dist.irecv if rank else dist.isend
        works = dist.batch_isend_irecv([dist.P2POp(ask, x, 1 - rank)]) if batched else [ask(x, 1 - rank)]
        for work in works:
            work.wait()

    fails(body, r"rank 0 issued send\(2 float32 to 1\) at .*, rank 1 recv\(3 float32 from 0\)")


REFUSED = {
    "strided": (
        lambda: dist.all_reduce(torch.ones(4, 4).T[:2]),
        r"all_reduce of a tensor that is not contiguous.*conti",
    ),
    "float8": (lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn)), r"sum of float8_e4m3fn: NCCL cannot"),
    "itself": (lambda: dist.group.WORLD.send([torch.ones(1)], dist.get_rank(), 0), r"send of rank \d to itself: NCCL"),
    "bits": (
        lambda: dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BAND),
        r"band: NCCL does not know",
    ),
    "truths": (lambda: dist.all_reduce(torch.ones(1, dtype=torch.bool), dist.ReduceOp.AVG), r"avg of bool: NCCL"),
    "anyone": (lambda: dist.recv(torch.ones(1)), r"recv from any rank: NCCL cannot"),
}


@pytest.mark.ranks(2, backend="strict")
@pytest.mark.parametrize("case", REFUSED)
def test_what_nccl_cannot_do(case):
    refused, words = REFUSED[case]
    with pytest.raises((StrictError, ValueError), match=words):
        refused()
