"""What a step waits for, in virtual time: how well communication hides behind what is computed.

A rank computes 6.25e12 operations and communicates 125e9 bytes a second, so that the gradients of a small unit are
reduced in less time than its backward pass takes, as those of a large one are on a GPU. Virtual time depends on the
order of issues and waits alone, so these are figures, not measurements: a wait that comes too early shows here, on any
machine.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import Compute, Links, Strict, for_each, step, storm, strict_time
from par_zero import no_sync, shard

from .helpers import STAGES, batch, mlp, sgd, train

WIDTH, BLOCKS, ROWS = 64, 8, 64
BANDWIDTH, FLOPS = 125e9, 6.25e12
BLOCK = 3 * WIDTH * WIDTH * 4  # bytes of three linears in fp32
FORWARD = 3 * 2 * ROWS * WIDTH * WIDTH / FLOPS  # seconds of a block
GATHER = BLOCK / 2 / BANDWIDTH  # seconds of an all-gather or a reduce-scatter of a block between two ranks
COMPUTED = (3 * BLOCKS * 3 - 1) * FORWARD / 3  # backward is twice forward; the first linear's input wants no gradient
SLACK = 0.1e-6  # seconds: norms, flags and the like
LINKS = Links(inside=(0.0, BANDWIDTH))
VIRTUAL = Strict(links=LINKS, compute=Compute(flops=FLOPS, memory=1e30))

EXPOSED = {
    0: 2 * GATHER,  # the last gradients, which are there when backward ends
    1: GATHER + GATHER,  # and the first block's parameters, for which nothing can be computed before
    2: GATHER + GATHER,
    3: GATHER + GATHER,
}


class Blocks(nn.Module):
    """Blocks of three linears that run in any order, some of them perhaps not at all."""

    def __init__(self, order=range(BLOCKS)):
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))) for _ in range(BLOCKS))
        self.blocks, self.order = nn.ModuleList(blocks), order

    def forward(self, x):
        for number in self.order:
            x = self.blocks[number](x)
        return x


def steps(stage, count, order=range(BLOCKS), *, frozen=(), microbatches=1, then=None):
    """Virtual time of some steps; the blocks may run in another order after the first one."""
    model = Blocks(order)
    for number in frozen:
        model.blocks[number].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": BLOCK})
    inputs = torch.ones(ROWS, WIDTH)
    for done in range(count):
        model.order = then if done and then is not None else order
        strict_time()
        for number in range(microbatches):
            with no_sync(model) if number < microbatches - 1 else nullcontext():
                model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield strict_time()


@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
@pytest.mark.parametrize("stage", range(4))
def test_a_step_is_exposed_to_what_nothing_can_hide(stage):
    *_, last = steps(stage, 3)
    assert last.computing == pytest.approx(COMPUTED, rel=0.01)
    assert last.exposed == pytest.approx(EXPOSED[stage], abs=SLACK), last.by_site


SIXTEEN = Strict(  # a message of 15/16 of a block takes as long as one of a half does between two ranks
    links=Links(inside=(0.0, BANDWIDTH * 15 / 8), ranks_per_host=16), compute=Compute(flops=FLOPS, memory=1e30)
)


@pytest.mark.storm
@pytest.mark.ranks(16, backend="strict", strict=SIXTEEN, timeout=120)
@pytest.mark.parametrize("stage", [2, 3])
def test_sixteen_ranks_are_exposed_as_two(stage):
    *_, last = steps(stage, 3)
    assert last.exposed == pytest.approx(EXPOSED[stage], abs=SLACK), last.by_site


@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
def test_the_first_step_of_stage_3_waits_for_every_gather():
    """It does not know yet what comes next.

    Once forward and once backward, but for the block that is still there; backward perhaps behind the reduction of the
    block before, if that goes over the same communicator.
    """
    first, *_ = steps(3, 1)
    backward = BLOCKS - 1
    assert (BLOCKS + backward) * GATHER < first.exposed < (BLOCKS + 2 * backward + 1) * GATHER + SLACK, first.by_site


OTHERWISE = {
    "one unused": {"order": (0, 1, 2, 3, 5, 6, 7)},
    "first frozen": {"frozen": (0,)},
    "last frozen": {"frozen": (BLOCKS - 1,)},
    "reversed": {"order": range(BLOCKS)[::-1]},
}


@for_each(how=OTHERWISE)
@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
@pytest.mark.parametrize("stage", [storm(0), storm(2), 3])
def test_what_runs_otherwise_than_it_is_registered_holds_nothing_back(stage, how):
    """Neither reductions nor gatherings: only those wait that wait in a model whose blocks run in turn.

    A block that is unused on this rank or frozen is reduced when backward ends, for what other ranks may have of it.
    """
    *_, last = steps(stage, 4, **OTHERWISE[how])
    late = 0 if how == "reversed" else 2 * GATHER if stage == 0 else GATHER
    assert last.exposed < EXPOSED[stage] + late + SLACK, last.by_site


@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_block_unused_on_one_rank_exposes_the_other_alone(stage):
    """Whichever rank it is: the rank that uses the block computes it, which the other rank waits for."""
    rows = []
    for unused in range(2):
        mine = dist.get_rank() == unused
        *_, last = steps(stage, 6, then=[n for n in range(BLOCKS) if n != 6 or not mine])
        both = torch.tensor([last.exposed, 0.0] if mine else [0.0, last.exposed], dtype=torch.float64)
        dist.all_reduce(both)
        rows.append(both)
    block = 3 * FORWARD  # forward, and backward twice as long
    of_unused, of_other = rows[1].tolist()
    assert of_other < EXPOSED[stage] + SLACK
    assert of_unused < EXPOSED[stage] + block + GATHER + SLACK
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=2 * GATHER + SLACK)


@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
def test_microbatches_under_no_sync_are_exposed_as_one_alone():
    """Stage 3 keeps what it has gathered, so three microbatches wait for no more than one."""
    *_, plain = steps(3, 4)
    *_, kept = steps(3, 4, microbatches=3)
    assert kept.computing == pytest.approx(3 * plain.computing, rel=0.01)
    assert kept.exposed < 1.1 * plain.exposed, kept.by_site


class Repeated(nn.Module):
    """Linears of which each runs as many times as it is told."""

    def __init__(self, times):
        super().__init__()
        torch.manual_seed(0)
        self.linears, self.times = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in times), times

    def forward(self, x):
        for linear, times in zip(self.linears, self.times, strict=True):
            for _ in range(times):
                x = linear(x)
        return x


BACKWARD = 2 * 2 * ROWS * WIDTH * WIDTH / FLOPS  # seconds of a linear
NARROW = Strict(
    links=Links(inside=(0.0, WIDTH * WIDTH * 4 / 2 / (4 * BACKWARD))), compute=Compute(flops=FLOPS, memory=1e30)
)


@pytest.mark.ranks(2, backend="strict", strict=NARROW)
def test_backward_waits_only_for_more_reductions_than_may_be_in_flight():
    """A reduction takes as long as the backward pass of four linears.

    In backward a linear that has run once is complete right after one that has run 16 times, and waits three linears'
    time where there is room for one reduction alone. Where there is room for two it does not, as the next one takes
    longer than both. When backward ends the last two are left, three linears' time and four.
    """
    exposed = {}
    for inflight in (1, 2, None):
        module = Repeated((1, 16, 1, 16))
        shard(module, stage=2, group=dist.group.WORLD, overlap={"bucket": 1, "inflight": inflight})
        inputs = torch.ones(ROWS, WIDTH, requires_grad=True)
        for _ in range(3):
            loss = module(inputs).square().mean()
            strict_time()
            loss.backward()
        exposed[inflight] = strict_time().exposed / BACKWARD
    slack = SLACK / BACKWARD
    assert exposed[None] == pytest.approx(4 + 3, abs=slack), exposed
    assert exposed[2] == pytest.approx(exposed[None], abs=slack)
    assert exposed[1] == pytest.approx(exposed[None] + 3, abs=slack)


LOOKS = {
    "item() or bool() in usage.py:<genexpr>": "whether all parameters had a gradient here",
    "tolist() in _collectives.py:read": "whether they had in the pass before, on any rank, and which order to learn",
    "nonzero() in usage.py:unused": "which parameters had none anywhere",
    "tolist() in usage.py:unused": "the same",
    "tolist() in agreement.py:compare": "whether all ranks end the pass alike, at stage 3",
}
"""Where the host looks at numbers in a step, and at which; all of them lie on the CPU where a group has gloo for it."""


@for_each(stage=STAGES)
@pytest.mark.ranks(2, backend="strict")
def test_in_a_step_the_host_looks_at_flags_alone(stage):
    """It waits for nothing that is computed or communicated on a device."""
    model = mlp()
    optimizer = sgd(model.parameters())
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    for number in range(4):
        train(model, optimizer, [[batch(number, width=8)]])
    inputs = batch(4, width=8)
    with step(allow=[site.rpartition(" ")[2] for site in LOOKS]) as seen:
        train(model, optimizer, [[inputs]])
    assert set(seen.sites) <= set(LOOKS) - (set() if stage == 3 else {"tolist() in agreement.py:compare"})


LATENCY = 0.05e-6  # seconds
SLOW = Strict(links=Links(inside=(LATENCY, 1e30)), compute=Compute(flops=FLOPS, memory=1e30))


@for_each(stage=(0, 1, 2))
@pytest.mark.ranks(2, backend="strict", strict=SLOW)
def test_who_had_all_gradients_waits_for_no_flags(stage):
    """They are on their way in the next forward; at stages 1 and 2 the first parameters come behind them."""
    *_, last = steps(stage, 4)
    reduction, flags, gather = (2 * LATENCY, 0, 0) if stage == 0 else (LATENCY, 2 * LATENCY, LATENCY)
    assert last.exposed == pytest.approx(reduction + flags + gather), last.by_site
