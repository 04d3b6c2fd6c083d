"""The bytes that live on a rank, in `shard` and after a step, are what is said. Each case has a world of its own to
count in.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import set_sharding, whole
from par_testing import live_bytes, peak_bytes, storm
from par_zero import DataParallelGroup, MixedPrecision, memory, shard

from .helpers import policies
from .routed import subgroup

WIDTH, BLOCKS = 128, 4
CHUNK = WIDTH * WIDTH + WIDTH
PARAMETERS = BLOCKS * CHUNK  # divisible by 16 x 4, so that nothing is padded
SLACK = 4096  # step counters, flags and the loss: some bytes each
FP32 = {}
BF16 = {"param_dtype": torch.bfloat16}
BF16_FP32_SUMS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def assert_grown(expected, stage, options, *, buffers):
    """Asserts how many bytes a model, its gradients and its optimizer have after two steps.

    Buffers are those of two chunks, or of one, if each reduction had arrived before the next began.
    """
    before = live_bytes()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, **policies(bucket=4 * WIDTH * WIDTH, **options))
    dtype = options.get("param_dtype", torch.float32)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
        optimizer.step()

    def is_expected(total):
        return -SLACK - buffers / 2 < total - before - expected < SLACK

    total = live_bytes(is_expected)
    assert is_expected(total), (total - before, expected)


def check_formula(stage, options):
    expected = memory(stage, PARAMETERS, dist.get_world_size(), chunk=CHUNK, precision=MixedPrecision(**options))
    assert_grown(expected.total, stage, options, buffers=expected.buffers)


@pytest.mark.ranks(4, backend="gloo")
@pytest.mark.parametrize("stage", range(4))
def test_a_step_leaves_as_many_bytes_as_the_formula_says(stage):
    check_formula(stage, FP32)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("stage", [storm(0), 1, storm(2), 3])
def test_a_step_in_bf16_with_fp32_sums_leaves_as_many_bytes_as_the_formula_says(stage):
    check_formula(stage, BF16_FP32_SUMS)


@pytest.mark.ranks(4, backend="gloo")
@pytest.mark.parametrize("stage", [0, storm(1), storm(2), 3])
def test_bf16_gradients_are_cast_for_the_optimizer_until_they_are_dropped(stage):
    ranks = dist.get_world_size()
    expected = memory(stage, PARAMETERS, ranks, chunk=CHUNK, precision=MixedPrecision(**BF16))
    cast = PARAMETERS * 4 / (ranks if stage else 1)
    assert_grown(expected.total + cast, stage, BF16, buffers=expected.buffers)


@pytest.mark.ranks(4, backend="gloo")
@pytest.mark.parametrize("stage", [0, storm(1), storm(2), 3])
def test_what_few_ranks_share_counts_by_their_number(stage):
    """Half of the linears are of two ranks each, as experts are."""
    before = live_bytes()
    pairs, group = [(0, 2), (1, 3)], subgroup((0, 2), (1, 3))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    for parameter in [each for linear in model[1::2] for each in linear.parameters()]:
        set_sharding(parameter, whole(tuple(parameter.shape), pairs[dist.get_rank() % 2]))
    optimizer = torch.optim.AdamW(model.parameters())
    shard(
        model,
        optimizer,
        stage=stage,
        group=dist.group.WORLD,
        expert_groups=[DataParallelGroup(group)],
        overlap={"bucket": 4 * WIDTH * WIDTH},
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
    expected = memory(stage, PARAMETERS // 2, 4, chunk=CHUNK)
    both = expected.total + memory(stage, PARAMETERS // 2, 2).total

    def is_expected(total):
        return -SLACK - expected.buffers < total - before - both < SLACK

    total = live_bytes(is_expected)
    assert is_expected(total), (total - before, expected)


class Signalled(nn.Sequential):
    """Linears; calls a function when backward reaches the first of them."""

    def __init__(self, reached):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * BLOCKS)))
        self.reached = reached

    def forward(self, x):
        first, *rest = self
        x = first(x)
        x.register_hook(lambda _: self.reached())
        for block in rest:
            x = block(x)
        return x


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("inflight", [None, 1, 3])
def test_gradients_in_flight_take_no_more_memory_than_they_may(inflight):
    """Rank 1 is late, so that nothing of rank 0's is reduced: without a bound all its chunks are under way."""
    before, token = live_bytes(), torch.zeros(1)
    module = Signalled(lambda: dist.send(token, 1) if inflight is None and dist.get_rank() == 0 else None)
    shard(module, stage=2, group=dist.group.WORLD, overlap={"bucket": 4 * WIDTH * WIDTH, "inflight": inflight})
    loss = module(torch.ones(2, WIDTH)).square().mean()
    if dist.get_rank() == 1:
        if inflight is None:
            dist.recv(token, 0)
        else:
            time.sleep(0.1)
        loss.backward()
        return
    at_once = 2 * BLOCKS if inflight is None else inflight
    most = memory(2, 2 * PARAMETERS, 2, slots=0, chunk=CHUNK, inflight=at_once).total
    arriving = 4 * CHUNK  # the gradients of a linear, before they are copied into its chunk
    peak = peak_bytes(loss.backward, before + most + arriving + SLACK) - before
    assert peak < most + arriving + SLACK, (peak, most)
    if inflight is None:
        assert peak > most - 2 * 4 * CHUNK, (peak, most)  # the first linear's have not come by then


