"""In which order reductions begin and are waited for."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_testing import count_collectives, for_each, storm
from par_zero import reset, shard
from par_zero.layout.sharers import Groups, Sharers
from par_zero.reduce.in_flight import Reductions

from .helpers import KINDS_OF_STAGES, assert_near, assert_same, batch, copies, policies, sgd, sharded, whole


class Noted:
    """A collective that notes when it begins and when it is waited for."""

    def __init__(self, notes, name):
        self.notes, self.name = notes, name
        notes.append(f"begin {name}")

    def is_completed(self):
        return self.name[0] in ARRIVES

    def wait(self):
        self.notes.append(f"wait {self.name}")


ARRIVES = "bc"
"""The reductions whose collectives arrive at once."""


def begun(names, collectives, *, limit=2):
    """What happens when reductions of these names begin, each of several collectives."""
    notes, reductions = [], Reductions(limit)

    def steps(name):
        for number in range(collectives):
            yield Noted(notes, f"{name}{number}")

    for name in names:
        reductions.begin(steps(name), single=collectives == 1)
    return reductions, notes


def test_where_the_host_would_wait_the_next_begins_and_what_has_arrived_is_taken_in():
    reductions, notes = begun("abcd", 1, limit=None)
    assert notes == ["begin a0", "begin b0", "wait b0", "begin c0", "wait c0", "begin d0"]
    notes.clear()
    reductions.finish()
    assert notes == ["wait a0", "wait d0"]


def test_where_the_host_would_wait_second_collectives_begin_at_the_end_in_the_order_of_the_first():
    reductions, notes = begun("abc", 2, limit=None)
    assert notes == ["begin a0", "begin b0", "begin c0"]
    notes.clear()
    reductions.finish()
    assert notes[:6] == ["wait a0", "begin a1", "wait b0", "begin b1", "wait c0", "begin c1"]
    assert notes[6:] == ["wait a1", "wait b1", "wait c1"]


def test_two_first_collectives_are_under_way_and_the_second_ones_beside_them():
    _, notes = begun("abcd", 2)
    assert notes == [
        *("begin a0", "begin b0", "wait a0", "begin a1", "begin c0"),
        *("wait a1", "wait b0", "begin b1", "begin d0"),
    ]


def test_at_the_end_the_last_chunks_are_brought_on_in_turn():
    reductions, notes = begun("ab", 2)
    notes.clear()
    reductions.finish()
    assert notes == ["wait a0", "begin a1", "wait b0", "begin b1", "wait a1", "wait b1"]


def test_a_third_chunk_waits_for_the_first_alone():
    _, notes = begun("abc", 1)
    assert notes == ["begin a0", "begin b0", "wait a0", "begin c0"]


def test_the_limit_may_be_one_or_more_than_two():
    _, notes = begun("abc", 1, limit=1)
    assert notes == ["begin a0", "wait a0", "begin b0", "wait b0", "begin c0"]
    _, notes = begun("abc", 2, limit=1)
    assert notes == ["begin a0", "wait a0", "begin a1", "begin b0", "wait a1", "wait b0", "begin b1", "begin c0"]
    _, notes = begun("abcde", 1, limit=3)
    assert notes == ["begin a0", "begin b0", "begin c0", "wait a0", "begin d0", "wait b0", "begin e0"]


class Exchanging(torch.autograd.Function):
    """Sums over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.group = exchanges()
        total = x.clone()
        dist.all_reduce(total, group=ctx.group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total


@functools.cache
def exchanges():
    """A communicator apart, as exchanges within backward need one."""
    return dist.new_group()


class Mixed(nn.Module):
    """Exchanges below linears of which some ranks leave one out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x, left_out):
        for number, layer in enumerate(self.layers):
            x = Exchanging.apply(x) / 2 if number == 1 else x
            if number != left_out:
                x = torch.tanh(layer(x))
        return x


@pytest.mark.cpu(reason="waits of a strict device block its host, unlike NCCL")
@for_each(stage=KINDS_OF_STAGES)
@pytest.mark.ranks(2)
def test_nothing_in_backward_waits_for_a_rank_that_waits_for_this_one_in_backward(stage):
    """Rank 1 has no gradient for its last chunk but one, so it reduces at the end, below an exchange with rank 0."""
    results = []
    for reduced_by in ("par-zero", "hand"):
        module, optimizer = Mixed(), None
        if reduced_by == "par-zero":
            module, optimizer = sharded(module, stage, sgd)
        else:
            optimizer = sgd(module.parameters())
        for step in range(3):
            optimizer.zero_grad()
            left_out = 6 if dist.get_rank() == 1 and step else -1
            module(batch(step, width=8), left_out).square().mean().backward()
            if reduced_by == "hand":
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= 2
            optimizer.step()
        results.append(whole(module) if reduced_by == "par-zero" else copies(module))
    assert_near(*results)


def trained_in_a_row(stage, *, forwards, backwards, by_hand):
    """Two modules, one upon the other, after steps in which a rank leaves out a layer of both."""
    modules = [Mixed(), Mixed()]
    optimizers = [sgd(module.parameters()) for module in modules]
    if not by_hand:
        for module, optimizer in zip(modules, optimizers, strict=True):
            shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    parameters = [each for module in modules for each in module.parameters()]
    for step in range(3):
        left_out = 6 if dist.get_rank() == 1 and step else -1
        for module in modules:
            module.zero_grad()
        for number in range(backwards):
            rows = [batch(step, width=8, micro=forwards * number + each) for each in range(forwards)]
            results = [modules[1](modules[0](x, left_out), left_out) for x in rows]
            sum(x.square().mean() for x in results).backward()
        for parameter in parameters if by_hand else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        for optimizer in optimizers:
            optimizer.step()
    return [copies(module) if by_hand else whole(module) for module in modules]


def check_in_a_row(stage, forwards, backwards):
    """What goes over one communicator in one order for each module would cross between them."""
    expected = trained_in_a_row(stage, forwards=forwards, backwards=backwards, by_hand=True)
    for one, other in zip(
        trained_in_a_row(stage, forwards=forwards, backwards=backwards, by_hand=False), expected, strict=True
    ):
        assert_near(one, other)


@pytest.mark.cpu(reason="waits of a strict device block its host, unlike NCCL")
@for_each(stage=(0, storm(1), 3), times=((1, 1), (1, 2), (2, 1)))
@pytest.mark.ranks(2)
def test_two_modules_on_one_group_may_leave_parameters_unused_on_one_rank(stage, times):
    check_in_a_row(stage, *times)


@for_each(stage=(storm(1), 3))
@pytest.mark.ranks(2, backend="strict")
def test_on_strict_ranks_nothing_of_two_modules_on_one_group_crosses(stage):
    check_in_a_row(stage, 2, 2)


class Residual(nn.Module):
    """Blocks that run in another order than they are registered in, or that are left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.when_first_ends = None

    def forward(self, x, order):
        for place, number in enumerate(order):
            x = x + torch.tanh(self.blocks[number](x))
            if place == 0 and self.when_first_ends is not None:
                x.register_hook(lambda _: self.when_first_ends())
        return x


ORDERS = {
    "reversed": (5, 4, 3, 2, 1, 0),
    "one unused": (0, 1, 2, 4, 5),
    "last unused": (0, 1, 2, 3, 4),
    "last frozen": (0, 1, 2, 3, 4, 5),
    "part frozen": (0, 1, 2, 3, 4, 5),
    "unused on one rank": (0, 1, 2, 3, 4, 5),
}


@pytest.mark.cpu(reason="counts what gloo launches")
@for_each(stage=(0, 3), how=ORDERS)  # gradients are reduced at stages 1 and 2 as at stage 3
@pytest.mark.ranks(2)
def test_no_chunk_holds_back_the_others_once_the_order_is_learned(stage, how):
    """When the first block's backward begins, all reductions of the blocks above have begun."""
    module, order = Residual(), ORDERS[how]
    module, optimizer = sharded(module, stage, sgd, bucket=1000)
    reference = Residual()
    its = sgd(reference.parameters())
    for model in (module, reference):
        if how == "last frozen":
            model.blocks[5].requires_grad_(False)
        if how == "part frozen":
            model.blocks[4].bias.requires_grad_(False)
    begun = []

    def count():
        reductions = ("all_reduce", "all_to_all", "reduce_scatter")
        begun.append(sum(event.op in reductions and event.dtype == torch.float32 for event in counted.events))

    module.when_first_ends = count
    for step in range(4):
        orders = [order, order[:3] + order[4:] if how == "unused on one rank" and step else order]
        optimizer.zero_grad()
        with count_collectives() as counted:
            module(batch(step, width=16), orders[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        its.zero_grad()
        losses = [reference(batch(step, rank, width=16), orders[rank]).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        its.step()
    assert_near(whole(module), copies(reference))
    # What no rank uses is reduced at the end. At stage 3 a frozen block begins where it would if it were trained.
    expected = {"one unused": 4, "last unused": 4, "last frozen": 5 if stage == 3 else 4}
    assert begun[-1] == expected.get(how, 5)


class Late(nn.Module):
    """Blocks in some order, some of them in reentrant checkpoints, whose gradients autograd does not announce."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, order, recomputed=()):
        for number in order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=True) if number in recomputed else block(x)
        return x


@pytest.mark.ranks(2)
def test_gradient_of_a_late_reentrant_checkpoint_is_named():
    module, optimizer = sharded(Late(), 1, sgd, bucket=1)
    for step in range(3):
        module(batch(step, width=16), (0, 1, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    words = r"'blocks\.2\.(weight|bias)' got a gradient after its sum .* had begun without it.*use_reentrant=False"
    with pytest.raises(RuntimeError, match=words):
        module(batch(3, width=16).requires_grad_(), (2, 1, 0), {2}).square().mean().backward()
    reset(module)
    optimizer.zero_grad()
    other, its = sharded(Late(), 1, sgd, bucket=1)
    with torch.no_grad():
        for one, two in zip(other.parameters(), module.parameters(), strict=True):
            one.copy_(two)
    for model, each in ((module, optimizer), (other, its)):  # now it is known that such gradients come
        for state in each.state.values():
            state.clear()
        model(batch(4, width=16).requires_grad_(), (2, 1, 0), {2}).square().mean().backward()
        each.step()
    assert_same(whole(module), whole(other))


@pytest.mark.ranks(2)
def test_what_is_frozen_and_trained_in_turn_is_reduced_rightly():
    module, optimizer = sharded(Residual(), 1, sgd, bucket=1000)
    reference = Residual()
    its = sgd(reference.parameters())
    for step, trained in enumerate((1, 0, 0, 1, 1, 0, 1, 1, 1)):
        for model in (module, reference):
            for each in (model.blocks[5].weight, model.blocks[2].weight, model.blocks[2].bias):
                each.requires_grad_(bool(trained))
        optimizer.zero_grad()
        module(batch(step, width=16), range(6)).square().mean().backward()
        optimizer.step()
        its.zero_grad()
        sum(reference(batch(step, rank, width=16), range(6)).square().mean() / 2 for rank in range(2)).backward()
        its.step()
    assert_near(whole(module), copies(reference))


@for_each(stage=KINDS_OF_STAGES, hybrid=(False, True))
@pytest.mark.ranks(4)
def test_a_mean_of_16_bits_does_not_overflow_where_the_sum_would(stage, hybrid):
    rank = dist.get_rank()
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    far = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    module = nn.Linear(4, 4, bias=False).half()
    optimizer = torch.optim.SGD(module.parameters(), lr=2**-15)
    groups = {"group": near, "replicas": far} if hybrid else {"group": dist.group.WORLD}
    shard(module, optimizer, stage=stage, **policies(**groups))
    before = whole(module)["weight"]
    module(torch.full((1, 4), 2.0**15, dtype=torch.float16)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(whole(module)["weight"], before - 1)


def test_flags_go_by_a_device_that_all_groups_have(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group)
    cuda, both, nccl = torch.device("cuda"), "cpu:gloo,cuda:nccl", "cuda:nccl"
    cases = ((both, None, "cpu"), (nccl, None, "cuda"), (both, both, "cpu"), (both, nccl, "cuda"))
    for shards, replicas, expected in cases:
        groups = Groups(shards=shards, gathers=shards, replicas=replicas, divisor=1, calls=None)
        assert Sharers(each=(groups,), reach=(True,)).device_of_flags(cuda).type == expected


@pytest.mark.ranks(2, init=False)
def test_gloo_is_known_by_what_serves_the_cpu_however_the_group_was_made():
    dist.init_process_group()  # of no named backend: torch then calls it undefined
    assert dist.get_backend() != "gloo"
    module, _ = shard(nn.Linear(4, 4), stage=2, group=dist.group.WORLD)
    with count_collectives() as counted:
        module(torch.ones(2, 4)).sum().backward()
    assert [event.op for event in counted.events if event.dtype == torch.float32] == ["all_to_all"]
    dist.destroy_process_group()
