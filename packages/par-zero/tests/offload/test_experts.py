"""Offload of experts, which other process groups shard: no bit changes, and ranks keep one order."""

import pytest
import torch
import torch.distributed as dist

from par_testing import Strict, for_each, once
from par_zero import DataParallelGroup, Offload, residency, shard, summon

from ..helpers import assert_same, policies, whole
from ..routed import Routed, accumulate, holding, loss_of, norm_of, part_of
from .cases import moments, small

pytestmark = pytest.mark.cpu(reason="offload from a CPU: that from a device has tests of its own")

EXACT = {"rtol": 1e-9, "atol": 1e-10}
"""Of fp64: some roundings of sums in another order, which AdamW divides by roots of small moments."""

STEPS, MICROBATCHES = 3, 2


def losses_of(module, step, micro, seen, ranks):
    """The losses of some ranks' rows. In the second step no row goes to another expert than the first.

    In the first step all layers run, then the last rank leaves one out.
    """
    return [
        loss_of(
            module, step, rank, ranks, 3 if step and rank == ranks - 1 else None, micro, only=0 if step == 1 else None
        )
        for rank in seen
    ]


def alone(ranks):
    """The model on one device after all steps, and the norm of the gradients of each."""
    module, norms = Routed(), []
    optimizer = small(module.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICROBATCHES):
            (sum(losses_of(module, step, micro, range(ranks), ranks)) / ranks).backward()
        norms.append(torch.cat([each.grad.flatten() for each in module.parameters()]).norm())
        optimizer.step()
    return module, norms


def together(parallel, uneven, stage, offload, *, deferred=False, bucket=300, **options):
    """The same over ranks that have some of the experts each, with the fullest that was seen of each tier."""
    module = Routed(parallel, uneven)
    optimizer = small(module.parameters())
    options = {
        "group": dist.group.WORLD,
        "expert_groups": [DataParallelGroup(holding(parallel))],
        "bucket": bucket,
        **options,
    }
    shard(module, optimizer, stage=stage, offload=offload, **policies(**options))
    rank, ranks, norms, most = dist.get_rank(), dist.get_world_size(), [], dict.fromkeys(("device", "host", "disk"), 0)
    for step in range(STEPS):
        accumulate(
            module,
            lambda micro, step=step: losses_of(module, step, micro, [rank], ranks)[0],
            MICROBATCHES,
            deferred=deferred,
        )
        norms.append(norm_of(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        held = residency(module)
        most = {tier: max(size, held.total(tier), held.total(tier, fullest=True)) for tier, size in most.items()}
    return whole(module) | moments(optimizer) | {"norms": torch.stack(norms)}, most, module


def assert_like_alone(found, parallel, uneven):
    """Weights and norms are those of one device."""
    module, norms = once(alone, dist.get_world_size())
    torch.testing.assert_close(found["norms"], torch.stack(norms), **EXACT)
    for name, value in module.named_parameters():
        expected = part_of(name, value.detach(), parallel, uneven)
        torch.testing.assert_close(found[name], expected, **EXACT, msg=lambda text, name=name: name + text)


def assert_same_weights(found, plain):
    """The same bits, but for norms, of gradients that lie in other pieces: their sums round in another order."""
    torch.testing.assert_close(found["norms"], plain["norms"], **EXACT)
    assert_same(found | {"norms": plain["norms"]}, plain)


def check(parallel, stage, folder, *, uneven=False, deferred=False, **given):
    plain, *_ = together(parallel, uneven, stage, None, deferred=deferred)
    assert_like_alone(plain, parallel, uneven)
    offload = Offload(path=folder, piece=256, ahead=3, **given)
    found, most, _ = together(parallel, uneven, stage, offload, deferred=deferred)
    assert_same_weights(found, plain)
    assert most["disk"] or most["host"]


BELOW = {"disk": {"optimizer": "disk"}, "all tiers": {"optimizer": {"host": 0.3, "disk": 0.4}}}
EVERYTHING = {"optimizer": "disk", "parameters": "disk", "gradients": "disk"}
AT_3 = {
    "all tiers": {"optimizer": {"host": 0.3, "disk": 0.4}, "parameters": 0.4, "gradients": {"disk": 0.6}},
    "everything": EVERYTHING,
    "late": {**EVERYTHING, "overlap": True},
}


@for_each(case=[(stage, BELOW[name]) for stage, name in ((0, "disk"), (1, "all tiers"), (2, "all tiers"))])
@pytest.mark.ranks(2)
def test_offloaded_state_of_experts_changes_no_number(case, tmp_path):
    stage, given = case
    check(2, stage, tmp_path, uneven=True, **given)


@pytest.mark.storm
@for_each(case=AT_3)
@pytest.mark.ranks(2)
def test_offloaded_parameters_of_experts_change_no_number(case, tmp_path):
    check(2, 3, tmp_path, uneven=True, **AT_3[case])


@pytest.mark.storm
@for_each(
    case=[(stage, given) for stage in range(3) for given in BELOW.values()] + [(3, given) for given in AT_3.values()],
    layout=((2, True), (4, False)),
    deferred=(False, True),
)
@pytest.mark.ranks(4, timeout=240)
def test_offloaded_experts_with_replicas_change_no_number(case, layout, deferred, tmp_path):
    (stage, given), (parallel, uneven) = case, layout
    check(parallel, stage, tmp_path, uneven=uneven, deferred=deferred, **given)


@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=1))
def test_reads_and_writes_at_stage_3_keep_the_order_of_ranks(tmp_path):
    check(2, 3, tmp_path, uneven=True, **EVERYTHING, overlap=True)


