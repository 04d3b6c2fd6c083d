"""Parameters and gradients on a disk, with state or without it: the same bits, and errors on all ranks."""

import copy
import errno
import os
import threading
import time
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import gradients as gradients_of
from par_groups import part_of, settle_
from par_testing import for_each, storm
from par_zero import (
    MixedPrecision,
    Offload,
    memory,
    no_sync,
    place,
    reset,
    residency,
    shard,
    simulate,
    summon,
    trace,
)

from ..helpers import assert_same, batch, loss_of, mlp, policies, predicted_tiers, sharded, whole
from .cases import BF16, counted, failing, moments, on_disk, small, two_models, with_copies, with_everything
from .test_state import MAKERS
from .test_state import trained as of_uneven

pytestmark = pytest.mark.cpu(reason="offload from a CPU: that from a device has tests of its own")

FP32 = {}
WIDTH, BLOCKS = 64, 4


@for_each(option=("parameters", "gradients"))
@pytest.mark.ranks(2)
def test_offloaded_parameters_below_stage_3_raise(option, tmp_path):
    for stage in range(3):
        module = mlp()
        optimizer = small(module.parameters())
        for tier in ("host", "disk"):
            offload = Offload(**{option: tier}, path=tmp_path)
            text = f"{option}='{tier}' needs stage 3, where units are gathered before they run; this is stage {stage}"
            with pytest.raises(ValueError, match=text):
                shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload)
        assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in module.parameters()]
    assert not list(tmp_path.iterdir())


def trained(offload, dtypes, steps=3):
    module, optimizer = sharded(mlp(), 3, small, offload=offload, **dtypes)
    losses = []
    for step in range(steps):
        loss = loss_of(module, batch(step, width=8).to(dtypes.get("param_dtype")))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": torch.stack(losses)} | whole(module) | moments(optimizer)


