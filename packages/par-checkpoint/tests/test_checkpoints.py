"""A run's checkpoints: when they are due, which stay, and where training goes on."""

import shutil
import socket
import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import Checkpoints, Save, Tiers, _save, prune
from par_checkpoint.storage.steps import step_name
from par_checkpoint.tiers import retention
from par_checkpoint.transfer import write as writing


def steps(root):
    return sorted(int(each.name.removeprefix("step-")) for each in root.iterdir())


def test_it_saves_when_due_and_removes_old_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, every=2, keep_last=2, keep_every=6)
    model = nn.Linear(2, 2)
    for step in range(1, 12):
        saved = checkpoints.save(step, model=model)
        assert (saved is not None) == (step % 2 == 0)
    assert steps(tmp_path) == [6, 8, 10]
    assert checkpoints.save(11, model=model, force=True) is not None
    assert checkpoints.latest() == checkpoints.path(11)


@pytest.mark.parametrize("async_", [False, True])
def test_it_goes_on_from_the_newest(tmp_path, async_):
    checkpoints = Checkpoints(tmp_path)
    model, resumed = nn.Linear(3, 2), nn.Linear(3, 2)
    assert checkpoints.load(model=resumed) is None
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        checkpoints.save(step, model=model, async_=async_).wait()
    assert checkpoints.load(model=resumed).step == 2
    assert torch.equal(resumed.weight, model.weight)


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    model, resumed = nn.Linear(3, 2), nn.Linear(3, 2)
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        checkpoints.save(7, model=model)
    checkpoints.load(model=resumed)
    assert resumed.weight[0, 0].item() == 2.0


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep_last": 0}, {"keep_every": 0}])
def test_numbers_are_positive(tmp_path, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is 0; give 1 or more"):
        Checkpoints(tmp_path, **wrong)


@pytest.mark.ranks(2)
def test_all_ranks_go_on_from_the_same(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    model = nn.Linear(4, 4)
    for each in model.parameters():
        dist.broadcast(each.detach(), 0)
    for step in (10, 20):
        checkpoints.save(step, model=model)
    assert steps(tmp_path) == [20]
    resumed = nn.Linear(4, 4)
    assert checkpoints.load(model=resumed).step == 20
    assert torch.equal(resumed.weight, model.weight)


@pytest.mark.ranks(2)
def test_a_step_below_the_newest_is_refused_before_it_would_be_removed(tmp_path):
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(4, model=model)
    with pytest.raises(ValueError, match="step 3 comes before step 4"):
        checkpoints.save(3, model=model)
    if dist.get_rank() == 0:
        (tmp_path / "step-00000004").rename(tmp_path / "aside")
    dist.barrier()
    checkpoints.save(3, model=model)
    assert checkpoints.latest() == checkpoints.path(3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_", [False, True])
def test_when_an_old_step_cannot_be_removed_the_new_one_is_whole_before_that_is_said(tmp_path, monkeypatch, async_):
    model, resumed = nn.Linear(4, 4), nn.Linear(4, 4)
    for each in model.parameters():
        dist.broadcast(each.detach(), 0)

    def prune(*_, **__):
        raise PermissionError("step-00000001 belongs to somebody else")

    monkeypatch.setattr(retention, "remove_steps", prune)
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    act = partial(checkpoints.save, 1, model=model, async_=async_)
    act = act().wait if async_ else act
    with pytest.raises(OSError, match="belongs to somebody else"):
        act()
    while any(each.name.startswith("par-checkpoint") for each in threading.enumerate()):
        time.sleep(0.01)  # that of a lease ends a moment later
    assert checkpoints.load(model=resumed).step == 1
    assert torch.equal(resumed.weight, model.weight)


def test_pruning_after_a_save_has_ended_reports_errors_to_its_handle(tmp_path, monkeypatch):
    at_end = Save._at_end

    def late(handle, act):
        handle._tasks[-1].join()
        at_end(handle, act)

    def prune(*_, **__):
        raise PermissionError("step-00000001 belongs to somebody else")

    monkeypatch.setattr(Save, "_at_end", late)
    monkeypatch.setattr(retention, "remove_steps", prune)
    handle = Checkpoints(tmp_path, keep_last=1).save(1, model={"w": torch.ones(3)}, async_=True)
    with pytest.raises(OSError, match="belongs to somebody else"):
        handle.wait()


@pytest.mark.ranks(2)
def test_no_rank_waits_while_old_steps_are_removed_after_a_save_in_the_background(tmp_path):
    model, removed, may_remove = {"w": torch.ones(5)}, threading.Event(), threading.Event()
    prune = retention.remove_steps

    def slow(*args, **options):
        assert may_remove.wait(240)
        removed.set()
        return prune(*args, **options)

    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, model=model)
    with mock.patch.object(retention, "remove_steps", slow):
        handle = checkpoints.save(2, model=model, async_=True)
        dist.barrier()  # of the trainer, which goes on
        assert (tmp_path / "step-00000001").exists()
        assert not handle.done()
        assert not removed.is_set()
        dist.barrier()  # the first rank removes the step, so all have looked before
        may_remove.set()
        handle.wait()
    dist.barrier()
    assert steps(tmp_path) == [2]
    checkpoints.save(3, model=model, async_=True)  # what is there only when it is whole pushes out nothing before
    checkpoints.save(4, model=model, async_=True).wait()
    dist.barrier()
    assert steps(tmp_path) == [4]


def test_after_a_save_that_fails_nothing_is_removed(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    checkpoints, model = Checkpoints(tmp_path, keep_last=1), {"w": torch.ones(5)}
    checkpoints.save(1, model=model)
    monkeypatch.setattr(writing, "crc32c", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(2, model=model, async_=True).wait()
    assert steps(tmp_path) == [1]


def test_an_old_step_that_must_stay_is_named_once(tmp_path):
    checkpoints, model = Checkpoints(tmp_path, keep_last=1), {"w": torch.ones(5)}
    checkpoints.save(1, model=model)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"step-00000001' is not removed, although it is old: .*notes\.txt"):
        checkpoints.save(2, model=model)
    checkpoints.save(3, model=model)
    assert steps(tmp_path) == [1, 3]


def test_it_goes_on_from_a_save_that_is_still_under_way(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    model, resumed = nn.Linear(600, 600), nn.Linear(600, 600)
    checkpoints.save(1, model=model)
    nn.init.constant_(model.weight, 2.0)
    checkpoints.save(2, model=model, async_=True)
    assert checkpoints.load(model=resumed).step == 2
    assert torch.equal(resumed.weight, model.weight)


def test_steps_whose_files_are_cut_short_or_gone_are_passed_over_and_do_not_push_out_whole_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=None)
    model = nn.Linear(3, 2)
    for step in (1, 2, 3):
        checkpoints.save(step, model=model)
    weights = [tmp_path / step_name(step) / "model.safetensors" for step in (2, 3)]
    weights[0].unlink()
    weights[1].write_bytes(weights[1].read_bytes()[:-1])
    assert checkpoints.latest() == checkpoints.path(1)
    assert checkpoints.load(model=model).step == 1
    assert prune(tmp_path, keep_last=1) == []
    assert steps(tmp_path) == [1, 2, 3]


def test_an_empty_root_is_refused():
    with pytest.raises(ValueError, match="root is an empty path"):
        Checkpoints("")


@pytest.mark.ranks(2)
def test_over_tiers_each_keeps_its_own_number_of_steps_and_the_nearest_newest_is_gone_on_from(tmp_path):
    """The first tier is local to two hosts; while copies are held, nothing goes that is still to be copied."""
    names, rank = ("a", "b"), dist.get_rank()
    with mock.patch.object(socket, "gethostname", return_value=names[rank]):
        memory, disk = tmp_path / names[rank] / "memory", tmp_path / "disk"
        tiers = [str(memory), str(disk)]
        checkpoints = Checkpoints("gpt", keep_last=[1, 2], tiers=Tiers(tiers, copies=2))
        model = {"w": torch.zeros(3 << 20)}
        assert checkpoints.latest() is None
        assert checkpoints.load(model=model) is None
        opened, copy = threading.Event(), _save.copy_on
        with mock.patch.object(_save, "copy_on", lambda *args, **options: opened.wait(240) and copy(*args, **options)):
            for step in range(1, 5):
                model["w"].fill_(step)
                handle = checkpoints.save(step, model=model, async_=True)
                handle.wait_for_copy()
            checkpoints.load(model=model)  # waits until the first tier has it
            dist.barrier()
            assert steps(memory / "gpt") == [1, 2, 3, 4]
            assert not disk.exists()
            opened.set()
            handle.wait()
        dist.barrier()
        assert (steps(memory / "gpt"), steps(disk / "gpt")) == ([4], [3, 4])
        assert checkpoints.latest() == checkpoints.path(4) == f"{memory}/gpt/step-00000004"
        with pytest.raises(ValueError, match="step 3 comes before step 4"):
            checkpoints.save(3, model=model)
        dist.barrier()
        again = Checkpoints("gpt", tiers=Tiers(tiers, copies=2))
        if rank == 0:
            shutil.rmtree(memory)
        dist.barrier()
        for lost, told in (("disk", None), ("memory", "part 0 is on no host")):
            model["w"].zero_()
            if lost == "memory" and rank == 1:  # of both hosts but for one part
                shutil.rmtree(memory / "gpt/step-00000004/part-00000-of-00002")
            dist.barrier()
            if told and rank == 0:
                with pytest.warns(UserWarning, match=told):
                    assert again.load(model=model).step == 4
            else:
                assert again.load(model=model).step == 4
            assert model["w"][7] == 4
            if lost == "disk":
                assert again.latest().startswith(str(memory))
        with pytest.raises(ValueError, match="step 3 comes before step 4"):
            again.save(3, model=model)


def test_tiers_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="keep_last has 2 numbers, and there are no tiers"):
        Checkpoints(tmp_path, keep_last=[1, 2])
    with pytest.raises(ValueError, match="keep_last has 2 numbers, and there are 1 tiers"):
        Checkpoints("gpt", keep_last=[1, 2], tiers=Tiers([tmp_path]))
    with pytest.raises(ValueError, match="the checkpoint's name in each of them"):
        Checkpoints("/gpt", tiers=Tiers([tmp_path]))


def test_over_tiers_of_one_host(tmp_path):
    tiers = [tmp_path / "memory", tmp_path / "disk"]
    checkpoints, model = Checkpoints("gpt", keep_last=1, tiers=Tiers(tiers)), nn.Linear(3, 2)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        checkpoints.save(step, model=model).wait()
    assert [steps(tier / "gpt") for tier in tiers] == [[2], [2]]
    shutil.rmtree(tiers[0])
    nn.init.zeros_(model.weight)
    assert checkpoints.load(model=model).step == 2
    assert model.weight[0, 0] == 2
