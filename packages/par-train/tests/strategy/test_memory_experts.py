"""`Strategy(memory=...)` with experts over ranks: they and all else are shared by other numbers of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_layers import Balance, normal
from par_recompute import saved
from par_testing import for_each
from par_train import Strategy
from par_zero import residency

from .test_experts import adamw, batches, blocks, check_trains_as_alone, data_loss

WIDTH = 8
PADDING = 16 * 4
"""Bytes by which what a rank steps of a chunk may differ from its share, which ends at a multiple of 16 elements."""


class Uneven(nn.Module):
    """Mixtures with fewer and with more hidden features, among dense layers, and what is the root's own."""

    def __init__(self, layers):
        super().__init__()
        self.first = layers.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList()
        for hidden in (8, 24, 16):
            mixture = layers.MoE(WIDTH, hidden, experts=4, top_k=2, balance=Balance(), init=normal(0.4))
            self.blocks.append(nn.Sequential(mixture, layers.LayerNorm(WIDTH)))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def at_the_fullest(parallel, zero, memory, steps=3):
    """Parameters after some steps, what was spent, what each step had at its fullest, with what layers kept, and bytes
    of counts of steps.
    """
    with Strategy(parallel=parallel, zero=zero, memory=memory, seed=3) as strategy:
        model = Uneven(strategy.layers)
        model, optimizer = strategy.initialize(model, adamw(model))
        held = []
        for inputs, target in batches(steps):
            strategy.backward(data_loss(model(inputs), target), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            held.append((residency(model), 0 if memory is None else saved(model).counted))
        counts = 4 * sum(len(group["params"]) for group in optimizer.param_groups)  # of steps, one for each tensor
        return [each.detach().clone() for each in model.parameters()], strategy.spent, held, counts


def most_of(size):
    """The largest number of all ranks."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, size)
    return max(said)


def check_budgets(parallel, stage, folder):
    zero = {"stage": stage, "bucket": 1000}
    expected, *_ = at_the_fullest(parallel, zero, None)
    found, spent, held, counts = at_the_fullest(parallel, zero, {"device": 2**30})
    assert all(map(torch.equal, found, expected))
    there, kinds, chunks = held[-1][0], spent.kinds, 12
    assert 0 <= kinds["parameters"] - counts - there.now["device"]["parameters"] <= 4 * chunks  # a share may be empty
    assert 0 <= kinds["optimizer"] + counts - there.fullest["device"]["optimizer"] <= PADDING * chunks
    assert all(each.total(fullest=True) <= spent.state for each, _ in held), (kinds, there)
    most = most_of(int(1.4 * (held[-1][1] + held[0][1])) + 100)  # what routing makes of layers differs by step and rank
    least = most_of(spent.state - kinds["optimizer"]) + most + 4 * PADDING
    budgets = [(least, {"host": 2**20}), (least, {"host": 2_000, "disk": 2**20})]
    if stage == 3:
        budgets.append((least - 0.4 * kinds["parameters"], {"disk": 2**20}))
    for device, rooms in budgets:
        memory = {"device": int(device), "activations": most, "path": str(folder), **rooms}
        found, less, held, _ = at_the_fullest(parallel, zero, memory)
        assert all(map(torch.equal, found, expected)), rooms
        assert less.shares.part("optimizer") == pytest.approx(1), "what can is away in the first step"
        assert bool(less.shares.part("parameters")) == (device < least)
        assert all(each.total(fullest=True) <= less.state for each, _ in held), (held[-1][0], less.kinds)
        assert all(each.total(fullest=True) + kept <= memory["device"] for each, kept in held)


@for_each(stage=(1, 3))
@pytest.mark.ranks(2, timeout=60)
def test_within_a_budget_experts_have_the_bytes_that_were_predicted_and_the_same_bits(stage, tmp_path):
    check_budgets({"expert": 2}, stage, tmp_path)


@pytest.mark.storm
@for_each(stage=(0, 1, 2, 3))
@pytest.mark.ranks(4, timeout=200)
def test_copies_of_experts_on_fewer_ranks_than_all_else_are_counted_by_their_own_number(stage, tmp_path):
    check_budgets({"data": 2, "expert": 2}, stage, tmp_path)


@for_each(zero=(0, 1, 2, 3))
@pytest.mark.ranks(2, timeout=120)
def test_experts_train_within_a_budget_as_on_one_device(zero, tmp_path):
    memory = {"device": "8MB", "host": 4_000, "disk": "8MB", "path": str(tmp_path)}
    check_trains_as_alone({"expert": 2}, zero=zero, memory=memory)


@pytest.mark.ranks(2)
def test_a_budget_that_is_too_small_is_refused_on_all_ranks_with_the_least():
    with Strategy(parallel={"expert": 2}, zero=3, memory={"device": 4_000, "host": "1MB"}) as strategy:
        model = blocks(strategy.layers)
        with pytest.raises(ValueError, match=r"the budget of the device is 4\.0 kB, and .* are the least: one unit"):
            strategy.initialize(model, adamw(model))