def layers():
    """A model of four units, and of sizes of which nothing is rounded up: layers of 4096 elements."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    return module, torch.optim.AdamW(module.parameters(), fused=True)


def even(offload, dtypes):
    module, optimizer = layers()
    return shard(module, optimizer, stage=3, group=dist.group.WORLD, offload=offload, **policies(bucket=1, **dtypes))


@for_each(dtypes=(FP32, BF16))
@pytest.mark.ranks(2)
def test_host_parts_on_a_cpu_are_counted_separately(dtypes):
    parts = {"parameters": 0.5, "gradients": 0.75}
    assert_same(trained(Offload(optimizer=0.25, **parts), dtypes), trained(None, dtypes))
    offload = Offload(optimizer=0.25, **parts)
    module, optimizer = even(offload, dtypes)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(2, WIDTH, dtype=dtypes.get("param_dtype"))).square().mean().backward()
        held = residency(module).now
        for tier in ("device", "host", "disk"):
            parts = {name: by_tier[tier] for name, by_tier in offload.fractions.items()}
            expected = memory(3, BLOCKS * WIDTH**2, 2, precision=MixedPrecision(**dtypes))
            assert held[tier]["parameters"] == expected.parameters * parts["parameters"]
            kept = held[tier]["gradients"]
            if dtypes:  # what autograd gives is cast for the optimizer, and the sums stay
                kept /= 3
            assert kept == expected.gradients * parts["gradients"]
        optimizer.step()


def elsewhere(path, parameters="disk", optimizer="disk", gradients="device", **options):
    return on_disk(path, optimizer, parameters=parameters, gradients=gradients, **options)


PLACES = (
    ("disk", "disk", "disk"),
    ("disk", "disk", "device"),
    ("disk", "device", "device"),
    ("device", "device", "disk"),
    (0.5, "disk", {"disk": 0.5}),
    ({"host": 0.3, "disk": 0.4}, {"host": 0.5, "disk": 0.3}, {"disk": 0.6}),
)
"""Of parameters, state and gradients."""


@for_each(dtypes=(storm(FP32), BF16, storm(BF16 | {"reduce_dtype": torch.float32})), places=PLACES)
@pytest.mark.ranks(2)
def test_all_on_disk_changes_no_number(dtypes, places, tmp_path):
    assert_same(trained(elsewhere(tmp_path, *places), dtypes), trained(None, dtypes))


@for_each(gradients=(storm("device"), "disk"))
@pytest.mark.ranks(2)
def test_all_on_disk_with_all_other_options(gradients, tmp_path):
    offload = elsewhere(tmp_path, gradients=gradients)
    assert_same(with_everything(3, offload), with_everything(3, None))
    assert_same(with_copies(3, offload), with_copies(3, None))
    assert_same(two_models(3, offload), two_models(3, None))


@for_each(gradients=("device", "disk"))
@pytest.mark.ranks(2)
def test_disk_gradients_are_accumulated_clipped_and_dropped(gradients, tmp_path):
    def run(offload):
        module, optimizer = sharded(mlp(), 3, small, offload=offload)
        tensors = optimizer.param_groups[0]["params"]
        seen = {}
        for step in range(4):
            for micro in range(3):
                loss_of(module, batch(step, width=8, micro=micro)).backward()
                if (step, micro) == (1, 0):
                    optimizer.zero_grad()
                if (step, micro) == (2, 1):
                    optimizer.zero_grad(set_to_none=False)
            if step == 3:
                with no_sync(module):
                    loss_of(module, batch(step, width=8, micro=4)).backward()
                loss_of(module, batch(step, width=8, micro=5)).backward()
            for name, box, view in gradients_of(optimizer):
                seen[f"{step}.{name}.{box.start}"] = view.clone()
                view.mul_(0.5)
            optimizer.step()
            seen[f"{step}"] = torch.cat([tensor.grad for tensor in tensors])
            optimizer.zero_grad()
        return {name: value for name, value in seen.items() if "." not in name} | whole(module) | moments(optimizer)

    assert_same(run(elsewhere(tmp_path, gradients=gradients)), run(None))


@for_each(dtypes=(FP32, BF16), gradients=("device", {"disk": 0.5}))
@pytest.mark.ranks(2)
def test_step_bytes_equal_the_formulas(dtypes, gradients, tmp_path):
    offload = elsewhere(tmp_path, {"disk": 0.5}, {"host": 0.25, "disk": 0.5}, gradients, piece=8192)
    tiers = predicted_tiers(*layers(), 3, offload, bucket=1, **dtypes)
    module, optimizer = even(offload, dtypes)
    dtype = dtypes.get("param_dtype")
    tensors = optimizer.param_groups[0]["params"]
    with pytest.MonkeyPatch.context() as patch:
        for step in range(3):
            moved = counted(patch) if step == 2 else {}
            module(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
            optimizer.step()
            settle_(tensors)
            optimizer.zero_grad()
            held = residency(module).now
            for tier in ("device", "host", "disk"):
                expected = tiers[tier]
                assert held[tier]["parameters"] == expected["parameters"]
                assert held[tier]["optimizer"] + held[tier]["copies"] == expected["optimizer"]
                assert tier != "disk" or held[tier]["gradients"] == expected["gradients"]
                # The prediction has room for a wrong prefetch, and for pieces that begin within a page.
                assert tier != "host" or held[tier]["buffers"] <= expected["buffers"]
    # The two units on the disk are the last of forward and the first of backward, and stay whole between them.
    disk = tiers["disk"]
    written = disk["optimizer"] + disk["parameters"] + disk["gradients"]
    # A step reads parameters that it updates in place. It only writes those that are rounded from master copies.
    assert (sum(moved["preadv"]), sum(moved["pwritev"])) == (written + (not dtypes) * disk["parameters"], written)


class Slow(torch.optim.AdamW):
    """Takes its time wherever it is not the main thread that steps."""

    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)
        return super().step(closure)


@for_each(parameters=("disk", {"host": 0.3, "disk": 0.4}), gradients=(storm("device"), "disk"))
@pytest.mark.ranks(2)
def test_unit_waits_for_its_own_stepped_parameters(parameters, gradients, tmp_path):
    late = elsewhere(tmp_path, parameters, gradients=gradients, overlap=True)
    assert_same(with_everything(3, late, Slow), with_everything(3, None, Slow))
    assert_same(with_copies(3, late), with_copies(3, None))
    assert_same(two_models(3, late), two_models(3, None))


def despite(call, raised):
    """Calls once more what has told of a disk that failed."""
    try:
        return call()
    except OSError as error:
        raised.append(str(error))
        return None


def with_faults(offload, dtypes, name, call):
    """A model after five steps; the second rank's disk fails in the third."""
    module, optimizer = sharded(mlp(), 3, small, offload=offload, **dtypes)
    raised = []
    with pytest.MonkeyPatch.context() as patch:
        for step in range(5):
            optimizer.zero_grad()
            despite(
                lambda step=step: loss_of(module, batch(step, width=8).to(dtypes.get("param_dtype"))).backward(), raised
            )
            if step == 2 and offload is not None and dist.get_rank() == 1:
                failing(patch, name, call)
            despite(optimizer.step, raised)
    despite(lambda: whole(module), raised)
    return raised, whole(module) | moments(optimizer)


