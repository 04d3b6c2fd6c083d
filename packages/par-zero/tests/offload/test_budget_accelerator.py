"""Budgets of an accelerator, its host and a disk: data stays within each, with the same bits, or `shard` raises."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import Accelerator, for_each
from par_zero import program, residency, shard

from ..helpers import assert_same, whole
from .test_device_cases import ACTIVATIONS, DEPTH, MATRIX, adamw, batches, forget_models, layers, step

AUTO = {"optimizer": "auto"}
BOTH = {**AUTO, "parameters": "auto"}
BF16 = {"param_dtype": torch.bfloat16}
NEAR, FAR = 10**7, 10**7
TIERS = ("device", "host", "disk")
TWO = {"bucket": 1, "inflight": 2}


def forget_all():
    """Wait until the models of earlier calls are freed: the thread of their last step holds them for a moment."""
    for _ in range(50):
        forget_models()
        if not torch.accelerator.memory_allocated():
            return
    raise AssertionError("an earlier model is still in memory")


def trained(stage, offload, steps=3, limit=None, **policies):
    """Losses and parameters after some steps, the most bytes of each tier, and the gathers of the last step.

    The device's bytes are the allocator's, from the second step on, without the batches. With `limit`, each step clips
    the gradients to this norm, and bytes are also counted after that.
    """
    forget_all()
    module = layers().to("strict")
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, overlap=TWO, **policies)
    dtype = next(module.parameters()).dtype
    inputs = [batch.to(dtype) for batch in batches(steps)]
    most, found = dict.fromkeys(TIERS, 0), {}

    def count():
        held = residency(module)
        most.update({tier: max(size, held.total(tier, fullest=tier == "device")) for tier, size in most.items()})

    def clip():
        pytest.importorskip("par_precision").clip_grad_norm_(optimizer, limit, dist.group.WORLD)
        count()

    for number, batch in enumerate(inputs):
        optimizer.state_dict()  # waits for the thread
        torch.accelerator.synchronize()
        if number == 1:
            torch.accelerator.reset_peak_memory_stats()
        found[f"loss {number}"] = step(module, optimizer, batch, None if limit is None else clip).cpu()
        count()
    optimizer.state_dict()
    peak = torch.accelerator.max_memory_allocated() - sum(batch.nbytes for batch in inputs)
    gathers = sum(entry.op == "gather" for entry in program(module).entries)
    found |= {name: value.cpu() for name, value in whole(module).items()}
    return found, most, peak, gathers


WITHIN = {
    "0, host": (0, AUTO, {}, {"host": NEAR}, 8),
    "1, disk": (1, AUTO, {}, {"disk": FAR}, 6),
    "2, host and disk": (2, AUTO, {}, {"host": 150_000, "disk": FAR}, 10),
    "2, copies": (2, AUTO, BF16, {"host": 75_000, "disk": FAR}, 6),
    "3, host": (3, AUTO, {}, {"host": NEAR}, 6),
    "3, parameters": (3, BOTH, {}, {"host": NEAR}, 17),
    "3, parameters and disk": (3, BOTH, {}, {"host": 250_000, "disk": FAR}, 17),
    "3, parameters and copies": (3, BOTH, BF16, {"host": NEAR}, 17),
}
"""Stage, options, precision, far tiers, and how many matrices of a rank's device memory are too many."""


