"""Optimizer state on the host of an accelerator: the numbers are those without offload, and no rule of it is broken."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import Accelerator, for_each, storm, waits_seen
from par_zero import (
    MixedPrecision,
    Offload,
    Overlap,
    ShardOptions,
    no_sync,
    predict_step,
    program,
    residency,
    shard,
    summon,
)
from par_zero.offload.link import DeviceLink
from par_zero.offload.offloaded import OffloadedStep

from ..helpers import OPTIMIZERS, STAGES, assert_same

MAKERS = {name: OPTIMIZERS[name] for name in ("fused", "foreach")} | {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
}
HOST = {"optimizer": "host", "piece": "8KiB"}
HALF = {"optimizer": 0.5, "piece": "8KiB"}
NOT_LATE = {**HOST, "overlap": False}
SHARDS = {**HOST, "parameters": "host"}
HALF_OF_SHARDS = {**HOST, "parameters": 0.5}
BF16 = {"param_dtype": torch.bfloat16}
WIDER_SUMS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

on_device = pytest.mark.ranks([storm(1), 2], backend="strict", accelerator=Accelerator())
"""On two ranks: a world of one, which skips all communication, has the first of these tests every day."""


class Blocks(nn.Module):
    """Blocks of equal size, and a layer that is never used."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.never = nn.Linear(5, 3)

    def forward(self, x):
        x = x.to(self.blocks[0][0].weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        return x


def trained(
    stage,
    offload=None,
    *,
    make="fused",
    precision=None,
    microbatches=1,
    sync=True,
    limit=None,
    steps=4,
    zeros=False,
    schedules_last=False,
    blocks=Blocks,
):
    """Losses, parameters and state after some steps; the host never waits for the device in any of them."""
    torch.manual_seed(0)
    module = blocks().to("strict")
    optimizer = MAKERS[make](module.parameters())
    group = dist.group.WORLD
    shard(module, optimizer, stage=stage, group=group, offload=offload, overlap={"bucket": 9_000}, precision=precision)
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(4, 32, generator=draw).to("strict") for _ in range(steps)]
    losses = []
    waits_seen()
    for step in range(steps):
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            with no_sync(module) if not (sync or last) else torch.enable_grad():
                loss = module(batches[(step + microbatch) % steps]).square().mean()
                loss.backward()
            losses.append(loss.detach())
        if limit is not None:
            pytest.importorskip("par_precision").clip_grad_norm_(optimizer, limit, group)
        if schedules_last:
            optimizer.step()
        for each in optimizer.param_groups:
            each["lr"] *= 0.9
        if not schedules_last:
            optimizer.step()
        optimizer.zero_grad(set_to_none=not zeros)
    if limit is None:
        assert not waits_seen()
    found = {f"loss {number}": loss.cpu() for number, loss in enumerate(losses)}
    with summon(module):
        found |= {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}
    return found


def check_offloads(stage, *offloads, **how):
    """Check that a training gives the same with each of some offloads as without."""
    expected = trained(stage, **how)
    for offload in offloads:
        assert_same(trained(stage, Offload(**offload), **how), expected)


@for_each(stage=STAGES, make=("fused", storm("foreach"), storm("sgd")))
@on_device
def test_state_on_host_changes_no_number(stage, make):
    check_offloads(stage, HOST, HALF, NOT_LATE, make=make)


@for_each(
    make=("fused", storm("foreach"), storm("sgd")),
    precision=(None, BF16, storm(WIDER_SUMS)),
    microbatches=(1, 2),
)
@on_device
def test_parameters_on_host_change_no_number(make, precision, microbatches):
    offloads = SHARDS, HALF_OF_SHARDS, {**SHARDS, "overlap": False}
    check_offloads(3, *offloads, make=make, precision=precision, microbatches=microbatches)


@for_each(stage=(0, storm(1), storm(2), 3), precision=(None, BF16))
@on_device
def test_state_on_disk_changes_no_number(stage, precision, tmp_path):
    tiers = "disk", {"host": 0.3, "disk": 0.4}
    offloads = [{"optimizer": optimizer, "piece": "8KiB", "path": tmp_path} for optimizer in tiers]
    check_offloads(stage, *offloads, precision=precision)


