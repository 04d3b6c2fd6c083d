"""Embeddings tied over the first and the last stage."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import check_owned, sharding_of
from par_pipeline import Pipeline, Shared, interleaved, one_f_one_b, zb_h1, zb_v
from par_testing import for_each

from ..runtime_helpers import FEW, block

WIDTH, WORDS = 5, 11


class First(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(100)
        self.table = nn.Embedding(WORDS, WIDTH).double()
        self.inner = block(WIDTH, 0)

    def forward(self, tokens):
        return self.inner(self.table(tokens))


class Last(nn.Module):
    def __init__(self, number, weight=None):
        super().__init__()
        self.inner = block(WIDTH, number)
        torch.manual_seed(200 + number)
        self.head = nn.Linear(WIDTH, WORDS, bias=False).double()
        if weight is not None:
            self.head.weight = weight

    def forward(self, x):
        return self.head(self.inner(x))


def build(stages, tied=False):
    """All stages; their embeddings are one parameter if tied."""
    first = First()
    last = Last(stages - 1, first.table.weight if tied else None)
    return [first, *(block(WIDTH, number) for number in range(1, stages - 1)), last]


def loss_fn(output, target):
    return nn.functional.cross_entropy(output, target)


def tokens(step, rows=7):
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(WORDS, (rows,), generator=generator) for _ in range(2))


def sgd(modules):
    return torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=0.1, momentum=0.9)


def one_device(stages):
    model = nn.Sequential(*build(stages, tied=True))
    optimizer = sgd(model)
    for step in range(3):
        x, y = tokens(step)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return model


@for_each(make=[one_f_one_b, zb_h1, interleaved, zb_v])
@pytest.mark.ranks([FEW, 4])
def test_three_steps_with_tied_embeddings_are_those_of_one_device(make):
    schedule = make(dist.get_world_size(), 3)
    last = schedule.stages - 1
    together = schedule.rank_of(0) == schedule.rank_of(last)  # on one rank under a V
    stages = build(schedule.stages, tied=together)
    numbers = schedule.stage_of(dist.get_rank())
    modules = [stages[number] for number in numbers]
    mine = {}
    if 0 in numbers:
        mine = {"table.weight": stages[0].table.weight}
    elif last in numbers:
        mine = {"head.weight": stages[last].head.weight}
    shared = Shared(mine, dist.group.WORLD)
    run = Pipeline(modules, schedule, dist.group.WORLD, loss_fn=loss_fn, shared=[shared])
    optimizer = sgd(modules)
    for step in range(3):
        x, y = tokens(step)
        optimizer.zero_grad()
        run.step(x, target=y)
        optimizer.step()
    reference = one_device(schedule.stages)
    for number, module in zip(numbers, modules, strict=True):
        for one, other in zip(module.parameters(), reference[number].parameters(), strict=False):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)  # sums in another order
        if number == last:
            torch.testing.assert_close(module.head.weight, reference[0].table.weight, rtol=1e-10, atol=1e-10)
    held = [("embedding", sharding_of(parameter)) for parameter in mine.values()]
    check_owned(held, dist.group.WORLD)  # counted once
    expected = (0,) if together else (schedule.rank_of(0), schedule.rank_of(last))
    assert all(box.copies == expected for _, record in held for box in record.boxes)


@for_each(make=[one_f_one_b, zb_h1])
@pytest.mark.ranks(2)
def test_gradients_added_up_over_several_steps_are_those_of_one_device(make):
    schedule = make(2, 3)
    rank = dist.get_rank()
    stage = build(2)[rank]
    weight = stage.head.weight if rank else stage.table.weight
    shared = Shared({"weight": weight}, dist.group.WORLD)
    run = Pipeline(stage, schedule, dist.group.WORLD, loss_fn=loss_fn, shared=[shared])
    whole = nn.Sequential(*build(2, tied=True))
    for step in range(4):
        x, y = tokens(step)
        if step == 3:
            run = Pipeline(stage, schedule, dist.group.WORLD, loss_fn=loss_fn)
            stage.zero_grad(), whole.zero_grad()
        run.step(x, target=y)
        loss_fn(whole(x), y).backward()
        if step == 3:  # and by hand
            run.step(x, target=y)
            loss_fn(whole(x), y).backward()
            shared.handle_gradient()
        torch.testing.assert_close(weight.grad, whole[0].table.weight.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2)
def test_what_is_frozen_or_unused_everywhere_gets_no_gradient_that_an_optimizer_would_act_on():
    for frozen in (True, False):
        parameter = nn.Parameter(torch.ones(3, 5), requires_grad=not frozen)
        Shared({"w": parameter}, dist.group.WORLD).handle_gradient()
        assert parameter.grad is None
    with pytest.raises(ValueError, match="frozen"):
        Shared({"w": nn.Parameter(torch.ones(3), requires_grad=dist.get_rank() == 0)}, dist.group.WORLD)


@pytest.mark.cpu(reason="arithmetic on sparse tensors")
@pytest.mark.ranks(2)
def test_a_sparse_gradient_and_a_dense_one_are_added():
    parameter = nn.Parameter(torch.ones(3, 2))
    shared = Shared({"w": parameter}, dist.group.WORLD)
    if dist.get_rank() == 0:
        nn.functional.embedding(torch.tensor([1]), parameter, sparse=True).sum().backward()
    else:
        parameter.grad = torch.ones(3, 2)
    shared.handle_gradient()
    assert torch.equal(parameter.grad, torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]))


@pytest.mark.ranks(3)
def test_copies_agree_bitwise_and_start_with_the_values_of_the_first():
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.full((3, 5), float(rank)))
    shared = Shared({"w": parameter}, dist.group.WORLD)
    assert torch.equal(parameter.detach(), torch.zeros(3, 5))
    for _ in range(2):
        parameter.grad = torch.rand(3, 5) * 10 ** float(rank)
        shared.handle_gradient()
        every = [torch.empty(3, 5) for _ in range(3)]
        dist.all_gather(every, parameter.grad)
        assert torch.equal(every[0], every[1])
        assert torch.equal(every[0], every[2])
    parameter.grad = None if rank == 1 else torch.ones(3, 5)
    shared.handle_gradient()
    assert torch.equal(parameter.grad, torch.full((3, 5), 2.0))


@pytest.mark.ranks(3)
def test_different_parameters_are_refused_on_every_rank():
    rank = dist.get_rank()
    for mine in (
        [nn.Parameter(torch.zeros(3, 5 + (rank == 1)))],
        [nn.Parameter(torch.zeros(3)) for _ in range(1 + (rank == 2))],
        [nn.Parameter(torch.zeros(3, dtype=torch.float64 if rank else torch.float32))],
    ):
        with pytest.raises(ValueError, match="the holders of shared parameters have"):
            Shared({str(number): each for number, each in enumerate(mine)}, dist.group.WORLD)
