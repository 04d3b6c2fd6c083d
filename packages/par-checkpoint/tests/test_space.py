"""Disks that are full or cannot be written, and two savers that want the same path."""

import contextlib
import os
import shutil
import subprocess
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import par_checkpoint as pc
from par_checkpoint import _finish, _save
from par_checkpoint.storage.commit import exchange
from par_checkpoint.storage.folder import open_folder
from par_testing import storm

from .helpers import policies

OLD, NEW = 1.0, 2.0


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting is refused here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def state(value):
    """2.4 MB in tensors that each get a file."""
    return {name: torch.full((200, 1000), value) for name in "abc"}


def saved(path, value, **options):
    return pc.save(path, model=state(value), extra=value, **policies(max_shard_size="800KB", timeout=300, **options))


def value_of(path, group=None):
    """The value of a checkpoint, which is the same everywhere in it."""
    assert pc.verify(path) == []
    model = state(0.0)
    value = pc.load(path, model=model, group=group).extra
    assert all(tensor.eq(value).all() for tensor in model.values())
    return value


def listed(path):
    return sorted(each.name for each in path.iterdir())


def alone():
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def free(path):
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def fill(disk, left):
    with (disk / "ballast").open("wb") as file:
        file.write(bytes(free(disk) - left))


def after(step, act):
    """What does something on the first rank as soon as a step of the next save is done."""

    def at(reached):
        if reached == step and dist.get_rank() == 0:
            act()

    return mock.patch.object(_save, "open_folder", lambda path: open_folder(path, at))


def filled(disk, when):
    """What fills the disk during the next save, after the free space was looked at."""
    if when != "manifest":
        return after("made", lambda: fill(disk, 0 if when == "first file" else 1_300_000))
    encode = _finish.encode_manifest

    def fill_and_encode(manifest):
        fill(disk, 0)
        return encode(manifest)

    return mock.patch.object(_finish, "encode_manifest", fill_and_encode)


KINDS = [{}, {"async_": True}, {"writer": "owner"}, {"style": "torch"}]


@pytest.mark.parametrize(
    ("when", "overwrite"),
    [
        *((when, True) for when in ("first file", "middle", "manifest")),
        ("middle", False),
        *(storm(when, False) for when in ("first file", "manifest")),
    ],
)
@pytest.mark.ranks(2)
def test_a_disk_that_fills_up_is_told_everywhere_and_leaves_the_old(disk, when, overwrite):
    root, group = disk / "root", alone()
    saved(root / "run", OLD)
    for kind in KINDS if when == "middle" else KINDS[:2]:
        target = root / ("run" if overwrite else "other")
        before = free(disk)
        dist.barrier()
        with filled(disk, when), pytest.raises((OSError, pc.CheckpointError), match="No space left"):
            saved(target, NEW, overwrite=overwrite, **kind).wait()
        dist.barrier()
        assert listed(root) == ["run"], "the staging is gone"
        assert value_of(root / "run", group) == OLD
        dist.barrier()
        if dist.get_rank() == 0:
            (disk / "ballast").unlink()
            assert free(disk) == before, "no removed file is held open"
        dist.barrier()
    saved(root / "run", NEW, overwrite=True).wait()
    assert value_of(root / "run", group) == NEW
    assert listed(root) == ["run"]


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.ranks(2)
def test_too_little_space_is_found_before_anything_is_written(disk, async_):
    saved(disk / "run", OLD)
    before = free(disk)
    with pytest.raises(pc.CheckpointError) as caught:
        pc.save(
            disk / "run",
            model={"a": torch.zeros(2_000_000)},
            overwrite=True,
            async_=async_,
            transfer=pc.Transfer(timeout=300),
        )
    assert "8,000," in str(caught.value)
    assert f"bytes are needed in {disk}, {before:,} are free" in str(caught.value)
    assert listed(disk) == ["run"]
    assert free(disk) == before
    dist.barrier()
    assert value_of(disk / "run", alone()) == OLD


def test_a_disk_that_is_read_only(disk):
    saved(disk / "run", OLD)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for path in ("run", "other"):
        with pytest.raises(OSError, match="Read-only"):
            saved(disk / path, NEW, overwrite=True)
    assert value_of(disk / "run") == OLD
    assert listed(disk) == ["run"]