@for_each(stage=(0, 2, 3), overlap=("auto", False))
@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_memory_of_a_dropped_model_is_used_after_its_copies(stage, overlap):
    def step():
        module = Blocks().to("strict")
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        offload = {**HOST, "overlap": overlap}
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, overlap={"bucket": 9_000})
        module(torch.ones(4, 32, device="strict")).sum().backward()
        optimizer.step()

    for _ in range(2):
        step()
        gc.collect()
        time.sleep(0.2)  # the thread of the step holds the model
        for size in (32, 64, 4096, 9000 // 4, 16000):
            torch.zeros(size, device="strict").add_(1)


@for_each(stage=(0, storm(1), 2, 3))
@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_skipped_step_copies_nothing_to_the_device(stage, monkeypatch):
    copied = []

    def copy_in(link, chunk, target, source, original=DeviceLink.copy_in):
        copied.append(target.nbytes)
        original(link, chunk, target, source)

    monkeypatch.setattr(DeviceLink, "copy_in", copy_in)
    module = Blocks().to("strict")
    before = [parameter.detach().clone() for parameter in module.blocks.parameters()]
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=HOST)
    for found in (1.0, 0.0):
        module(torch.ones(4, 32, device="strict")).sum().backward()
        optimizer.found_inf = torch.tensor(found)  # as torch's GradScaler sets it
        optimizer.step()
        optimizer.zero_grad()
        with summon(module):
            skipped = [bool(one.equal(other)) for one, other in zip(before, module.blocks.parameters(), strict=True)]
        assert all(skipped) == bool(found)
        assert bool(copied) != bool(found)


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_error_of_the_thread_is_raised_by_the_next_step(monkeypatch):
    module = Blocks().to("strict")
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    shard(module, optimizer, stage=2, group=dist.group.WORLD, offload=HOST)

    def update_(*_):
        raise MemoryError("the host is full")

    def step():
        module(torch.ones(4, 32, device="strict")).sum().backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    optimizer.state_dict()  # waits for the thread
    with monkeypatch.context() as patch:
        patch.setattr(OffloadedStep, "update_", update_)
        step()
        with pytest.raises(MemoryError, match="the host is full"):
            optimizer.state_dict()
    with pytest.raises(MemoryError, match="the host is full"):
        step()


