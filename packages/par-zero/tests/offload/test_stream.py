"""State on a disk: the same losses, parameters and moments as without, whatever else is set."""

import errno
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import gradients, settle_, slots_of
from par_testing import for_each
from par_zero import Offload, memory, no_sync, shard, transfers

from ..helpers import OPTIMIZERS, STAGES, adamw, assert_same, batch, loss_of, mlp, sharded, uneven, whole

MAKERS = OPTIMIZERS | {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.5),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
}

PARTS = ("disk", {"host": 0.3, "disk": 0.4})


def moments(optimizer):
    """Copies of all state, put together by param group and slot; of counts, the values that there are."""
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            for slot, value in optimizer.state.get(tensor, {}).items():
                found.setdefault(f"{number}.{slot}", []).append(value.detach().clone().reshape(-1))
    return {
        name: torch.cat(parts).unique() if parts[0].numel() == 1 else torch.cat(parts) for name, parts in found.items()
    }


def small(parameters):
    """AdamW on a disk in eight pieces or more."""
    return adamw(parameters, fused=True, foreach=None)


def on_disk(path, parts="disk", piece=256):
    return Offload(optimizer=parts, path=path, piece=piece, ahead=3)


def trained(stage, make, offload, steps=3):
    """Losses, parameters and state after some steps of a model with sizes that nothing divides."""
    module = uneven()
    optimizer = make(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, bucket=300_000, offload=offload)
    losses = []
    for step in range(steps):
        loss = loss_of(module, batch(step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": torch.stack(losses)} | whole(module) | moments(optimizer)


def compare(name, stage, path):
    expected = trained(stage, MAKERS[name], None)
    for parts in PARTS:
        assert_same(trained(stage, MAKERS[name], on_disk(path, parts, piece=80_000)), expected)
    assert not list(path.iterdir())


@for_each(case=(("fused", 1), ("foreach", 2), ("amsgrad", 0), ("sgd", 3), ("adagrad", 3)))
@pytest.mark.ranks(2)
def test_state_on_a_disk_changes_no_number(case, tmp_path):
    compare(*case, tmp_path)


@pytest.mark.storm
@for_each(name=tuple(MAKERS), stage=STAGES)
@pytest.mark.ranks(1, timeout=400)
def test_every_optimizer_at_every_stage_in_a_world_of_one(name, stage, tmp_path):
    compare(name, stage, tmp_path)


@pytest.mark.storm
@for_each(name=tuple(MAKERS), stage=STAGES)
@pytest.mark.ranks(2, timeout=400)
def test_every_optimizer_at_every_stage_in_a_world_of_two(name, stage, tmp_path):
    compare(name, stage, tmp_path)


@pytest.mark.storm
@for_each(name=tuple(MAKERS), stage=STAGES)
@pytest.mark.ranks(4, timeout=400)
def test_every_optimizer_at_every_stage_in_a_world_of_four(name, stage, tmp_path):
    compare(name, stage, tmp_path)


class Chosen(nn.Module):
    """A layer that data chooses, one that is frozen at first, and some that always run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.chosen, self.thawed = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x, *, choose=True):
        x = self.thawed(self.always(x).tanh())
        return self.chosen(x) if choose else x


def with_everything(stage, offload):
    """Param groups, an lr schedule, norm clipping, no_sync, a parameter unused on a rank or on all, one that thaws."""
    module = Chosen()
    module.thawed.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [each.weight for each in module.children()], "weight_decay": 0.1},
            {"params": [each.bias for each in module.children()], "lr": 3e-2},
        ],
        lr=1e-2,
        eps=1e-3,
    )
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, bucket=1000, offload=offload)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for step in range(6):
        if step == 3:
            module.thawed.weight.requires_grad_(True)
        with no_sync(module):
            module(batch(step, width=24), choose=step != 1).square().mean().backward()
        chosen = step != 1 and (dist.get_rank() == 0 or step % 2 == 0)
        module(batch(step, width=24, micro=1), choose=chosen or (stage == 3 and step != 1)).square().mean().backward()
        squares = sum(float(view.double().square().sum()) for _, _, view in gradients(optimizer))
        for _, _, view in gradients(optimizer):  # of this rank's share, as nothing else is asked here
            view.mul_(1 / max(1, squares**0.5 / 0.05))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return whole(module) | moments(optimizer)


@for_each(stage=STAGES)
@pytest.mark.ranks(2)
def test_groups_schedules_clipping_accumulation_and_what_is_unused_or_frozen(stage, tmp_path):
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
def test_hooks_run_once_and_see_and_change_what_they_would_without(tmp_path):
    def run(offload):
        module = mlp()
        optimizer = small(module.parameters())
        heard = []

        def after(optimizer, *_):
            heard.append(sum(float(tensor.grad.abs().sum()) for tensor in optimizer.param_groups[0]["params"]))
            heard.append(sum(float(tensor.detach().abs().sum()) for tensor in optimizer.param_groups[0]["params"]))

        optimizer.register_step_post_hook(after)
        shard(module, optimizer, stage=1, group=dist.group.WORLD, bucket=300, offload=offload)

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
def test_a_skipped_step_leaves_the_state_as_it_is(tmp_path):
    module, optimizer = started(tmp_path)
    before = whole(module) | moments(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    optimizer.step()
    assert_same(whole(module) | moments(optimizer), before)
    assert all(tensor.grad is not None for tensor in optimizer.param_groups[0]["params"])
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.zero_grad()
    loss_of(module, batch(3, width=8)).backward()
    optimizer.step()
    after = moments(optimizer)
    assert not torch.equal(after["0.exp_avg"], before["0.exp_avg"])
    assert after["0.step"] == before["0.step"] + 1


class Counting(torch.optim.Optimizer):
    """Counts its steps in a param group, in an attribute and in its state as a whole, and steps by all of them."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr, "steps": 0})
        self.rounds = 0

    @torch.no_grad()
    def step(self):  # takes no closure
        self.rounds += 1
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                    rate = group["lr"] / (group["steps"] + self.rounds + self.state["calls"])
                    parameter.sub_(state["sum"], alpha=rate)


@for_each(parts=PARTS)
@pytest.mark.ranks(1)
def test_what_an_optimizer_counts_is_counted_once(parts, tmp_path):
    results = []
    for offload in (None, on_disk(tmp_path, parts)):
        module, optimizer = sharded(mlp(), 2, Counting, offload=offload)
        for step in range(3):
            loss_of(module, batch(step, width=8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (optimizer.rounds, optimizer.state.pop("calls"), optimizer.param_groups[0]["steps"]) == (3, 3, 3)
        results.append(whole(module) | moments(optimizer))
    assert_same(*results)


@pytest.mark.ranks(1)
def test_state_is_read_and_written_between_steps_as_ever(tmp_path):
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


def failing(monkeypatch, name, call):
    """Has a call of the kernel fail once, the one with that number from now on."""
    original, calls = getattr(os, name), []

    def fail(*args):
        calls.append(args)
        if len(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        return original(*args)

    monkeypatch.setattr(os, name, fail)


@for_each(call=(1, 2, 4))
@pytest.mark.ranks(2)
def test_a_write_that_fails_raises_on_all_ranks_and_loses_nothing(call, tmp_path):
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
def test_a_read_that_fails_raises_on_all_ranks_before_its_piece_is_touched(tmp_path):
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


@for_each(stage=(0, 2))
@pytest.mark.ranks(2)
def test_a_step_moves_and_keeps_as_many_bytes_as_the_formulas_say(stage, tmp_path):
    """Sizes of which nothing is rounded up: 4 layers of 8192 elements, pieces of 1024 of them."""
    module = nn.Sequential(*(nn.Linear(64, 128, bias=False) for _ in range(4)))
    module.forward = lambda x: sum(layer(x) for layer in module)
    optimizer = small(module.parameters())
    offload = on_disk(tmp_path, {"host": 0.25, "disk": 0.5}, piece=4096)
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload)
    moved = {"preadv": [], "pwritev": []}  # lists, as threads count

    def count(name):
        original = getattr(os, name)

        def counted(*args):
            size = original(*args)
            moved[name].append(size)
            return size

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in moved:
            patch.setattr(os, name, count(name))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(module, batch(step, width=64)).backward()
            optimizer.step()
            settle_(optimizer.param_groups[0]["params"])
    expected = transfers(stage, 2**15, 2, offload=offload)
    assert (sum(moved["preadv"]), sum(moved["pwritev"])) == (expected.read, 2 * expected.written)
    on_disk_bytes = sum(view.nbytes for tensor in optimizer.state for view in slots_of(tensor).values())
    assert on_disk_bytes == memory(stage, 2**15, 2, offload=offload, tier="disk").optimizer
    elsewhere = [
        slot.nbytes
        for tensor, state in optimizer.state.items()
        for name, slot in state.items()
        if slot.dim() and name not in slots_of(tensor)
    ]
    tiers = [memory(stage, 2**15, 2, offload=offload, tier=tier).optimizer for tier in ("device", "host")]
    assert sum(elsewhere) == sum(tiers)