@for_each(dtypes=(storm(FP32), BF16), call=(1, storm(2), 5), overlap=(False, True))
@pytest.mark.ranks(2)
def test_failed_write_raises_on_all_ranks_and_loses_nothing(dtypes, call, overlap, tmp_path):
    _, expected = with_faults(None, dtypes, "pwritev", call)
    raised, found = with_faults(elsewhere(tmp_path, overlap=overlap), dtypes, "pwritev", call)
    assert len(raised) == 1
    assert "cannot be written to the disk at " in raised[0]
    assert "It stays in memory, and nothing is lost; save a checkpoint" in raised[0]
    assert_same(found, expected)


THEN = {
    "step": lambda module, optimizer: (loss_of(module, batch(9, width=8)).backward(), optimizer.step()),
    "evaluation": lambda module, _: evaluated(module),
    "summon": lambda module, _: whole(module),
    "state dict": lambda module, optimizer: (module.state_dict(), optimizer.state_dict(), whole(module)),
    "residency": lambda module, _: (residency(module), whole(module)),
    "reset": lambda module, _: (reset(module), whole(module)),
}


def evaluated(module):
    with torch.no_grad():
        return loss_of(module, batch(9, width=8))


@for_each(then=THEN, overlap=(False, True), gradients=("device", "disk"))
@pytest.mark.ranks(2)
def test_dead_disk_on_one_rank_stops_no_rank_later(then, overlap, gradients, tmp_path):
    """All that this rank had on the disk is in memory then, and the other ranks have theirs on their disks."""
    module, optimizer = sharded(mlp(), 3, small, offload=elsewhere(tmp_path, overlap=overlap, gradients=gradients))
    reference, other = sharded(mlp(), 3, small)
    raised = []
    with pytest.MonkeyPatch.context() as patch:
        for step in range(4):
            if step == 1 and dist.get_rank() == 1:
                patch.setattr(os, "pwritev", dead)
            for model, its in ((module, optimizer), (reference, other)):
                despite(lambda model=model, step=step: loss_of(model, batch(step, width=8)).backward(), raised)
                despite(its.step, raised)
                its.zero_grad()
        despite(lambda: THEN[then](module, optimizer), raised)
        THEN[then](reference, other)
        assert_same(whole(module), whole(reference))
    assert raised
    assert all("cannot be written to the disk at " in text for text in raised)


def dead(*_):
    raise OSError(errno.EIO, "Input/output error")


@for_each(overlap=(False, True))
@pytest.mark.ranks(2)
def test_unreadable_shard_raises_on_all_ranks_without_gradients(overlap, tmp_path):
    module, optimizer = sharded(mlp(), 3, small, offload=elsewhere(tmp_path, optimizer="device", overlap=overlap))
    reference, other = sharded(mlp(), 3, small)

    def train(module, optimizer, step):
        loss_of(module, batch(step, width=8)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        with torch.no_grad():
            return loss_of(module, batch(9, width=8))

    for step in range(2):
        train(module, optimizer, step)
        train(reference, other, step)
    for look in (lambda: train(module, optimizer, 2), evaluate, lambda: whole(module)):
        settle_(optimizer.param_groups[0]["params"])
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                failing(patch, "preadv", 2)
            with pytest.raises(
                OSError, match=r"parameters or gradients on the disk at .* cannot be read .* load the latest checkpo"
            ):
                look()
        assert not any(tensor.grad is not None for tensor in optimizer.param_groups[0]["params"])
        assert_same(whole(module), whole(reference))
    train(module, optimizer, 2)
    train(reference, other, 2)
    assert_same(whole(module) | moments(optimizer), whole(reference) | moments(other))


@pytest.mark.ranks(2)
def test_step_with_unreadable_parameters_raises_before_a_change(tmp_path):
    module, optimizer = sharded(mlp(), 3, small, offload=elsewhere(tmp_path))
    for step in range(2):
        loss_of(module, batch(step, width=8)).backward()
        if step:
            settle_(optimizer.param_groups[0]["params"])
            before = [part_of(value).clone() for value in module.parameters()]
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == 1:
                    failing(patch, "preadv", 2)  # the first reads its state
                with pytest.raises(OSError, match=r"cannot be read .* load the latest checkpoint"):
                    optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
    same = all(torch.equal(part_of(value), old) for value, old in zip(module.parameters(), before, strict=True))
    assert same == (dist.get_rank() == 1)


@pytest.mark.ranks(2)
def test_disk_too_small_for_parameters_raises_before_a_change(tmp_path):
    def small_disk(_):
        return SimpleNamespace(f_bavail=0, f_bfree=0, f_blocks=9, f_frsize=4096)

    module = mlp()
    optimizer = small(module.parameters())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "statvfs", small_disk)
        with pytest.raises(ValueError, match=r"has 0 B free and 4.1 kB are needed; free some, or offload less"):
            shard(module, optimizer, stage=3, group=dist.group.WORLD, offload=elsewhere(tmp_path, optimizer="device"))
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in module.parameters()]
    assert_same(dict(module.named_parameters()), dict(mlp().named_parameters()))
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks(2)
def test_evaluated_and_frozen_models_have_parameters_on_disk(tmp_path):
    module, _ = shard(
        mlp(),
        stage=3,
        group=dist.group.WORLD,
        offload=Offload(parameters="disk", path=tmp_path),
        overlap={"bucket": 300},
    )
    with torch.no_grad():
        found = [loss_of(module, batch(step, width=8)) for step in range(3)]
        expected = [loss_of(mlp(), batch(step, width=8)) for step in range(3)]
    assert found == expected
    held = residency(module).now
    assert held["device"]["parameters"] == 0
    assert held["disk"]["parameters"] > 0