def most_of(size):
    """The largest number of all ranks."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, size)
    return max(said)


@pytest.mark.storm
@for_each(case=((1, "host"), (2, "disk"), (3, "disk")), uneven=(False, True))
@pytest.mark.ranks(2)
def test_auto_with_experts_fits_every_tier(case, uneven, tmp_path):
    """The ranks choose alike, though one of them may have more experts and so more to keep."""
    stage, tier = case
    limited = {"inflight": 2} if stage == 3 else {}  # below, a rank that waits in backward may wait for one that waits
    plain, most, module = together(2, uneven, stage, None, **limited)
    # Without a limit, only what reductions keep between steps is known.
    device = most["device"] - 5_000 if stage == 3 else residency(module).total("device") - 1_000
    budget = {"device": most_of(device), tier: 1_000_000}
    auto = dict.fromkeys(("optimizer", "gradients", "parameters") if stage == 3 else ("optimizer",), "auto")
    found, most, module = together(
        2, uneven, stage, Offload(**auto, path=tmp_path, piece=256, ahead=2, budget=budget), **limited
    )
    assert_same_weights(found, plain)
    held = residency(module)
    there = most if stage == 3 else {each: held.total(each) for each in most}
    assert all(there[each] <= size for each, size in budget.items()), (budget, there, str(held))
    assert most_of(most[tier]) > 0


@pytest.mark.ranks(2)
def test_budget_too_small_on_one_rank_raises_on_all_ranks():
    """The rank with more experts has too much for its device and its host, and both say so."""
    module = Routed(2, uneven=True)
    optimizer = small(module.parameters())
    before = [id(each) for each in optimizer.param_groups[0]["params"]]
    offload = Offload(optimizer="auto", budget={"device": 25_000, "host": 1_000})
    options = {"group": dist.group.WORLD, "expert_groups": [DataParallelGroup(holding(2))], "bucket": 300}
    with pytest.raises(ValueError, match=r"the budget of the host is 1\.0 kB, and .* kB are the least: optimizer"):
        shard(module, optimizer, stage=1, offload=offload, **policies(**options))
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == before
    shard(module, optimizer, stage=1, **policies(**options))


@pytest.mark.ranks(2)
def test_placement_with_experts_is_the_same_on_all_ranks():
    """Within a budget units stay gathered as there is room, of which one rank has less."""
    plain, *_ = together(2, True, 3, None)
    for device in (40_000, 60_000):
        found, *_, module = together(2, True, 3, Offload(budget=device))
        assert_same_weights(found, plain)
        with summon(module):
            pass
