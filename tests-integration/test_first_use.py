"""Communicators are connected before the first step.

NCCL connects a communicator when it is first used, and its ranks meet there. Strict ranks refuse that inside of
`no_first_use()`. Here first steps run in it, for every kind of communicator that the packages make or are given.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import Channels, ProcessGroups, Topology
from par_layers import Context, initialize, layer_set
from par_layers.examples import GPT
from par_pipeline import Pipeline, Transport, make_lanes, one_f_one_b
from par_testing import for_each, no_first_use, storm
from par_train import Strategy
from par_zero import shard

WORDS, ROWS, LENGTH = 30, 8, 16

STRATEGIES = {
    **{f"zero {stage}": ({}, {"zero": stage}) for stage in range(4)},
    "zero 3, tensor": ({"tensor": {"size": 2, "mode": "1d"}}, {"zero": 3}),
    "zero 2, tensor, clipped fp16": (
        {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}},
        {"zero": 2, "precision": "fp16", "clip_norm": 1.0},
    ),
    "2d": ({"tensor": {"size": 4, "mode": "2d"}}, {}),
    "gather": ({"sequence": {"size": 2, "mode": "gather"}}, {"zero": 1, "clip_norm": 1.0}),
    "ring": ({"sequence": {"size": 2, "mode": "ring"}}, {"zero": 3}),
    "ring of four": ({"sequence": {"size": 4, "mode": "ring"}}, {}),
    "ulysses": ({"sequence": {"size": 2, "mode": "ulysses"}}, {}),
    "ring of ulysses": ({"sequence": {"size": 4, "mode": "2d", "ulysses": 2}}, {"zero": 2}),
}


USUAL = ("zero 0", "zero 3, tensor", "zero 2, tensor, clipped fp16", "2d", "gather", "ring of ulysses")
"""Every kind of communicator."""


@for_each(name=[name if name in USUAL else storm(name) for name in STRATEGIES])
@pytest.mark.ranks(4, backend="strict", timeout=120)
def test_strategy_first_step_connects_nothing(name):
    parallel, options = STRATEGIES[name]
    with Strategy(parallel=parallel, **options) as strategy:
        layers = strategy.layers
        model = GPT(layers, WORDS, 16, 4, 2, LENGTH)
        initialize(model, 3)
        model, optimizer = strategy.initialize(model, torch.optim.AdamW(model.parameters()))
        ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
        with no_first_use():
            for _ in range(2):
                (inputs, targets), tokens = strategy.context.cut((ids, ids), shift=(1,))
                loss = layers.cross_entropy(model(inputs, tokens=tokens), targets, classes=WORDS)
                strategy.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()


def connected_step(module, optimizer):
    with no_first_use():
        for _ in range(2):
            module(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def linears():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = linears()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def groups_of(*rows):
    """The group of this rank, of some that nobody has used yet."""
    made = [dist.new_group(list(ranks)) for ranks in rows]
    return next(group for group, ranks in zip(made, rows, strict=True) if dist.get_rank() in ranks)


@for_each(stage=(0, storm(1), storm(2), 3), hybrid=(False, True))
@pytest.mark.ranks(4, backend="strict")
def test_shard_over_unused_groups_connects_them(stage, hybrid):
    group = groups_of((0, 1), (2, 3))
    replicas = groups_of((0, 2), (1, 3)) if hybrid else None
    for _ in range(2):  # the second module has communicators of its own
        module = Row()
        optimizer = torch.optim.AdamW(module.parameters())
        shard(module, optimizer, stage=stage, group=group, replicas=replicas, overlap={"bucket": 300})
        connected_step(module, optimizer)


@for_each(mode=("gather", "ring", "ulysses"))
@pytest.mark.ranks(4, backend="strict")
def test_context_over_own_groups_connects_them(mode):
    groups = ProcessGroups(Topology.from_config({"sequence": {"size": 2, "mode": mode}}, 4))
    with groups:
        context = Context(groups)
        q, k, v = (torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3))
        with no_first_use():
            context.attention(q, k, v).sum().backward()
            context.sum(torch.ones(1))


@pytest.mark.ranks(4, backend="strict")
def test_process_groups_connect_groups_and_channels():
    topology = Topology([("data", 2), ("tensor", 2)])
    with ProcessGroups(topology, declare=[("data", "tensor"), Channels("tensor", 2)]) as groups:
        groups.add(Channels("data", 1))
        every = [groups["data"], groups["tensor"], *groups.channels("tensor", 2), *groups.channels("data", 1)]
        with no_first_use():
            for group in every:
                dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.ranks(4, backend="strict")
def test_pipeline_with_tensors_apart_connects_neighbours():
    def lanes(group, device, timeout):
        up, down = (dist.new_group(backend="strict", group_desc=name) for name in ("up", "down"))
        return make_lanes(group, device, timeout)._replace(are_apart=True, up_second=up, down_second=down)

    stage = nn.Linear(4, 4)
    loss = nn.functional.mse_loss
    pipeline = Pipeline(
        stage, one_f_one_b(4, 4), dist.group.WORLD, loss_fn=loss, transport=Transport(lanes=lanes), broadcast_loss=True
    )
    with no_first_use():  # it is not closed, which would abort all strict groups of the world
        pipeline.evaluate(torch.ones(8, 4), target=torch.ones(8, 4))
        pipeline.step(torch.ones(8, 4), target=torch.ones(8, 4))


def test_layer_set_of_one_device_needs_no_group():
    """The examples' model runs without any communicator, so what the tests above refuse comes from ranks."""
    model = GPT(layer_set(None), WORDS, 16, 4, 2, LENGTH)
    initialize(model, 3)
    assert model(torch.zeros(1, LENGTH, dtype=torch.int64)).shape[-1] == WORDS