@pytest.mark.ranks(2)
def test_parameters_between_steps_are_readable_and_writable(tmp_path):
    def run(offload):
        module, optimizer = sharded(mlp(), 3, small, offload=offload)
        seen = {}
        for step in range(5):
            loss_of(module, batch(step, width=8)).backward()
            with torch.no_grad():
                if step == 1:  # what was read ahead is out of date
                    for parameter in module.parameters():
                        part_of(parameter).mul_(0.5)
                if step == 2:
                    with summon(module):
                        next(module.parameters()).mul_(0.5)
                if step == 3:
                    parts = copy.deepcopy(module.state_dict())
                    for value in parts.values():
                        part_of(value).mul_(2)
                    module.load_state_dict(parts)
            optimizer.step()
            optimizer.zero_grad()
            seen |= {f"{step}.{name}": part_of(value).detach().clone() for name, value in module.named_parameters()}
            with torch.no_grad():
                for tensor in optimizer.param_groups[0]["params"]:
                    tensor.mul_(0.9)
                for parameter in module.parameters():
                    part_of(parameter).mul_(0.9)
        return seen | whole(module) | moments(optimizer)

    assert_same(run(elsewhere(tmp_path)), run(None))
    assert_same(run(elsewhere(tmp_path, optimizer="device")), run(None))


@pytest.mark.ranks(2)
def test_meta_model_is_filled_unit_by_unit_into_the_file(tmp_path):
    def make(offload):
        with torch.device("meta"):
            module = mlp()
        optimizer = small(module.parameters())

        def fill(part, prefix):
            part.to_empty(device="cpu")
            for name, parameter in part.named_parameters():
                generator = torch.Generator().manual_seed(crc32(f"{prefix}{name}".encode()))
                parameter.data.normal_(generator=generator)

        shard(
            module,
            optimizer,
            stage=3,
            group=dist.group.WORLD,
            offload=offload,
            overlap={"bucket": 300},
            init={"init_fn": fill},
        )
        loss_of(module, batch(0, width=8)).backward()
        optimizer.step()
        return whole(module) | moments(optimizer)

    assert_same(make(elsewhere(tmp_path)), make(None))


@for_each(call=(1, storm(2), 4), overlap=(False, True))
@pytest.mark.ranks(2)
def test_unwritable_gradient_stays_in_memory(call, overlap, tmp_path):
    def run(offload):
        module, optimizer = sharded(mlp(), 3, small, offload=offload)
        raised = []
        with pytest.MonkeyPatch.context() as patch:
            for step in range(4):
                for micro in range(2):
                    if (step, micro) == (2, 0) and offload is not None:
                        settle_(optimizer.param_groups[0]["params"])
                        if dist.get_rank() == 1:
                            failing(patch, "pwritev", call)
                    loss = loss_of(module, batch(step, width=8, micro=micro))
                    despite(loss.backward, raised)
                optimizer.step()
                optimizer.zero_grad()
        return raised, whole(module) | moments(optimizer)

    raised, found = run(elsewhere(tmp_path, "device", "disk", "disk", overlap=overlap))
    assert len(raised) == 1
    assert "cannot be written to the disk at " in raised[0]
    assert "It stays in memory, and nothing is lost; save a checkpoint" in raised[0]
    assert_same(found, run(None)[1])