UNEVEN = (96, 160, 40, 200)  # widths of blocks
SIZES = [4 * (width * width + width) for width in UNEVEN]


def uneven_blocks():
    return nn.Sequential(*(nn.Linear(width, width) for width in UNEVEN))


def kept_of(options):
    """The part of a chunk's bytes that a rank keeps of it, by stage."""
    ranks, weights = dist.get_world_size(), options.get("param_dtype", torch.float32).itemsize / 4
    master = 1.0 if options else 0.0
    return (weights + master, weights + master / ranks, weights + master / ranks, (weights + master) / ranks)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, FP32), (1, BF16), (3, BF16), storm(0, BF16), storm(1, FP32), storm(2, FP32), storm(2, BF16), storm(3, FP32)],
)
def test_shard_has_what_is_packed_and_what_is_not_and_one_chunk(stage, options):
    """At its fullest moment, in bytes. Here each block is a chunk, and the last one is packed first."""
    before = live_bytes()
    module = uneven_blocks()
    optimizer = torch.optim.AdamW(module.parameters())
    assert live_bytes() - before == sum(SIZES)
    kept = kept_of(options)[stage]
    moments = [
        sum(SIZES[:number]) + SIZES[number] + kept * sum(SIZES[number + 1 :]) + SIZES[number]
        for number in range(len(SIZES))
    ]
    padding = 4 * len(SIZES) * 2 * 16 * dist.get_world_size()

    def run():
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(bucket=SIZES[2], **options))

    peak = peak_bytes(run, before + max(moments) + padding) - before
    assert max(moments) - padding < peak < max(moments) + padding, (peak, max(moments), sum(SIZES))
    assert max(moments) < 1.75 * sum(SIZES)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("stage", [0, storm(1), storm(2), 3])
def test_state_that_a_constructor_has_made_is_cut_chunk_by_chunk_too(stage):
    """Adagrad makes as much as there are parameters."""
    before = live_bytes()
    module = uneven_blocks()
    optimizer = torch.optim.Adagrad(module.parameters())
    limit = 2 * sum(SIZES) + max(SIZES) + SLACK  # as they were, and a chunk

    def run():
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": SIZES[2]})

    assert peak_bytes(run, before + limit) - before < limit
    kept = 2 * sum(SIZES) if stage == 0 else sum(SIZES) * (4 / 3 if stage < 3 else 2 / 3)
    assert live_bytes(lambda total: total - before < kept + SLACK) - before < kept + SLACK
