"""What the collectives move is what `traffic` says, element by element.

Beside it, every reduction tells the ranks whether one of them had a gradient of every parameter, and whether they learn
another order: an all-reduce of two int32, which is counted apart. If none had, another of one for each parameter tells
which. At stage 3 the ranks compare there how the pass ends too.
"""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import set_sharding, whole
from par_testing import count_collectives, for_each, storm
from par_zero import DataParallelGroup, no_sync, shard, traffic

from .helpers import for_each_stage, policies
from .routed import subgroup

WIDTH, BLOCKS = 64, 4
BLOCK = WIDTH * WIDTH + WIDTH  # divisible by 16 x 4, so that nothing is padded
PARAMETERS, TENSORS = BLOCKS * BLOCK, 2 * BLOCKS
FLAGS = 4
"""The numbers that all ranks compare at the end of a backward pass."""


def sharded(stage, group, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, stage=stage, group=group, **policies(bucket=4 * BLOCK, **options))
    return model, optimizer


def step(model, optimizer, microbatches=1, *, together=False, keep=True):
    for number in range(microbatches):
        x = torch.randn(2, WIDTH)
        if together and number < microbatches - 1:
            with no_sync(model, keep=keep):
                model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def moved(*arguments, **options):
    """Elements received in a step after the orders were learned: the gradients' and parameters', and the flags'."""
    for _ in range(3):
        step(*arguments, **options)
    with count_collectives() as counted:
        step(*arguments, **options)
    flags = [event for event in counted.events if event.dtype == torch.int32]
    count = sum(2 * event.elements * Fraction(len(event.ranks) - 1, len(event.ranks)) for event in flags)
    return counted.received() - count, count


def part(ranks):
    return Fraction(ranks - 1, ranks)


@pytest.mark.ranks(4)
@for_each(stage=(0, 1, 2, 3), passes=(storm((2, False, True)), (2, True, True), (3, True, False)))
def test_a_step_moves_what_traffic_says(stage, passes):
    """Stage 3 saves two gatherings: the last two units of forward are the first of backward, and stay whole."""
    microbatches, together, keep = passes
    ranks = dist.get_world_size()
    received, flags = moved(*sharded(stage, dist.group.WORLD), microbatches, together=together, keep=keep)
    gathers_anew = stage == 3 and not (together and keep)
    saved = microbatches * 2 * BLOCK * part(ranks) if gathers_anew else 0
    assert received == traffic(stage, PARAMETERS, ranks, microbatches=microbatches, no_sync=together, keep=keep) - saved
    assert flags == 2 * part(ranks) * FLAGS * (microbatches if gathers_anew or not together else 1)


@pytest.mark.ranks(2)
def test_automatic_buckets_are_of_25_megabytes_or_more():
    for bucket, chunks in ((10_000_000, 4), ("auto", 2)):
        linears = nn.Sequential(*(nn.Linear(1600, 1600, bias=False) for _ in range(4)))  # 10.24e6 bytes each
        module, _ = shard(linears, stage=1, group=dist.group.WORLD, overlap={"bucket": bucket})
        with count_collectives() as counted:
            module(torch.ones(1, 1600)).sum().backward()
        assert len([event for event in counted.events if event.dtype == torch.float32]) == chunks


@pytest.mark.ranks(4)
def test_what_is_unused_on_every_rank_is_told_parameter_by_parameter():
    ranks = dist.get_world_size()
    model, optimizer = sharded(2, dist.group.WORLD)
    part_of_it = model[:3]
    received, flags = moved(part_of_it, optimizer)
    assert received == traffic(2, PARAMETERS, ranks)
    assert flags == 2 * (FLAGS + TENSORS) * part(ranks)


@pytest.mark.ranks(4)
@for_each_stage
def test_hybrid_sharding_adds_an_all_reduce_of_the_share(stage):
    rank = dist.get_rank()
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    far = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    received, flags = moved(*sharded(stage, near, replicas=far))
    saved = 2 * BLOCK * part(2) if stage == 3 else 0  # the last two units stay gathered
    assert received == traffic(stage, PARAMETERS, 2, replicas=2) - saved
    # Among the shards, with one more at stage 3 for the order of replicas, then among the replicas.
    assert flags == 2 * (FLAGS + (stage == 3) + FLAGS) * part(2)


@for_each_stage
@pytest.mark.ranks(4)
def test_what_few_ranks_share_moves_among_them_alone(stage):
    """Half of the linears are of two ranks each, as experts are."""
    pair = subgroup((0, 2), (1, 3))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    for parameter in [each for linear in model[1::2] for each in linear.parameters()]:
        set_sharding(parameter, whole(tuple(parameter.shape), tuple(dist.get_process_group_ranks(pair))))
    optimizer = torch.optim.AdamW(model.parameters())
    shard(
        model,
        optimizer,
        stage=stage,
        group=dist.group.WORLD,
        expert_groups=[DataParallelGroup(pair)],
        overlap={"bucket": 4 * BLOCK},
    )
    expected = traffic(stage, PARAMETERS // 2, 4) + traffic(stage, PARAMETERS // 2, 2)
    if stage == 3:  # the last two units stay gathered from forward to backward: one of four ranks, and one of two
        expected -= BLOCK * part(4) + BLOCK * part(2)
    assert moved(model, optimizer) == (expected, 2 * FLAGS * Fraction(3, 4))
