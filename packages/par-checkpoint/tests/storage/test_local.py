import contextlib
import os
import resource
import stat
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from par_checkpoint._errors import CheckpointError, CorruptError
from par_checkpoint.storage.folder import open_folder
from par_checkpoint.storage.local import LocalFolder, LocalWriter

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run" / "optimizer").mkdir(parents=True)
    (tmp_path / "run" / "a").write_bytes(b"0123456789")
    (tmp_path / "run" / "optimizer" / "b").write_bytes(b"xyz")
    return open_folder(tmp_path / "run")


@pytest.fixture
def staging(tmp_path):
    staging = open_folder(tmp_path / "deep" / "run").stage("n1")
    staging.create(["a", "optimizer/b"], 0)
    yield staging
    staging.discard()


def test_reads_whole_files_and_ranges(folder):
    assert folder.read("a") == b"0123456789"
    assert folder.read("a", 3) == b"3456789"
    assert folder.read("optimizer/b", 1, 2) == b"y"
    with contextlib.closing(folder.open("a")) as source:
        into = bytearray(4)
        source.read_into(5, memoryview(into))
        assert source.size == 10
        assert into == b"5678"


def test_sizes_are_those_of_files_and_of_the_optimizer_folder(folder, tmp_path):
    (tmp_path / "run" / "other").mkdir()
    (tmp_path / "run" / "other" / "c").touch()
    assert folder.sizes() == {"a": 10, "optimizer/b": 3}


def test_a_short_file_is_reported_with_its_offset(folder):
    with pytest.raises(CorruptError, match="run/a ends at byte 10, but byte 10 is asked for"):
        folder.read("a", 8, 12)


def test_a_missing_file_or_folder_is_named(folder, tmp_path):
    with pytest.raises(CorruptError, match="run/c is missing"):
        folder.open("c")
    with pytest.raises(CheckpointError, match=r"there is no folder .*/elsewhere: check the path"):
        open_folder(tmp_path / "elsewhere").sizes()


def test_reads_through_links_and_names_a_broken_one(folder, tmp_path):
    (tmp_path / "blob").write_bytes(b"blob")
    (tmp_path / "run" / "linked").symlink_to("../blob")
    (tmp_path / "latest").symlink_to("run")
    assert open_folder(tmp_path / "latest").read("linked") == b"blob"
    assert folder.sizes()["linked"] == 4
    (tmp_path / "blob").unlink()
    assert "linked" not in folder.sizes()
    assert folder.dangling == {"linked"}


def test_names_do_not_lead_out_of_the_folder(folder):
    for act in (folder.open, folder.stage("n").writer, folder.child):
        with pytest.raises(ValueError, match="is no name of a checkpoint's file"):
            act("../a")


def test_an_empty_folder_is_nothing(tmp_path):
    folder = open_folder(tmp_path / "run")
    assert not folder.exists()
    (tmp_path / "run").mkdir()
    assert not folder.exists()
    (tmp_path / "run" / "a").touch()
    assert folder.exists()


def test_a_new_checkpoint_takes_the_place_of_an_empty_folder(staging, tmp_path):
    (tmp_path / "deep" / "run").mkdir()
    staging.write("a", b"new")
    staging.publish(overwrite=False)
    assert open_folder(tmp_path / "deep" / "run").read("a") == b"new"


def test_ranges_are_written_in_any_order_by_several_writers(staging, tmp_path):
    staging.allocate("optimizer/b", 8)
    writers = [staging.writer("optimizer/b") for _ in range(2)]
    writers[0].write_at(4, memoryview(b"4567"))
    writers[1].write_at(0, memoryview(b"0123"))
    for writer in writers:
        writer.finish()
        writer.abort()
    staging.publish(overwrite=False)
    assert open_folder(tmp_path / "deep" / "run").read("optimizer/b") == b"01234567"


def test_a_small_file_is_written_anew(staging, tmp_path):
    staging.write("a", b"long")
    staging.write("a", b"new")
    staging.write("optimizer/index", b"")
    staging.publish(overwrite=False)
    assert open_folder(tmp_path / "deep" / "run").sizes() == {"a": 3, "optimizer/index": 0}


