"""`predict_step` predicts what `shard` makes: the bytes of parameters, gradients and state."""

import pytest
import torch
import torch.distributed as dist

from par_testing import for_each
from par_zero import ShardOptions, predict_step, residency, shard

from ..helpers import STAGES, adamw, batch, policies, sgd, train, uneven


def several(module):
    """Two optimizers, the first with two param groups, and a frozen parameter that neither has."""
    module.first.bias.requires_grad_(False)
    blocks, norm = list(module.blocks.parameters()), list(module.norm.parameters())
    taken = {id(each) for each in (*blocks, *norm, module.first.bias)}
    rest = [each for each in module.parameters() if id(each) not in taken]
    return [adamw([{"params": blocks}, {"params": norm, "lr": 1e-3}]), sgd(rest)]


CASES = {
    "auto": ({"bucket": 300}, lambda module: adamw(module.parameters())),
    "joined": ({"bucket": 600_000}, lambda module: adamw(module.parameters())),
    "own units": ({"units": lambda module: isinstance(module, torch.nn.Linear)}, lambda m: adamw(m.parameters())),
    "several optimizers": ({"bucket": 100_000}, several),
    "whole tensors": ({"bucket": 100_000, "atomic": True}, lambda module: adamw(module.parameters())),
}


@for_each(case=CASES, stage=STAGES)
@pytest.mark.ranks(2)
def test_predicted_bytes_equal_those_of_a_step(case, stage):
    options, make = CASES[case]
    module = uneven()
    optimizer = make(module)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in module.named_parameters()}
    step = predict_step(module, optimizer, stage=stage, ranks=2, options=ShardOptions.of(**policies(**options)))
    assert {name: (each, each.data_ptr()) for name, each in module.named_parameters()} == before
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(**options))
    for number in range(2):
        for each in optimizers[1:]:
            each.zero_grad()
        train(module, optimizers[0], [[batch(number)]])
        for each in optimizers[1:]:
            each.step()
    there = residency(module).now["device"]
    assert there["parameters"] == step.parameters
    assert there["gradients"] == sum(
        each.shard if stage >= 2 else each.gradient for each in step.program.chunks.values() if each.gradient
    )
    if case != "whole tensors":  # ranks have other tensors then
        # The prediction is of rank 0, and the last shard has less padding to step.
        padding = 2 * 4 * 16 * 3 * len(step.program.chunks)
        assert abs(there["optimizer"] - step.optimizer) <= padding


def test_experts_are_in_chunks_of_their_own():
    module = uneven()
    shared = list(module.blocks.parameters())
    for stage in STAGES:
        step = predict_step(module, adamw(module.parameters()), stage=stage, ranks=4, expert_groups=[(shared, 2)])
        chunks = step.program.chunks.values()
        sizes = [sum(chunk.full // 4 for chunk in chunks if chunk.share == share) for share in range(2)]
        wanted = [sum(each.numel() for each in module.parameters()), sum(each.numel() for each in shared)]
        wanted[0] -= wanted[1]
        assert all(0 <= size - least < 16 * 4 * len(chunks) for size, least in zip(sizes, wanted, strict=True)), stage
