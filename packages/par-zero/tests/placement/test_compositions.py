"""A budget beside what else `shard` does: the bits are those without it, and near those of one device."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import Offload, shard, trace

from ..helpers import (
    adamw,
    assert_near,
    assert_same,
    batch,
    copies,
    deferred,
    joint,
    mlp,
    policies,
    sgd,
    train,
    uneven,
    whole,
)

WHOLE = 925_000
"""Bytes of all units of `Uneven`, padding included. Two of them have 774,000 of these."""

ROOM = 860_000
"""Bytes for units: not all of them, so some are gathered in each pass."""


def within(tensors=3, **options):
    """A budget with room for some units beside a rank's shares: of so many tensors as large as all parameters."""
    return Offload(budget=tensors * WHOLE // 2 + ROOM, **options)


def trained(offload, make=sgd, *, steps=4, **options):
    """Whole parameters after steps of two microbatches, and the module. Each linear layer is a unit."""
    module = uneven()
    optimizer = make(module.parameters())
    options = {"group": dist.group.WORLD, "units": lambda part: isinstance(part, nn.Linear), **options}
    shard(module, optimizer, stage=3, offload=offload, **policies(**options))
    dtype = options.get("param_dtype", torch.float32)
    data = [[batch(step, micro=micro).to(dtype) for micro in range(2)] for step in range(steps)]
    train(module, optimizer, data, deferred=deferred(module))
    return whole(module), module


@pytest.mark.cpu(reason="the budget of a device has the other bytes of its allocator")
@pytest.mark.ranks(2)
def test_uneven_sizes_train_as_on_one_device():
    """Sums of two ranks are in another order than those of one device: a few roundings a step."""
    found, module = trained(within())
    assert_same(found, trained(None)[0])
    assert trace(module) is not None
    reference = uneven()
    optimizer = sgd(reference.parameters())
    train(reference, optimizer, [[joint(step), joint(step, micro=1)] for step in range(4)])
    assert_near(found, copies(reference))


OPTIONS = {
    "bf16 with copies": (4, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "make": adamw}),
    "one chunk at a time": (3, {"inflight": 1}),
    "sums": (4, {"reduce_op": "sum", "make": adamw}),
}


@pytest.mark.storm
@pytest.mark.ranks(2)
@for_each(what=OPTIONS, policy=("behind", "static", "next_use"))
def test_options_keep_their_bits(what, policy):
    tensors, options = OPTIONS[what]
    assert_same(trained(within(tensors, policy=policy), **options)[0], trained(None, **options)[0])


@pytest.mark.storm
@pytest.mark.ranks(4)
def test_hybrid_sharding_keeps_its_bits():
    rank = dist.get_rank()
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    far = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    options = {"group": near, "replicas": far}
    assert_same(trained(within(), **options)[0], trained(None, **options)[0])


@pytest.mark.storm
@pytest.mark.ranks(2)
def test_state_on_a_disk_that_is_stepped_late_keeps_its_bits():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        offload = within(2, optimizer="disk", path=path, piece=4096, overlap=True)
        assert_same(trained(offload, adamw)[0], trained(None, adamw)[0])


@pytest.mark.storm
@pytest.mark.ranks(2)
def test_actor_and_critic_that_step_in_turn_keep_their_bits():
    """Each has an optimizer of its own; a step of either ends a trace, and the orders take turns."""

    def steps(offload):
        models = nn.ModuleDict({"actor": mlp(depth=4), "critic": mlp(depth=4, seed=1)})
        optimizers = [sgd(each.parameters()) for each in models.values()]
        shard(models, optimizers, stage=3, group=dist.group.WORLD, offload=offload, overlap={"bucket": 1})
        for step in range(8):
            for each, optimizer in zip(models.values(), optimizers, strict=True):
                with torch.no_grad():
                    models["actor"](batch(step, width=8))
                each(batch(step, width=8)).square().mean().backward()
                optimizer.step()
                models.zero_grad()
        return whole(models)

    assert_same(steps(Offload(budget=18_000)), steps(None))
