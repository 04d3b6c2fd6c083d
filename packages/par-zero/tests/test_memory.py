"""The bytes that live on a rank after a step are what `memory` says."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import memory, shard

WIDTH, BLOCKS = 128, 4
CHUNK = WIDTH * WIDTH + WIDTH
PARAMETERS = BLOCKS * CHUNK  # divisible by 16 x 4, so that nothing is padded
SLACK = 4096  # step counters, flags and the loss: some bytes each
FP32 = {}
BF16 = {"param_dtype": torch.bfloat16}
BF16_FP32_SUMS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def live_bytes():
    """Of all tensors there are, each storage once."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def grown(stage, options):
    """Bytes that a model, its gradients and its optimizer have after two steps."""
    before = live_bytes()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, bucket=4 * WIDTH * WIDTH, **options)
    dtype = options.get("param_dtype", torch.float32)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return live_bytes() - before


@for_each(stage=range(4), options=(FP32, BF16_FP32_SUMS, BF16))
@pytest.mark.ranks([2, 4])
def test_a_step_leaves_as_many_bytes_as_the_formula_says(stage, options):
    ranks = dist.get_world_size()
    expected = memory(stage, PARAMETERS, ranks, chunk=CHUNK, **options).total
    if options is BF16:  # gradients are cast for the optimizer, until they are dropped
        expected += PARAMETERS * 4 / (ranks if stage else 1)
    assert abs(grown(stage, options) - expected) < SLACK
