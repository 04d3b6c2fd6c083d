"""Tiers that are tried out before a run begins, and emptied before another one does."""

import socket
import threading

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import Checkpoints, Tiers, _save, save


def on_hosts(monkeypatch, *names):
    monkeypatch.setattr(socket, "gethostname", lambda: names[dist.get_rank()])


@pytest.mark.ranks(2)
def test_tiers_that_cannot_be_are_refused_on_every_rank_and_leave_nothing(tmp_path, monkeypatch):
    file, shared, own = tmp_path / "file", tmp_path / "shared", tmp_path / f"own{dist.get_rank()}"
    if dist.get_rank() == 0:
        file.write_text("")

    def refused(words, *tiers, copies=None, group=None):
        dist.barrier()
        with pytest.raises(ValueError, match=words):
            Checkpoints("run", group=group, tiers=Tiers(tiers, copies=copies)).check()
        dist.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    refused(r"copies is 2, but the ranks are on 1 host \(", shared, copies=2)
    refused("cannot be written on .*: Not a directory; give a folder that can", shared, file / "tier")
    refused("first tier, of 'memory://par-probe/run', is no folder of a host", "memory://par-probe", copies=1)
    on_hosts(monkeypatch, "a", "b")
    two = dist.new_group([0, 1])  # whose hosts nobody has asked for yet
    refused("hosts [ab] and [ab] share the first tier, '.*shared/run'", shared, copies=2, group=two)
    refused("b does not see the tier '.*own1/run' that a sees", own, group=two)
    refused("copies is 3, but the ranks are on 2 hosts", own, shared, copies=3, group=two)
    Checkpoints("run", group=two, tiers=Tiers([own, shared, "memory://par-probe"], copies=2)).check()
    dist.barrier()
    assert [list(path.iterdir()) for path in (own / "run", shared / "run")] == [[], []]


@pytest.mark.ranks(2)
def test_a_run_is_removed_from_all_tiers_parts_and_copies_too(tmp_path, monkeypatch):
    on_hosts(monkeypatch, "a", "b")
    own, shared = tmp_path / f"own{dist.get_rank()}", tmp_path / "shared"
    checkpoints = Checkpoints("run", keep_last=None, tiers=Tiers([own, shared], copies=2))
    for step in (1, 2):
        checkpoints.save(step, model={"w": torch.full((300,), float(step))}).wait()
    (own / "run" / "notes").mkdir()
    report = checkpoints.load(strict=False)
    assert (report.step, report.path) == (2, str(own / "run" / "step-00000002"))
    assert checkpoints.paths(2)[1] == str(shared / "run" / "step-00000002")
    checkpoints.clear()
    dist.barrier()
    assert [path.name for path in (own / "run").iterdir()] == ["notes"]
    assert list((shared / "run").iterdir()) == []
    assert checkpoints.load() is None
    checkpoints.save(1, model={"w": torch.zeros(300)}).wait()
    assert checkpoints.load(strict=False).step == 1


def test_a_save_says_which_tiers_are_still_without_it(tmp_path, monkeypatch):
    copies, copy = [], _save.copy_checkpoint

    def noted(*arguments, **keywords):
        copies.append(handle.missing)
        return copy(*arguments, **keywords)

    monkeypatch.setattr(_save, "copy_checkpoint", noted)
    go = threading.Event()
    held = _save.Save._copy_on
    monkeypatch.setattr(
        _save.Save, "_copy_on", lambda save, act, before: held(save, lambda: (go.wait(), act()), before)
    )
    handle = save("one", model={"w": torch.ones(3)}, tiers=Tiers([tmp_path / name for name in "abc"]))
    go.set()
    handle.wait()
    b, c = str(tmp_path / "b" / "one"), str(tmp_path / "c" / "one")
    assert copies == [(b, c), (c,)]
    assert handle.missing == ()
