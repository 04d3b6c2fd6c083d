"""Stage 3, where a thread steps what is on the disk while the next forward runs: the same bits, errors on all ranks."""

import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist

from par_groups import part_of, settle_
from par_testing import for_each
from par_zero import shard

from ..helpers import adamw, assert_same, batch, loss_of, mlp, policies, sharded, whole
from .cases import Counting, failing, moments, on_disk, small, two_models, with_copies, with_everything

pytestmark = pytest.mark.cpu(reason="offload from a CPU: that from a device has tests of its own")


class Slow(torch.optim.AdamW):
    """Takes its time wherever it is not the main thread that steps."""

    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)
        return super().step(closure)


def late(path, **options):
    return on_disk(path, overlap=True, **options)


@pytest.mark.ranks(2)
def test_overlapped_step_changes_no_number(tmp_path):
    assert_same(with_everything(3, late(tmp_path), Slow), with_everything(3, None, Slow))
    mixed = late(tmp_path, parts={"host": 0.2, "disk": 0.6})
    assert_same(with_copies(3, mixed), with_copies(3, None))
    assert_same(two_models(3, mixed), two_models(3, None))


def slow(parameters):
    return Slow(parameters, lr=1e-2, eps=1e-3)


def looked_at(offload, look):
    """A model that somebody looks at, or writes to, right after each step."""
    module, optimizer = sharded(mlp(), 3, slow, offload=offload, elementwise=True)
    seen = {}
    for step in range(4):
        loss_of(module, batch(step, width=8)).backward()
        optimizer.step()
        seen |= {f"{step}.{name}": value for name, value in look(step, module, optimizer).items()}
    return seen | whole(module) | moments(optimizer)


def gradients_stay(_, module, __):
    return {name: part_of(value).clone() for name, value in module.state_dict().items()}


def gradients_become_zeros(_, __, optimizer):
    optimizer.zero_grad(set_to_none=False)
    return {}


def state_dicts(step, module, optimizer):
    optimizer.zero_grad()
    if step == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    if step == 2:
        parts = copy.deepcopy(module.state_dict())
        for value in parts.values():
            part_of(value).mul_(0.5)
        module.load_state_dict(parts)
    state = optimizer.state_dict()["state"]
    return {"moment": torch.cat([state[number]["exp_avg"].view(-1) for number in sorted(state)])}


def evaluated(step, module, optimizer):
    optimizer.zero_grad()
    with torch.no_grad():
        return {"loss": loss_of(module, batch(step + 10, width=8))}


@for_each(look=(gradients_stay, gradients_become_zeros, state_dicts, evaluated))
@pytest.mark.ranks(1)
def test_overlapped_step_is_complete_for_all_readers(look, tmp_path):
    assert_same(looked_at(late(tmp_path), look), looked_at(None, look))


@pytest.mark.ranks(1)
def test_overlapped_step_counts_settings_once(tmp_path):
    results = []
    for offload in (None, late(tmp_path, parts={"disk": 0.6}), late(tmp_path)):
        module, optimizer = sharded(mlp(), 3, Counting, offload=offload, elementwise=True)
        for step in range(3):
            loss_of(module, batch(step, width=8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        settle_(optimizer.param_groups[0]["params"])
        assert (optimizer.rounds, optimizer.state.pop("calls")) == (3, 3)
        assert [optimizer.param_groups[0][name] for name in ("steps", "busy", "added")] == [3, 3, 3]
        results.append(whole(module) | moments(optimizer))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


class Gated(torch.optim.AdamW):
    """Steps as many tensors outside of the main thread as it is let."""

    gate = None

    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():
            self.gate.acquire()
        return super().step(closure)


@pytest.mark.ranks(1)
def test_overlapped_step_lets_a_unit_wait_for_its_pieces_only(tmp_path):
    module = mlp(depth=4)
    optimizer = Gated(module.parameters(), lr=1e-2)
    offload = late(tmp_path, piece=2048)  # a piece a unit
    options = {"units": list(module), "offload": offload, "elementwise": True}
    shard(module, optimizer, stage=3, group=dist.group.WORLD, **policies(**options))
    tensors = optimizer.param_groups[0]["params"]
    assert len(tensors) == len(module)
    Gated.gate = threading.Semaphore(0)
    loss_of(module, batch(0, width=8)).backward()
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer.step()
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))
    optimizer.zero_grad()
    begun = []

    def began(block, *_):
        begun.append(block)
        Gated.gate.release()  # that of the unit after the next, which is gathered meanwhile

    for block in module:
        block.register_forward_hook(began)
    for _ in range(2):
        Gated.gate.release()
    loss_of(module, batch(1, width=8)).backward()  # a forward that waited for all would wait for ever
    assert begun == list(module)


@for_each(then=("step", "summon"))
@pytest.mark.ranks(2)
def test_overlapped_step_failed_read_raises_later_on_all_ranks(then, tmp_path):
    module, optimizer = sharded(mlp(), 3, small, offload=late(tmp_path))
    tensors = optimizer.param_groups[0]["params"]
    with pytest.MonkeyPatch.context() as patch:
        for step in range(2):
            loss_of(module, batch(step, width=8)).backward()
            settle_(tensors)  # forgets what was read ahead
            if step == 1 and dist.get_rank() == 1:
                failing(patch, "preadv", 2)
            optimizer.step()
            optimizer.zero_grad()
        loss_of(module, batch(2, width=8)).backward()
        if dist.get_rank() == 1:
            for look in (lambda: settle_(tensors), optimizer.state_dict, module.state_dict):
                with pytest.raises(OSError, match="cannot be read"):
                    look()
        with pytest.raises(OSError, match=r"cannot be read .* load the latest checkpoint"):
            optimizer.step() if then == "step" else whole(module)
    settle_(tensors)


@pytest.mark.ranks(2)
def test_overlapped_step_failed_write_loses_nothing(tmp_path):
    def train(offload):
        module, optimizer = sharded(mlp(), 3, small, offload=offload)
        raised = []
        with pytest.MonkeyPatch.context() as patch:
            for number in range(5):
                optimizer.zero_grad()
                loss_of(module, batch(number, width=8)).backward()
                if number == 2 and offload is not None and dist.get_rank() == 1:
                    failing(patch, "pwritev", 2)
                try:
                    optimizer.step()
                except OSError as error:
                    raised.append(str(error))
                    optimizer.step()  # has not begun before
        return raised, whole(module) | moments(optimizer)

    (never, expected), (once, found) = train(None), train(late(tmp_path))
    assert not never
    assert len(once) == 1
    assert "It stays in memory, and nothing is lost" in once[0]
    assert_same(found, expected)


@pytest.mark.ranks(1)
def test_overlap_below_stage_3_raises(tmp_path):
    with pytest.raises(ValueError, match=r"overlap=True, which needs stage 3, .*; this is stage 2; leave overlap out"):
        sharded(mlp(), 2, adamw, offload=late(tmp_path))
    assert not list(tmp_path.iterdir())