@pytest.mark.ranks(2)
def test_unreadable_earlier_gradients_raise_and_are_dropped(tmp_path):
    module, optimizer = sharded(mlp(), 3, small, offload=elsewhere(tmp_path, "device", "device", "disk"))
    loss_of(module, batch(0, width=8)).backward()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            failing(patch, "preadv", 2)
        loss = loss_of(module, batch(1, width=8))
        with pytest.raises(OSError, match=r"parameters or gradients on the disk at .* cannot be read"):
            loss.backward()
    assert not any(tensor.grad is not None for tensor in optimizer.param_groups[0]["params"])
    loss_of(module, batch(2, width=8)).backward()
    optimizer.step()
    reference, other = sharded(mlp(), 3, small)
    loss_of(reference, batch(2, width=8)).backward()
    other.step()
    assert_same(whole(module) | moments(optimizer), whole(reference) | moments(other))


def compare(make, path):
    expected = of_uneven(3, make, None)
    for places in PLACES:
        for overlap in (False, True):
            offload = elsewhere(path, *places, piece=80_000, overlap=overlap)
            assert_same(of_uneven(3, make, offload), expected)
    assert not list(path.iterdir())


@for_each(name=("fused", "sgd"))
@pytest.mark.ranks(2)
def test_uneven_sizes_on_disk_change_no_number(name, tmp_path):
    offload = elsewhere(tmp_path, gradients="disk", piece=80_000)
    assert_same(of_uneven(3, MAKERS[name], offload), of_uneven(3, MAKERS[name], None))


@pytest.mark.storm
@for_each(name=tuple(MAKERS))
@pytest.mark.ranks(1, timeout=400)
def test_every_optimizer_on_one_rank(name, tmp_path):
    compare(MAKERS[name], tmp_path)


@pytest.mark.storm
@for_each(name=tuple(MAKERS))
@pytest.mark.ranks(2, timeout=400)
def test_every_optimizer_on_two_ranks(name, tmp_path):
    compare(MAKERS[name], tmp_path)


@pytest.mark.storm
@for_each(name=tuple(MAKERS))
@pytest.mark.ranks(4, timeout=400)
def test_every_optimizer_on_four_ranks(name, tmp_path):
    compare(MAKERS[name], tmp_path)


@pytest.mark.ranks(2)
def test_shards_within_a_budget_are_read_as_often_as_simulated(tmp_path):
    unit, share = WIDTH**2 * 4, WIDTH**2 * 2  # bytes of a unit that is whole, and of this rank's part
    # Gradients, Adam's slots and its counts of steps. Parameters are on the disk.
    resident = BLOCKS * (share * 3 + 4)
    offload = Offload(parameters="disk", path=tmp_path, piece=8192, budget=resident + 3 * unit)
    module, optimizer = even(offload, FP32)
    expected = None
    for step in range(4):
        with pytest.MonkeyPatch.context() as patch:
            moved = counted(patch)
            for micro in range(3):
                with no_sync(module):
                    module(torch.ones(2, WIDTH) * (step + micro)).square().mean().backward()
            module(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        fetched = sum(moved["preadv"]) - BLOCKS * share  # which the step reads itself
        if expected is not None:
            assert fetched == expected
        needed = trace(module)
        sizes = {moment.unit: unit for moment in needed.moments if moment.unit}
        ledger = simulate(needed, sizes, place(needed, sizes, {"device": 3 * unit, "disk": "1GB"}))
        assert set(ledger.moved) == {("disk", "device")}
        expected = ledger.moved["disk", "device"] // 2
    assert 0 < expected < 8 * BLOCKS * share


@pytest.mark.ranks(2)
def test_padding_of_a_rank_without_elements_counts_as_device_memory(tmp_path):
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))  # rank 1 has no element of either
    optimizer = torch.optim.AdamW(module.parameters())
    shard(module, optimizer, stage=3, group=dist.group.WORLD, offload=elsewhere(tmp_path, gradients="disk"))
    for step in range(2):  # each compares the ledger with the storages
        module(torch.full((1, 2), step + 1.0)).sum().backward()
        optimizer.step()
        if dist.get_rank() == 1:
            assert residency(module).now["device"]["gradients"] > 0
        optimizer.zero_grad()