@for_each(
    error=(MemoryError("the host is full"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 65536 bytes"))
)
@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_full_host_of_one_rank_is_an_error_on_all_ranks(error):
    module = Blocks().to("strict")
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    shard(module, optimizer, stage=2, group=dist.group.WORLD, offload=HOST)

    def update_(*_):
        raise error

    def step():
        module(torch.ones(4, 32, device="strict")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    optimizer.state_dict()  # waits for the thread
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(OffloadedStep, "update_", update_)
        step()
        words = r"the host has no memory for a step .*(full|65536).* load the latest checkpoint, and offload less"
        with pytest.raises(MemoryError if dist.get_rank() == 0 else OSError, match=words):
            step()
    # What is left can be saved, and trained on.
    optimizer.zero_grad()
    optimizer.state_dict()
    step()
    with summon(module):
        assert all(parameter.isfinite().all() for parameter in module.parameters())


@for_each(stage=(0, storm(1), storm(2), 3), precision=(BF16, storm(WIDER_SUMS)))
@on_device
def test_masters_on_host_change_no_number(stage, precision):
    check_offloads(stage, HOST, HALF, precision=precision, microbatches=2)


@for_each(stage=(0, storm(1), storm(2), 3), sync=(True, False), offload=(HOST, storm(HALF)))
@on_device
def test_microbatches_are_added_on_the_device(stage, sync, offload):
    how = {"microbatches": 3, "sync": sync, "zeros": True}
    assert_same(trained(stage, Offload(**offload), **how), trained(stage, **how))


@for_each(stage=(0, storm(1), storm(2), 3))
@on_device
def test_clipping_reads_gradients_on_the_host(stage):
    check_offloads(stage, HOST, HALF, limit=0.01)


def trained_mixed(stage, precision, offload=None):
    """Losses, norms and parameters after steps of a mixed optimizer that clips, the second of which is skipped."""
    mixed = pytest.importorskip("par_precision").mixed
    torch.manual_seed(0)
    module = Blocks().to("strict")
    optimizer = MAKERS["fused"](module.parameters())
    group = dist.group.WORLD
    how = {"offload": offload, "overlap": {"bucket": 9_000}}
    if precision != "fp32":
        how["precision"] = {"param_dtype": torch.float16}
    shard(module, optimizer, stage=stage, group=group, **how)
    module, optimizer = mixed(module, optimizer, precision, group=group, clip_norm=0.01)
    totals = optimizer.sums.totals
    # Pieces are summed in another order, which the last bits of the norm show.
    optimizer.sums.totals = lambda *args: totals(*args).float().double()
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(4, 32, generator=draw).to("strict") for _ in range(4)]
    factors = [torch.tensor(float("inf") if step == 1 else 1.0).to("strict") for step in range(4)]
    found, steps = {}, []
    for batch, factor in zip(batches, factors, strict=True):
        loss = module(batch).float().square().mean() * factor
        optimizer.backward(loss)
        steps.append(optimizer.step())
        optimizer.zero_grad()
    for number, step in enumerate(steps):
        assert bool(step.skipped) == (number == 1)
        found[f"norm {number}"] = step.grad_norm.cpu().nan_to_num()
    with summon(module):
        found |= {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}
    return found


@for_each(
    stage=(0, storm(1), 2, 3),
    precision=("fp32", "fp16"),
    offloads=((HOST, HALF), storm((NOT_LATE,))),
)
@on_device
def test_mixed_optimizer_clips_and_skips_on_the_host(stage, precision, offloads):
    expected = trained_mixed(stage, precision)
    for offload in offloads:
        assert_same(trained_mixed(stage, precision, Offload(**offload)), expected)


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_checkpoints_load_with_and_without_offload(tmp_path):
    checkpoint = pytest.importorskip("par_checkpoint")

    def saved_and_stepped(name, other, offload):
        """Save a late step at once; then load the other checkpoint, and return what a step makes of it."""
        torch.manual_seed(0)
        module = Blocks().to("strict")
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        shard(module, optimizer, stage=2, group=dist.group.WORLD, offload=offload)
        batch = torch.ones(4, 32, device="strict")
        module(batch).sum().backward()
        optimizer.step()
        checkpoint.save(tmp_path / name, model=module, optimizer=optimizer)
        optimizer.zero_grad()
        if other is not None:
            checkpoint.load(tmp_path / other, model=module, optimizer=optimizer)
        module(batch).sum().backward()
        optimizer.step()
        with summon(module):
            return {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}

    expected = saved_and_stepped("without", None, None)
    assert_same(saved_and_stepped("with", "without", HOST), expected)
    assert_same(saved_and_stepped("again", "with", None), expected)


@for_each(stage=STAGES)
@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_residency_counts_state_and_gradients_on_the_host(stage):
    module = Blocks().to("strict")
    size = sum(parameter.nbytes for parameter in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=NOT_LATE)
    module(torch.randn(4, 32, device="strict")).sum().backward()
    optimizer.step()
    held = residency(module).now
    assert held["device"]["optimizer"] < 8 * sum(1 for _ in module.parameters())  # step counts
    assert held["host"]["optimizer"] >= 2 * size - 200
    assert held["host"]["copies"] >= size - 200
    assert held["host"]["gradients"] >= size - 200


@for_each(stage=STAGES, offload=(HOST, storm(HALF), NOT_LATE, SHARDS), precision=(None, storm(BF16), WIDER_SUMS))
@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_predicted_offload_is_the_program_and_the_bytes(stage, offload, precision):
    if "parameters" in offload and stage < 3:
        return
    module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).to("strict")
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    policies = {"overlap": Overlap(bucket=1, inflight=1), "precision": MixedPrecision(**(precision or {}))}
    predicted = predict_step(
        module,
        optimizer,
        stage=stage,
        ranks=2,
        options=ShardOptions(**policies),
        offload=Offload(**offload),
        accelerator=True,
    )
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, **policies)
    if dist.get_rank() == 0:  # whose shards begin at 0
        assert program(module) == predicted.program
    inputs = torch.ones(4, 32, dtype=torch.bfloat16 if precision else torch.float32, device="strict")
    module(inputs).square().sum().backward()
    optimizer.step()
    optimizer.state_dict()  # waits for the thread
    now = residency(module).now
    # The program has the device's gradients.
    for tier, kinds in (("device", ("parameters", "optimizer")), ("host", ("parameters", "gradients", "optimizer"))):
        held = {**now[tier], "optimizer": now[tier]["optimizer"] + now[tier]["copies"]}
        for kind in kinds:
            # Step counts, which stay on the host with a piece's state.
            assert held[kind] == pytest.approx(predicted.tiers[tier][kind], abs=100), (tier, kind)


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_unsupported_tiers_raise_errors_with_a_fix():
    def sharded(**offload):
        module = nn.Linear(4, 4, device="strict")
        optimizer = torch.optim.AdamW(module.parameters(), capturable=offload.pop("capturable", False))
        shard(module, optimizer, stage=3, group=dist.group.WORLD, offload=offload)

    with pytest.raises(ValueError, match="remove gradients, and pass optimizer='host'"):
        sharded(gradients="host")
    with pytest.raises(ValueError, match="set capturable=False, or remove offload"):
        sharded(optimizer="host", capturable=True)