@for_each(case=WITHIN)
@pytest.mark.ranks(2, timeout=300, backend="strict", accelerator=Accelerator())
def test_auto_fits_every_tier_of_an_accelerator_and_changes_no_number(case, tmp_path):
    stage, auto, precision, far, less = WITHIN[case]
    expected, plain, *_ = trained(stage, None, precision=precision)
    budget = {"device": plain["device"] - less * MATRIX // 2, **far}
    offload = {**auto, "path": tmp_path, "piece": "4KiB", "ahead": 2, "budget": budget}
    found, most, peak, _ = trained(stage, offload, precision=precision)
    assert_same(found, expected)
    assert all(most[tier] <= size for tier, size in budget.items()), (budget, most)
    assert all(most[tier] for tier in far), (budget, most)
    # Nothing leaves that the budget has memory for: a step counts in pieces, and gradients in matrices.
    assert budget["device"] - most["device"] <= 3 * MATRIX, (budget, most)
    # What the allocator has beside the budget: activations, and 512 bytes for each small tensor.
    assert peak <= budget["device"] + ACTIVATIONS + 512 * 4 * DEPTH, (budget, peak)


@for_each(case=("2, copies", "3, parameters and copies"))
@pytest.mark.ranks(2, timeout=300, backend="strict", accelerator=Accelerator())
def test_budget_counts_the_gradients_that_clipping_casts(case, tmp_path):
    stage, auto, precision, far, less = WITHIN[case]
    expected, plain, *_ = trained(stage, None, limit=0.01, precision=precision)
    offload = {**auto, "path": tmp_path, "piece": "4KiB", "ahead": 2}
    offload["budget"] = {"device": plain["device"] - less * MATRIX // 2, **far}
    _, unclipped, *_ = trained(stage, offload, precision=precision)
    found, most, *_ = trained(stage, offload, limit=0.01, precision=precision)
    assert_same(found, expected)
    assert most["host"] > unclipped["host"]
    assert all(most[tier] <= size for tier, size in offload["budget"].items()), (offload, most)


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator(limit=16 * MATRIX))
def test_auto_trains_a_model_that_the_device_cannot_hold():
    def losses(offload):
        forget_all()
        module = layers().to("strict")
        optimizer = adamw(module.parameters())
        shard(module, optimizer, stage=2, group=dist.group.WORLD, offload=offload, overlap=TWO)
        return [step(module, optimizer, batch).item() for batch in batches()]

    with pytest.raises(torch.OutOfMemoryError):
        losses(None)
    # One more matrix for what the allocator cannot use of the blocks that it has freed.
    budget = {"device": 16 * MATRIX - ACTIVATIONS - MATRIX, "host": "10MB"}
    assert len(losses({**AUTO, "piece": "4KiB", "budget": budget})) == 3


@for_each(parameters=("device", "host"))
@pytest.mark.ranks([1, 2], backend="strict", accelerator=Accelerator())
def test_units_stay_gathered_in_the_memory_that_offload_leaves(parameters):
    host = {"optimizer": "host", "parameters": parameters, "piece": "4KiB"}
    expected, _, least, gathers = trained(3, host, steps=4)
    budget = least + 3 * MATRIX
    found, _, peak, fewer = trained(3, {**host, "budget": {"device": budget}}, steps=4)
    assert_same(found, expected)
    assert fewer < gathers
    # A placement reads the allocator between two moments, within which a gradient comes and goes.
    assert peak <= budget + MATRIX


REFUSED = {
    "device": (
        3,
        {**AUTO, "budget": {"device": "50KB", "host": "10MB"}},
        r"the budget of the device is 50\.0 kB, and 205 kB are the least: parameters 65\.5, gradients 24\.6, units "
        r"32\.8, buffers 81\.9, with all that is 'auto' elsewhere; raise it",
    ),
    "host": (
        1,
        {**AUTO, "budget": {"device": "350KB", "host": "10KB"}},
        r"the budget of the host is 10\.0 kB, and \d+ kB are the least: gradients \d+\.\d, optimizer \d+\.\d, for "
        "which the device has no room",
    ),
    "given": (
        2,
        {"optimizer": "host", "budget": {"host": "10KB"}},
        r"the budget of the host is 10\.0 kB, and 262 kB are the least: gradients 65\.5, optimizer 196\.6; raise it",
    ),
    "stage": (2, {"optimizer": "host", "budget": "1MB"}, "needs stage 3, where units are gathered .*; this is stage 2"),
    "gradients": (
        3,
        {**AUTO, "gradients": "auto", "budget": {"device": "1MB", "host": "1MB"}},
        "from where gradients follow the optimizer; remove gradients, and pass optimizer='auto'",
    ),
    "parameters on a disk": (
        3,
        {**BOTH, "budget": {"device": "1MB", "disk": "1MB"}},
        "parameters='auto', .*can fetch them from its host and not from a disk; pass bytes of the host in budget",
    ),
    "parameters alone": (
        3,
        {"optimizer": 0.5, "parameters": "auto", "budget": {"device": "1MB", "host": "1MB"}},
        r"parameters='auto', optimizer=0\.5: parameters on the host of 'strict:0' are stepped there",
    ),
}


@for_each(what=REFUSED)
@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_budget_of_an_accelerator_too_small_raises_before_a_change(what, tmp_path):
    stage, options, words = REFUSED[what]
    module = layers().to("strict")
    optimizer = adamw(module.parameters())
    before = [id(each) for each in optimizer.param_groups[0]["params"]]
    offload = {"path": tmp_path, **options}
    with pytest.raises(ValueError, match=words):
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, overlap=TWO)
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == before
    assert_same({name: value.cpu() for name, value in module.state_dict().items()}, layers().state_dict())
    assert all(type(each) is nn.Parameter for each in module.parameters())
    assert not list(tmp_path.iterdir())
