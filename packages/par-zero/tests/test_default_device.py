"""Sharding and steps while torch makes tensors on another device by default."""

import pytest
import torch
import torch.distributed as dist

from par_testing import for_each
from par_zero import shard, summon

from .helpers import KINDS_OF_STAGES, adamw, assert_same, batch, copies, loss_of, mlp


class OwnAdamW(torch.optim.AdamW):
    """An optimizer of an unknown class, which `shard` tries."""

    def step(self, closure=None):
        return super().step(closure)


def trained(stage, kind, default):
    module, batches = mlp(), [batch(step, width=8) for step in range(2)]
    optimizer = kind(module.parameters())
    # A tensor of the meta device has no values, so nothing can be read from it, and no rank can receive it.
    torch.set_default_device(default)
    try:
        update = {"elementwise": kind is OwnAdamW}
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300}, update=update)
        for step, inputs in enumerate(batches):
            # No rank has gradients of the first block in the second step, so the ranks exchange which had any.
            loss_of(module[step:], inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_device("cpu")
    with summon(module):
        return copies(module)


@for_each(stage=KINDS_OF_STAGES, kind=(adamw, OwnAdamW))
@pytest.mark.ranks(2)
def test_step_with_another_default_device_gives_the_same(stage, kind):
    assert_same(trained(stage, kind, "meta"), trained(stage, kind, "cpu"))
