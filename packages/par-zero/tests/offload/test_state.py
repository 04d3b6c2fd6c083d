"""State on a disk: the same losses, parameters and moments as without, whatever else is set."""

import os
import time
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import settle_, slots_of
from par_testing import for_each, storm
from par_zero import no_sync, shard

from ..helpers import (
    KINDS_OF_STAGES,
    OPTIMIZERS,
    STAGES,
    assert_same,
    batch,
    loss_of,
    mlp,
    policies,
    predicted_tiers,
    sharded,
    uneven,
    whole,
)
from .cases import BF16, Counting, counted, failing, moments, on_disk, small, two_models, with_copies, with_everything

pytestmark = pytest.mark.cpu(reason="offload from a CPU: that from a device has tests of its own")

MAKERS = OPTIMIZERS | {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.5),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "plain": lambda p: torch.optim.SGD(p, lr=0.002),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9),  # which goes on for 20 steps
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
}

PARTS = ("disk", {"host": 0.3, "disk": 0.4})
ALL_PARTS = (*PARTS, "host", 0.5)
FP32 = {}


def trained(stage, make, offload, steps=3):
    """Losses, parameters and state after some steps of a model with sizes that nothing divides."""
    module = uneven()
    optimizer = make(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, overlap={"bucket": 300_000})
    losses = []
    for step in range(steps):
        loss = loss_of(module, batch(step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": torch.stack(losses)} | whole(module) | moments(optimizer)


def compare(name, stage, path, *, parts=PARTS, steps=3):
    expected = trained(stage, MAKERS[name], None, steps)
    for each in parts:
        assert_same(trained(stage, MAKERS[name], on_disk(path, each, piece=80_000), steps), expected)
    if stage == 3:
        assert_same(trained(stage, MAKERS[name], on_disk(path, piece=80_000, overlap=True), steps), expected)
    assert not list(path.iterdir())


@for_each(case=(("fused", 1), storm(("foreach", 2)), ("amsgrad", 0), storm(("sgd", 3)), ("adagrad", 3)))
@pytest.mark.ranks(2)
def test_state_on_disk_changes_no_number(case, tmp_path):
    compare(*case, tmp_path)


@pytest.mark.ranks(2)
def test_state_on_host_changes_no_number(tmp_path):
    compare("fused", 2, tmp_path, parts=("host", 0.5))


@pytest.mark.storm
@for_each(name=tuple(MAKERS), stage=KINDS_OF_STAGES)
@pytest.mark.ranks(1, timeout=400)
def test_every_optimizer_and_stage_on_one_rank(name, stage, tmp_path):
    compare(name, stage, tmp_path, parts=ALL_PARTS, steps=20)


@pytest.mark.storm
@for_each(name=tuple(MAKERS), stage=KINDS_OF_STAGES)
@pytest.mark.ranks(2, timeout=400)
def test_every_optimizer_and_stage_on_two_ranks(name, stage, tmp_path):
    compare(name, stage, tmp_path, parts=ALL_PARTS, steps=20)


@pytest.mark.storm
@for_each(name=tuple(MAKERS), stage=KINDS_OF_STAGES)
@pytest.mark.ranks(4, timeout=400)
def test_every_optimizer_and_stage_on_four_ranks(name, stage, tmp_path):
    compare(name, stage, tmp_path, parts=ALL_PARTS, steps=20)


@pytest.mark.ranks(4)
def test_hybrid_sharding_with_state_on_disk(tmp_path):
    """Two groups of two, each of which keeps the whole state; a rank's replica is in the other."""
    rank = dist.get_rank()
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    far = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]

    def run(stage, offload):
        module = mlp()
        optimizer = small(module.parameters())
        shard(module, optimizer, stage=stage, group=near, replicas=far, offload=offload, overlap={"bucket": 300})
        for step in range(3):
            loss_of(module, batch(step, width=8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(module) | moments(optimizer)

    for stage, late in ((1, False), (3, True)):
        assert_same(run(stage, on_disk(tmp_path, overlap=late)), run(stage, None))


@for_each(stage=(0, storm(1), storm(2), 3))
@pytest.mark.ranks(2)
def test_state_on_disk_with_all_other_options(stage, tmp_path):
    expected = with_everything(stage, None)
    assert_same(with_everything(stage, on_disk(tmp_path)), expected)


def started(tmp_path, make=small, steps=2, **options):
    """A model whose state is on a disk, after some steps, with the gradients of another one."""
    module, optimizer = sharded(mlp(), 1, make, offload=on_disk(tmp_path, **options))
    for step in range(steps):
        loss_of(module, batch(step, width=8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(module, batch(steps, width=8)).backward()
    return module, optimizer


@pytest.mark.ranks(1)
def test_dropped_gradients_are_freed_after_a_step(tmp_path):
    module, optimizer = sharded(mlp(), 2, small, offload=on_disk(tmp_path), **BF16)  # which are cast for the optimizer
    loss_of(module, batch(0, width=8).bfloat16()).backward()
    optimizer.step()
    gradients = [ref(tensor.grad) for tensor in optimizer.param_groups[0]["params"] if tensor.grad is not None]
    optimizer.zero_grad()
    assert gradients
    assert not any(gradient() is not None for gradient in gradients)


@pytest.mark.ranks(2)
def test_two_models_and_two_optimizers_of_one_model(tmp_path):
    assert_same(two_models(1, on_disk(tmp_path)), two_models(1, None))


@pytest.mark.ranks(1)
def test_step_hooks_run_once_and_see_all_gradients(tmp_path):
    def run(offload):
        module = mlp()
        optimizer = small(module.parameters())
        heard = []

        def after(optimizer, *_):
            heard.append(sum(float(tensor.grad.abs().sum()) for tensor in optimizer.param_groups[0]["params"]))
            heard.append(sum(float(tensor.detach().abs().sum()) for tensor in optimizer.param_groups[0]["params"]))

        optimizer.register_step_post_hook(after)
        shard(module, optimizer, stage=1, group=dist.group.WORLD, offload=offload, overlap={"bucket": 300})

        def before(optimizer, *_):
            for tensor in optimizer.param_groups[0]["params"]:
                tensor.grad.mul_(0.5)
            optimizer.param_groups[0]["lr"] *= 0.9

        optimizer.register_step_pre_hook(before)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(module, batch(1, width=8))
            loss.backward()
            return loss

        loss_of(module, batch(0, width=8)).backward()
        assert optimizer.step() is None
        loss = optimizer.step(closure)
        assert len(heard) == 4
        return heard, {"loss": loss.detach()} | whole(module) | moments(optimizer)

    heard, expected = run(None)
    on, found = run(on_disk(tmp_path))
    assert_same(found, expected)
    assert on == pytest.approx(heard, rel=1e-5)  # sums over more tensors


@pytest.mark.ranks(1)
def test_skipped_step_moves_no_bytes(tmp_path):
    module, optimizer = started(tmp_path)
    before = whole(module) | moments(optimizer)
    settle_(optimizer.param_groups[0]["params"])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("preadv", "pwritev"):
            patch.setattr(os, name, lambda *_: pytest.fail("a skipped step moves bytes"))
        optimizer.step()
        settle_(optimizer.param_groups[0]["params"])
    assert_same(whole(module) | moments(optimizer), before)
    assert all(tensor.grad is not None for tensor in optimizer.param_groups[0]["params"])
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.zero_grad()
    loss_of(module, batch(3, width=8)).backward()
    optimizer.step()
    after = moments(optimizer)
    assert not torch.equal(after["0.exp_avg"], before["0.exp_avg"])
    assert after["step of 0.0.weight"] == before["step of 0.0.weight"] + 1


@for_each(parts=PARTS)
@pytest.mark.ranks(1)
def test_step_counts_settings_once(parts, tmp_path):
    results = []
    for offload in (None, on_disk(tmp_path, parts)):
        module, optimizer = sharded(mlp(), 2, Counting, offload=offload, elementwise=True)
        for step in range(3):
            loss_of(module, batch(step, width=8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (optimizer.rounds, optimizer.state.pop("calls")) == (3, 3)
        assert [optimizer.param_groups[0][name] for name in ("steps", "busy", "added")] == [3, 3, 3]
        results.append(whole(module) | moments(optimizer))
    assert_same(*results)


@pytest.mark.ranks(1)
def test_state_between_steps_is_readable_and_writable(tmp_path):
    results = []
    for offload in (None, on_disk(tmp_path)):
        module, optimizer = sharded(mlp(), 0, small, offload=offload)
        for step in range(4):
            loss_of(module, batch(step, width=8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            before = moments(optimizer)
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.5)  # where it may be on its way still
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 2:
                settle_(optimizer.param_groups[0]["params"])
            after = moments(optimizer)
            assert torch.equal(after["0.exp_avg"], before["0.exp_avg"] * 0.5)
        results.append(whole(module) | moments(optimizer))
    assert_same(*results)


@for_each(call=(1, 2, 4))
@pytest.mark.ranks(2)
def test_failed_write_raises_on_all_ranks_and_loses_nothing(call, tmp_path):
    def step(number):
        optimizer.zero_grad()
        loss_of(module, batch(number, width=8)).backward()
        optimizer.step()

    module, optimizer = sharded(mlp(), 1, small)
    for number in range(5):
        step(number)
    expected = whole(module) | moments(optimizer)
    module, optimizer = sharded(mlp(), 1, small, offload=on_disk(tmp_path))
    raised = []
    with pytest.MonkeyPatch.context() as patch:
        for number in range(5):
            if number == 2 and dist.get_rank() == 1:
                failing(patch, "pwritev", call)
            try:
                step(number)
            except OSError as error:
                raised.append(str(error))
    assert len(raised) == 1
    assert "cannot be written to the disk at " in raised[0]
    assert "It stays in memory, and nothing is lost; save a checkpoint" in raised[0]
    assert_same(whole(module) | moments(optimizer), expected)


@pytest.mark.ranks(2)
def test_failed_read_raises_before_its_piece_is_changed(tmp_path):
    _, optimizer = started(tmp_path)
    tensors = optimizer.param_groups[0]["params"]
    settle_(tensors)
    before = [(tensor.detach().clone(), optimizer.state[tensor]["exp_avg"].clone()) for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            failing(patch, "preadv", 3)
        with pytest.raises(OSError, match=r"cannot be read .* load the latest checkpoint"):
            optimizer.step()
    settle_(tensors)
    moved = [not torch.equal(tensor, value) for tensor, (value, _) in zip(tensors, before, strict=True)]
    for tensor, (value, moment) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value) == torch.equal(optimizer.state[tensor]["exp_avg"], moment)
    assert sum(moved) == (len(tensors) if dist.get_rank() == 0 else 2)


@for_each(case=((0, FP32), (2, BF16), (3, BF16)))
@pytest.mark.ranks(2)
def test_step_bytes_equal_the_formulas(case, tmp_path):
    """Sizes of which nothing is rounded up: 4 layers of 8192 elements, pieces of 1024 of them."""
    stage, dtypes = case
    module = nn.Sequential(*(nn.Linear(64, 128, bias=False) for _ in range(4)))
    module.forward = lambda x: sum(layer(x) for layer in module)
    optimizer = small(module.parameters())
    offload = on_disk(tmp_path, {"host": 0.25, "disk": 0.5}, piece=4096)
    tiers = predicted_tiers(module, optimizer, stage, offload, **dtypes)
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, **policies(**dtypes))
    tensors = optimizer.param_groups[0]["params"]
    with pytest.MonkeyPatch.context() as patch:
        moved = counted(patch)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(module, batch(step, width=64).to(dtypes.get("param_dtype"))).backward()
            optimizer.step()
        settle_(tensors)
    expected = tiers["disk"]["optimizer"]
    copies = 1 / 3 if dtypes else 0  # all that the first step reads
    assert (sum(moved["preadv"]), sum(moved["pwritev"])) == (expected * (1 + copies), 2 * expected)
    stored = [tensor for tensor in tensors if slots_of(tensor)]
    on_disk_bytes = sum(view.nbytes for tensor in stored for view in slots_of(tensor).values())
    on_disk_bytes += sum(tensor.nbytes for tensor in stored) if dtypes else 0
    assert on_disk_bytes == expected
    elsewhere = [
        slot.nbytes
        for tensor, state in optimizer.state.items()
        for name, slot in state.items()
        if slot.dim() and name not in slots_of(tensor)
    ]
    if dtypes:
        elsewhere += {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if not slots_of(each)
        }.values()
    counters = sum(state["step"].nbytes for tensor, state in optimizer.state.items())
    assert sum(elsewhere) + counters == tiers["device"]["optimizer"] + tiers["host"]["optimizer"]


@pytest.mark.parametrize("stages", [(1, 3), pytest.param(STAGES, marks=pytest.mark.storm)], ids=["typical", "all"])
@pytest.mark.ranks(2)
def test_master_copies_on_disk_keep_every_bit(stages, tmp_path):
    for stage in stages:
        compare_copies(stage, tmp_path)


def compare_copies(stage, tmp_path):
    expected = with_copies(stage, None)
    for parts in PARTS:
        assert_same(with_copies(stage, on_disk(tmp_path, parts)), expected)


@pytest.mark.ranks(1)
def test_prefetch_begins_with_backward_and_repeats_after_writes(tmp_path):
    calls = []
    original = os.preadv

    def counted(*args):
        calls.append(args[2])
        return original(*args)

    def train(offload, patch):
        module, optimizer = sharded(mlp(), 2, small, offload=offload)
        tensors = optimizer.param_groups[0]["params"]
        patch.setattr(os, "preadv", counted)
        read = []
        for step in range(5):
            settle_(tensors)
            del calls[:]
            with no_sync(module):
                loss_of(module, batch(step, width=8)).backward()
            assert not calls
            loss_of(module, batch(step, width=8, micro=1)).backward()
            while offload is not None and step and len(calls) < 3:  # three buffers, which threads fill
                time.sleep(0.001)
            if step == 2:
                for tensor in tensors:
                    optimizer.state[tensor]["exp_avg"].mul_(0.5)
            if step == 3:
                settle_(tensors)
            assert len(calls) <= 3
            optimizer.step()
            optimizer.zero_grad()
            read.append(len(calls))
        return read, whole(module) | moments(optimizer)

    with pytest.MonkeyPatch.context() as patch:
        _, expected = train(None, patch)
        read, found = train(on_disk(tmp_path), patch)
    pieces = read[1]
    assert_same(found, expected)
    assert pieces > 3
    assert read == [0, pieces, pieces + 3, pieces + 3, pieces]
