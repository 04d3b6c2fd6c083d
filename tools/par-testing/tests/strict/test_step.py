"""What costs a step its overlap on GPUs is refused, and named, on a CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import HostWaitError, Strict, step

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
    with step():
        dist.all_reduce(torch.ones(1))
        with pytest.raises(HostWaitError, match=r"a collective of Python objects in a step, at test_step\.py"):
            dist.all_gather_object(gathered, "inside")
        with pytest.raises(HostWaitError, match=r"a new communicator in a step, at test_step\.py"):
            dist.new_group([0, 1])


@pytest.mark.ranks(2, backend="strict", strict=Strict(objects="refuse"))
def test_objects_may_be_refused_everywhere():
    with pytest.raises(HostWaitError, match=r"a collective of Python objects at test_step.py.*send a tensor"):
        dist.broadcast_object_list([1, 2])


@pytest.mark.ranks(2, backend="strict", strict=Strict(objects="allow"))
def test_objects_may_be_allowed_everywhere():
    with step(allow=["test_step.py:test_objects_may_be_allowed_everywhere"]):  # their sizes are read
        dist.broadcast_object_list([1, 2])