@pytest.mark.ranks(2)
def test_a_path_below_a_file_is_refused_on_all_ranks(tmp_path):
    file = tmp_path / "file"
    if dist.get_rank() == 0:
        file.write_text("mine")
    dist.barrier()
    for path in (file / "run", file / "a" / "run"):
        with pytest.raises((OSError, pc.CheckpointError), match=str(file)):
            saved(path, NEW)
        with pytest.raises(pc.CheckpointError, match="there is no folder"):
            pc.load(path, model=state(0.0))
    with pytest.raises(pc.CheckpointError, match="this is a file; pass its folder"):
        pc.load(file, model=state(0.0))
    with pytest.raises(FileExistsError):
        saved(file, NEW)
    with pytest.raises(pc.CheckpointError, match="is never replaced"):
        saved(file, NEW, overwrite=True)
    dist.barrier()
    assert file.read_text() == "mine"
    assert listed(tmp_path) == ["file"]


MANY = storm(None, 30)
"""The two savers do not wait for each other at any step: many times, when storms are asked for."""


def at_once(path, *, overwrite, until=None):
    """Two jobs of one rank each save to one path; whether each of them succeeded."""

    waits = iter([until])  # once: a saver that was too late tries again

    def at(reached):
        if reached == until and next(waits, None):
            dist.barrier()

    group, done, every = alone(), False, [False, False]
    dist.barrier()
    with (
        contextlib.suppress(FileExistsError, pc.CheckpointError),
        mock.patch.object(_save, "open_folder", lambda path: open_folder(path, at)),
    ):
        saved(path, float(dist.get_rank()), overwrite=overwrite, group=group)
        done = True
    dist.all_gather_object(every, done)
    return every, value_of(path, group)


def skip_unless_exchanged(path):
    for name in ("a", "b"):
        (path / name).mkdir(parents=True)
    exchanged = exchange(path / "a", path / "b")
    shutil.rmtree(path)
    if not exchanged:
        pytest.skip("this file system cannot exchange folders")


@pytest.mark.parametrize(("until", "times"), [("made", 2), MANY])
@pytest.mark.ranks(2)
def test_of_two_savers_to_one_path_exactly_one_wins(tmp_path, until, times):
    for number in range(times):
        done, value = at_once(tmp_path / str(number), overwrite=False, until=until)
        assert sum(done) == 1
        assert done[int(value)], "what is there is the winner's"
    assert listed(tmp_path) == sorted(str(number) for number in range(times))


@pytest.mark.parametrize(("until", "times"), [storm("made", 2), ("synced-staging", 2), MANY])
@pytest.mark.ranks(2)
def test_of_two_first_savers_that_overwrite_one_wins_and_the_other_is_told_if_it_lost(tmp_path, until, times):
    for number in range(times):
        done, value = at_once(tmp_path / str(number), overwrite=True, until=until)
        assert done[int(value)]
    assert listed(tmp_path) == sorted(str(number) for number in range(times))


@pytest.mark.parametrize(("until", "times"), [("made", 2), storm("synced-staging", 2), MANY])
@pytest.mark.ranks(2)
def test_two_savers_that_overwrite_one_path_both_succeed(tmp_path, until, times):
    path = tmp_path / "run"
    skip_unless_exchanged(tmp_path / str(dist.get_rank()))
    saved(path, OLD)
    for _ in range(times):
        done, value = at_once(path, overwrite=True, until=until)
        assert done == [True, True]
        assert value in (0.0, 1.0)
    dist.barrier()
    assert listed(tmp_path) == ["run"]


@pytest.mark.ranks(2)
def test_a_reader_beside_a_saver_never_takes_a_mixture_for_whole(tmp_path):
    path, group = tmp_path / "run", alone()
    done = tmp_path / "done"
    saved(path, OLD)
    if dist.get_rank() == 0:
        for _ in range(10):
            saved(path, NEW, overwrite=True, group=group)
        done.touch()
        return
    whole, last = 0, False
    while not last:
        last = done.exists()  # from then on it is sure to find the new one
        # It may open files of both if it looks while they are exchanged, but then the checksums tell.
        with contextlib.suppress(pc.CheckpointError):
            model = state(0.0)
            value = pc.load(path, model=model, group=group).extra
            assert all(tensor.eq(value).all() for tensor in model.values())
            whole += 1
    assert whole
