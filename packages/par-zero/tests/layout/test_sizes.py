"""`chunk_sizes` says beforehand what `shard` makes: bytes of parameters, gradients and state are those that it has."""

import pytest
import torch
import torch.distributed as dist

from par_testing import for_each
from par_zero import ShardOptions, chunk_sizes, residency, shard, state_counter_bytes

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
def test_chunks_are_known_before_there_are_any(case, stage):
    options, make = CASES[case]
    module = uneven()
    optimizer = make(module)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in module.named_parameters()}
    chunks = chunk_sizes(module, optimizer, stage=stage, ranks=2, options=ShardOptions.of(**policies(**options)))
    assert {name: (each, each.data_ptr()) for name, each in module.named_parameters()} == before
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(**options))
    for step in range(2):
        for each in optimizers[1:]:
            each.zero_grad()
        train(module, optimizers[0], [[batch(step)]])
        for each in optimizers[1:]:
            each.step()
    there = residency(module).now["device"]
    in_chunks, trained = sum(chunk.elements for chunk in chunks), sum(each.elements for each in chunks if each.trained)
    frozen = 0 if stage == 3 else sum(each.numel() for each in module.parameters() if not each.requires_grad)
    assert there["parameters"] == 4 * (in_chunks / (2 if stage == 3 else 1) + frozen)
    assert there["gradients"] == 4 * trained / (2 if stage >= 2 else 1)
    assert {group for chunk in chunks for group in chunk.groups} == set(range(len(groups)))
    assert all(bool(chunk.groups) == chunk.trained for chunk in chunks)
    if len(optimizers) == 1 and case != "whole tensors":
        counts = sum(state_counter_bytes(*groups[group], torch.float32) for each in chunks for group in each.groups)
        most = 2 * 4 * trained / (2 if stage else 1) + counts
        padding = 2 * 4 * 16 * 3 * len(chunks)  # of which the optimizer has none
        assert most - padding <= there["optimizer"] <= most


def test_others_lie_in_chunks_of_their_own():
    module = uneven()
    shared = list(module.blocks.parameters())
    for stage in STAGES:
        chunks = chunk_sizes(module, adamw(module.parameters()), stage=stage, ranks=4, expert_groups=[(shared, 2)])
        sizes = [sum(chunk.elements for chunk in chunks if chunk.share == share) for share in range(2)]
        wanted = [sum(each.numel() for each in module.parameters()), sum(each.numel() for each in shared)]
        wanted[0] -= wanted[1]
        assert all(0 <= size - least < 16 * 4 * len(chunks) for size, least in zip(sizes, wanted, strict=True)), stage
