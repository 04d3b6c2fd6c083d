"""The scratch file: direct reads and writes, mapped tensors, and folders that cannot hold it."""

import errno
import fcntl
import mmap
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from par_zero.offload.disk import Disk
from par_zero.offload.staging import StagingBuffer

MIB = 2**20


@pytest.mark.parametrize("direct", [True, False])
def test_disk_writes_are_read_by_file_and_by_mapping(direct, tmp_path, monkeypatch):
    if not direct:
        original = fcntl.fcntl

        def refuse(file, command, flags=0):
            if command == fcntl.F_SETFL and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return original(file, command, flags)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
    disk = Disk(str(tmp_path), 12 * MIB, threads=2)
    assert not list(tmp_path.iterdir())
    source, into = StagingBuffer(9 * MIB), StagingBuffer(9 * MIB)
    mapped = disk.tensor(4096, torch.float32, 9 * MIB // 4)
    for turn in range(3):
        values = source.tensor(0, torch.float32, 9 * MIB // 4)
        values.copy_(torch.arange(len(values)) + turn)
        write = disk.write(4096, source.bytes)
        read = disk.read(4096, into.bytes, after=write)
        write.wait()
        read.wait()
        assert torch.equal(into.tensor(0, torch.float32, len(values)), values)
        assert torch.equal(mapped, values)
        mapped[5] = -1  # through the cache, and then past it
        disk.read(4096, into.bytes).wait()
        assert into.tensor(0, torch.float32, 6)[5] == -1


def test_disk_without_unnamed_files_unlinks_its_file(tmp_path, monkeypatch):
    original = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return original(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    disk = Disk(str(tmp_path), MIB, threads=1)
    assert not list(tmp_path.iterdir())
    buffer = StagingBuffer(4096)
    buffer.tensor(0, torch.int32, 1024).fill_(7)
    disk.write(4096, buffer.bytes).wait()
    assert disk.tensor(4096, torch.int32, 1024).eq(7).all()


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_disk_short_kernel_calls_are_continued(name, tmp_path, monkeypatch):
    original = getattr(os, name)
    monkeypatch.setattr(os, name, lambda file, parts, start: original(file, [parts[0][:8192]], start))
    disk = Disk(str(tmp_path), MIB, threads=1)
    source, into = StagingBuffer(40_960), StagingBuffer(40_960)
    source.tensor(0, torch.int32, 10_240).copy_(torch.arange(10_240))
    disk.write(4096, source.bytes).wait()
    disk.read(4096, into.bytes).wait()
    assert torch.equal(into.tensor(0, torch.int32, 10_240), torch.arange(10_240))


def test_disk_allocates_at_once_and_keeps_the_stack_size(tmp_path):
    before = threading.stack_size(MIB)
    disk = Disk(str(tmp_path), 3 * MIB, threads=1)
    assert threading.stack_size(before) == MIB
    own = tmp_path.stat().st_dev
    sizes = [file.stat() for file in Path("/proc/self/fd").iterdir() if file.exists()]
    assert any(each.st_size == 3 * MIB <= each.st_blocks * 512 for each in sizes if each.st_dev == own)
    del disk


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="there, a fork takes nothing from a direct read")
def test_staging_buffer_is_absent_in_a_forked_process():
    """Else what is read directly while it begins may end in its copy of a page."""
    buffer = StagingBuffer(2 * MIB)
    first = f"{buffer.tensor(0, torch.uint8, 1).data_ptr():x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(first))
    assert "dc" in next(line for line in lines if line.startswith("VmFlags:")).split()


def test_disk_read_behind_a_failed_write_reads_nothing(tmp_path, monkeypatch):
    disk = Disk(str(tmp_path), MIB, threads=1)
    buffer = StagingBuffer(MIB)
    buffer.tensor(0, torch.float32, 1).fill_(7)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    write = disk.write(0, buffer.bytes)
    disk.read(0, buffer.bytes, after=write).wait()
    assert isinstance(write.error(), OSError)
    assert buffer.tensor(0, torch.float32, 1) == 7


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/dev/shm", r"path '/dev/shm' is in memory \(tmpfs\), so nothing would be saved; give a folder on a disk"),
        ("/nowhere", r"path '/nowhere' is no folder; give a folder on a local disk"),
    ],
)
def test_disk_missing_or_in_memory_folder_raises(path, problem):
    with pytest.raises(ValueError, match=problem):
        Disk(path, MIB, threads=1)


def test_disk_too_small_raises_with_both_sizes(tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (MIB, limits[1])
    )  # the kernel refuses to make room, as where others took it
    try:
        with pytest.raises(ValueError, match=r"free and 2.1 MB are needed; free some, or offload less"):
            Disk(str(tmp_path), 2 * MIB, threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda _: SimpleNamespace(f_bavail=4_000_000, f_bfree=4_000_000, f_blocks=9_000_000, f_frsize=1000),
    )
    with pytest.raises(ValueError, match=r"has 4.0 GB free and 12.3 GB are needed; free some, or offload less"):
        Disk(str(tmp_path), 12_300_000_000, threads=1)
    assert not list(tmp_path.iterdir())


def test_disk_without_posix_fallocate_raises(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(ValueError, match=r"cannot reserve the bytes of a file; use Linux, or offload to the host"):
        Disk(str(tmp_path), MIB, threads=1)
