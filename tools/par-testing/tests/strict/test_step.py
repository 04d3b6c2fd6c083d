"""What costs a step its overlap on GPUs is refused, and named, on a CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import FirstUseError, HostWaitError, Strict, no_first_use, step

REFUSED = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_the_host_wait(case):
    with (
        step(),
        pytest.raises(HostWaitError, match=r"in a step, at test_step.py:<lambda> < test_step.py:test_what_makes"),
    ):
        REFUSED[case](torch.ones(3))
    REFUSED[case](torch.ones(3))


def test_a_step_of_training_has_none_of_it():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with step() as seen:
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen.sites == []


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


def test_backward_is_a_part_of_the_step():
    x = torch.ones(3, requires_grad=True)
    with step(), pytest.raises(HostWaitError, match=r"item\(\) or bool\(\) in a step, at test_step.py:backward"):
        Reads.apply(x).sum().backward()


def allowed(x):
    return x.item()


def test_where_it_is_allowed_it_is_listed():
    with step(allow=["test_step.py:allowed"]) as seen:
        allowed(torch.ones(()))
    assert seen.sites == ["item() or bool() in test_step.py:allowed"]


@pytest.mark.ranks(2, backend="strict")
def test_objects_and_communicators_belong_before_the_step():
    gathered = [None, None]
    dist.all_gather_object(gathered, "before")
    dist.all_reduce(torch.ones(1))
    with step():
        dist.all_reduce(torch.ones(1))
        with pytest.raises(HostWaitError, match=r"a collective of Python objects in a step, at test_step\.py"):
            dist.all_gather_object(gathered, "inside")
        with pytest.raises(HostWaitError, match=r"a new communicator in a step, at test_step\.py"):
            dist.new_group([0, 1])


def between(first, second):
    """Sends a number from rank 0 to rank 1, as a message of its own or as a batch."""
    number, rank = torch.zeros(1), dist.get_rank()
    if first == "batch":
        way = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(way, number, 1 - rank, second)]):
            work.wait()
    else:
        (dist.send if rank == 0 else dist.recv)(number, 1 - rank, second)


def summed():
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2, backend="strict")
def test_first_use_of_a_communicator_is_refused():
    other = dist.new_group([0, 1], group_desc="lanes")
    uses = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1), group=other),
        "message": lambda: between("message", other),
    }
    for use in uses.values():
        with step(), pytest.raises(HostWaitError, match=r"first operation of .*lanes\[0, 1\] in a step, at test_step"):
            use()
        with no_first_use(), pytest.raises(FirstUseError, match=r"first operation of .*lanes\[0, 1\], at test_step"):
            use()
        use()
        with step(), no_first_use():
            use()
    with step(), no_first_use():
        between("batch", other)  # which goes over the communicator of all members
    with step(allow=["test_step.py:summed"]) as seen:
        summed()
    assert [site.partition("[")[2] for site in seen.sites] == ["0, 1] in test_step.py:summed"]


@pytest.mark.ranks(2, backend="strict")
def test_first_use_by_a_batch_is_refused():
    with no_first_use(), pytest.raises(FirstUseError, match="the first operation of"):
        between("batch", dist.group.WORLD)


@pytest.mark.ranks(2, backend="strict", strict=Strict(connect="allow"))
def test_first_use_may_be_allowed():
    with step(), no_first_use():
        dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2, backend="strict", strict=Strict(objects="refuse"))
def test_objects_may_be_refused_everywhere():
    with pytest.raises(HostWaitError, match=r"a collective of Python objects at test_step.py.*send a tensor"):
        dist.broadcast_object_list([1, 2])


@pytest.mark.ranks(2, backend="strict", strict=Strict(objects="allow"))
def test_objects_may_be_allowed_everywhere():
    with step(allow=["test_step.py:test_objects_may_be_allowed_everywhere"]):  # their sizes are read
        dist.broadcast_object_list([1, 2])
