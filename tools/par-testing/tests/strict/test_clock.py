"""Virtual time is the arithmetic of orders, of nothing else."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from par_testing import Compute, Links, Strict, strict_time
from par_testing.strict.clock import seconds_of
from par_testing.strict.operation import Operation, Part

LINKS = Links(inside=(1.0, 100.0), across=(2.0, 10.0), ranks_per_host=4)  # seconds a hop; bytes a second
SLOW = Compute(flops=1000.0, memory=1e30)  # an operator takes its products alone
SIZE = 32  # elements of float32: 128 bytes
ALL_REDUCE = 2 / 2 * 128 / 100 + 2 * 1.0  # of two ranks
PRODUCT = 2 * 8 * 8 * 8 / 1000  # seconds of an 8 x 8 product


@pytest.mark.parametrize(
    ("name", "members", "expected"),
    [
        ("all_reduce", range(4), 2 * 3 / 4 * 128 / 100 + 6 * 1.0),
        ("all_gather", range(4), 3 / 4 * 512 / 100 + 3 * 1.0),
        ("reduce_scatter", range(4), 3 / 4 * 128 / 100 + 3 * 1.0),
        ("all_to_all", range(4), 3 / 4 * 128 / 100 + 3 * 1.0),
        ("broadcast", range(3), 128 / 100 + 2 * 1.0),
        ("all_reduce", (0, 5), 128 / 10 + 2 * 2.0),
        ("all_gather", (0, 1, 4, 5), 3 / 4 * 512 / (2 * 10) + 2 * 1.0 + 2.0),  # two links between the hosts
        ("all_gather", range(64), 63 / 64 * 64 * 128 / (4 * 10) + 48 * 1.0 + 15 * 2.0),
        ("all_reduce", (3,), 0.0),
    ],
)
def test_what_operations_take(name, members, expected):
    operation = Operation(name=name, items=((SIZE, "float32"),))
    assert seconds_of(operation, tuple(members), LINKS) == pytest.approx(expected, rel=1e-12)


def test_what_a_message_takes():
    part = Part(kind="send", peer=1, elements=SIZE, dtype="float32", tag=0)
    assert seconds_of(Operation(name="send", parts=(part,)), (0, 1), LINKS) == pytest.approx(1.28 + 1.0, rel=1e-12)


def test_what_a_batch_sends_and_receives_is_on_its_way_at_the_same_time():
    ways = [("send", SIZE), ("recv", SIZE // 2), ("send", SIZE)]
    parts = tuple(Part(kind=kind, peer=1, elements=size, dtype="float32", tag=0) for kind, size in ways)
    assert seconds_of(Operation(name="batch", parts=parts), (0, 1), LINKS) == pytest.approx(2.56 + 1.0, rel=1e-12)


def product():
    return torch.ones(8, 8) @ torch.ones(8, 8)


def overlapped():
    """Three products, with an all-reduce that is issued before and waited for after them."""
    strict_time()
    work = dist.all_reduce(torch.ones(SIZE), async_op=True)
    for _ in range(3):
        product()
    work.wait()
    return strict_time()


@pytest.mark.ranks(2, backend="strict", strict=Strict(links=LINKS, compute=SLOW))
def test_what_is_computed_before_the_wait_is_not_exposed(tmp_path):
    times = overlapped()
    assert times.computing == pytest.approx(3 * PRODUCT, rel=1e-9)
    assert times.exposed == pytest.approx(ALL_REDUCE - 3 * PRODUCT, rel=1e-9)
    assert times.total == pytest.approx(ALL_REDUCE, rel=1e-9)
    (site,) = times.by_site
    assert site.startswith("test_clock.py:")
    assert sorted({span.kind for span in times.timeline}) == ["0[0, 1]", "compute"]
    times.trace(tmp_path / f"{dist.get_rank()}.json", rank=dist.get_rank())
    events = json.loads((tmp_path / f"{dist.get_rank()}.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"all_reduce"}


@pytest.mark.ranks(2, backend="strict", strict=Strict(links=LINKS, compute=SLOW, complete="early"))
def test_when_operations_really_complete_does_not_matter():
    assert overlapped().exposed == pytest.approx(ALL_REDUCE - 3 * PRODUCT, rel=1e-9)


@pytest.mark.ranks(2, backend="strict", strict=Strict(links=LINKS, compute=SLOW))
def test_an_operation_begins_when_all_have_issued_it_and_the_one_before_has_ended():
    rank = dist.get_rank()
    for _ in range(2 * rank):
        product()
    works = [dist.all_reduce(torch.ones(SIZE), async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    times = strict_time()
    begin = 2 * PRODUCT  # of the later rank
    assert times.total == pytest.approx(begin + 2 * ALL_REDUCE, rel=1e-9)
    assert times.exposed == pytest.approx(2 * ALL_REDUCE + (0 if rank else begin), rel=1e-9)


@pytest.mark.ranks(4, backend="strict", strict=Strict(links=LINKS, compute=SLOW))
def test_batches_of_other_ranks_hold_nobody_up():
    other = dist.get_rank() ^ 1
    strict_time()
    ways = [dist.P2POp(dist.isend, torch.ones(SIZE), other), dist.P2POp(dist.irecv, torch.empty(SIZE), other)]
    for work in dist.batch_isend_irecv(ways):
        work.wait()
    assert strict_time().total == pytest.approx(128 / 100 + 1.0, rel=1e-9)


@pytest.mark.ranks(2, backend="strict", strict=Strict(links=LINKS, compute=SLOW))
def test_ddp_waits_at_the_end_of_backward():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))))
    for _ in range(2):  # it builds its buckets, and tells the other ranks
        model(torch.ones(8, 8)).sum().backward()
    strict_time()
    model(torch.ones(8, 8)).sum().backward()
    times = strict_time()
    products = 3 + 3 + 2  # forward, of weights, of inputs
    assert times.computing == pytest.approx(products * PRODUCT, rel=1e-6)
    assert times.exposed == pytest.approx(3 * 64 * 4 / 100 + 2 * 1.0, rel=1e-6)  # one bucket, ready at the end


@pytest.mark.ranks(1, backend="strict", strict=Strict(links=LINKS, compute=SLOW))
def test_attention_takes_its_products():
    query = torch.ones(1, 2, 8, 4, requires_grad=True)  # two heads, eight tokens
    strict_time()
    mixed = nn.functional.scaled_dot_product_attention(query, query, query)
    assert strict_time().computing == pytest.approx(2 * 2 * (2 * 8 * 8 * 4) / 1000, rel=1e-9)
    mixed.sum().backward()
    assert strict_time().computing == pytest.approx(2 * 5 * (2 * 8 * 8 * 4) / 1000, rel=1e-9)  # scores once more


@pytest.mark.ranks(2, backend="strict", strict=Strict(links=LINKS, compute=Compute(flops=1e30, memory=100.0)))
def test_of_a_dtensor_counts_what_this_rank_has():
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.ones(SIZE), mesh, [Shard(0)])
    strict_time()
    cut.add_(1.0)
    assert strict_time().computing == pytest.approx(SIZE / 2 * 4 / 100, rel=1e-9)


@pytest.mark.ranks(1, backend="strict")
def test_without_links_no_time_is_reckoned():
    with pytest.raises(RuntimeError, match="no virtual time is reckoned; give"):
        strict_time()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Strict(slots=0), r"Strict\(slots=0\): at least 1"),
        (lambda: Strict(alike=0), r"Strict\(alike=0\): a process stands for at least 1 rank"),
        (lambda: Strict(draw=3), r'draws nothing with complete="late"; give "drawn"'),
        (lambda: Strict(complete="soon"), r"Strict\(complete='soon'\): give one of 'late', 'early', 'drawn'"),
        (lambda: Strict(compute=Compute()), r"reckons no time without links"),
        (lambda: Links(inside=(-1.0, 1.0)), r"Links\(inside=\(-1.0, 1.0\)\): seconds of at least 0"),
        (lambda: Links(ranks_per_host=0), r"at least 1 rank"),
        (lambda: Compute(flops=0), r"give more than 0 of each"),
    ],
)
def test_options_that_make_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()