def test_a_write_that_the_kernel_cuts_short_goes_on(staging):
    writer = staging.writer("a")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # the first call writes 100 bytes, the next one fails
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.write_at(0, memoryview(bytes(150)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.abort()


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        staging = open_folder(tmp_path / "deep" / "run").stage("n1")
        staging.create(["optimizer/b"], 0)
        staging.write("optimizer/b", b"x")
        staging.publish(overwrite=False)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE((tmp_path / "deep" / path).stat().st_mode) for path in (".", "run", "run/optimizer")}
    assert set(modes.values()) == {0o750}
    assert stat.S_IMODE((tmp_path / "deep/run/optimizer/b").stat().st_mode) == 0o640


def test_too_little_room_is_said_before_anything_is_made(tmp_path):
    staging = open_folder(tmp_path / "run").stage("n1")
    with pytest.raises(CheckpointError, match=r"1,000,000,000,000,000,000 bytes are needed in .*, [\d,]+ are free"):
        staging.create(["a"], 10**18)
    staging.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_staging_that_is_not_visible_is_reported(tmp_path):
    folder = LocalFolder(str(tmp_path / "run"), at=lambda _: None, patience=0)
    with pytest.raises(CheckpointError, match="not visible on this rank: use a file system that all ranks share"):
        folder.stage("n1").attach()


def test_discard_removes_the_staging_in_any_state_and_close_leaves_it(tmp_path):
    folder = open_folder(tmp_path / "run")
    folder.stage("n0").discard()
    staging = folder.stage("n1")
    staging.create(["a"], 0)
    staging.write("a", b"x")
    staging.close()
    staging.close()
    assert [path.name for path in tmp_path.iterdir()] == [".run.tmp-n1"]
    staging.discard()
    staging.discard()
    assert list(tmp_path.iterdir()) == []


def test_sweeping_takes_what_is_dead_and_nothing_else(tmp_path):
    for name in (".run.tmp-1", ".run.old-2", ".other.tmp-3", ".run.new-4", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "file").touch()
    (tmp_path / ".run.tmp-5").symlink_to("run")
    alive = open_folder(tmp_path / "run").stage("n1")
    alive.create([], 0)
    (tmp_path / ".run.old-n1").mkdir()
    (tmp_path / ".run.old-6").mkdir()
    folder = open_folder(tmp_path / "run")
    told = folder.sweep(dry_run=True)
    assert told == [str(tmp_path / ".run.old-6")]
    assert folder.sweep() == told
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".other.tmp-3", ".run.lease-n1", ".run.new-4", ".run.old-n1", ".run.tmp-5", ".run.tmp-n1", "run"]
    alive.close()


def test_the_old_one_is_not_swept_while_it_is_the_only_one(tmp_path):
    (tmp_path / ".run.old-1").mkdir()
    folder = open_folder(tmp_path / "run")
    assert folder.sweep() == []
    folder.repair()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_last_file_of_a_path_must_have_a_name():
    with pytest.raises(ValueError, match="'/' has no name: give a folder below it"):
        open_folder("/")
    with pytest.raises(TypeError, match="give it as str"):
        open_folder(b"run")
    with pytest.raises(ValueError, match="must be letters and digits"):
        open_folder("run").stage("a/b")


def test_a_mount_point_is_refused():
    with pytest.raises(CheckpointError, match="is a mount point"):
        open_folder("/proc").check_target(overwrite=True)


@pytest.mark.ranks(2)
def test_ranks_write_one_file_together(tmp_path):
    folder = open_folder(Path(tmp_path) / "run")
    staging = folder.stage("n1")
    if dist.get_rank() == 0:
        staging.create(["a"], 8)
        staging.allocate("a", 8)
    dist.barrier()
    staging.attach()
    writer = staging.writer("a")
    writer.write_at(4 * dist.get_rank(), memoryview(str(dist.get_rank()).encode() * 4))
    writer.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        staging.publish(overwrite=False)
    dist.barrier()
    staging.close()
    assert folder.read("a") == b"00001111"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sync_file_range")
def test_large_writes_leave_the_page_cache_in_the_order_in_which_they_came(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: left.append((begin, size, advice)))
    writer = LocalWriter(tmp_path / "file")
    blocks = [os.urandom(MIB) for _ in range(19)]
    for number, block in enumerate(blocks):
        writer.write_at(number * MIB, memoryview(block))
        writer.write_at((number + 1) * MIB, memoryview(b"small"))
    writer.finish()
    assert left == [(number * MIB, MIB, os.POSIX_FADV_DONTNEED) for number in range(3)]
    assert (tmp_path / "file").read_bytes() == b"".join(blocks) + b"small"


def test_what_cannot_be_written_back_early_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("par_checkpoint.storage.local._sync_file_range", lambda: None)
    writer = LocalWriter(tmp_path / "file")
    writer.write_at(0, memoryview(bytes(2 * MIB)))
    writer.finish()
    assert (tmp_path / "file").read_bytes() == bytes(2 * MIB)


def test_local_folder_without_positional_writes_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pwrite")
    with pytest.raises(CheckpointError, match=r"local checkpoints need Linux or macOS; use WSL, or an object store"):
        open_folder(tmp_path / "checkpoint")
