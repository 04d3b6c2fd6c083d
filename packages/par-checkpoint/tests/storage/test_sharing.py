"""File systems that several machines mount, as far as this machine can mount any: FUSE twice, NFS from itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import par_checkpoint as pc
from par_checkpoint.format.header import encode_header
from par_checkpoint.storage import lease, sharing
from par_checkpoint.storage.local import LocalFolder
from par_checkpoint.storage.sharing import Sharing, sharing_of

from ..forks import forked

LIVES = 1.2


def run(*command):
    """Runs a command as far as this machine lets it; what it says where it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return f"there is no {command[0]}"
    return done.stderr.strip() or f"{command[0]} failed" if done.returncode else ""


@pytest.fixture(params=["fuse", "nfs", "nfs nolock", "nfs actimeo=30"])
def mounts(request, tmp_path):
    """Two mounts of one folder."""
    kind, _, options = request.param.partition(" ")
    if os.geteuid() != 0:
        pytest.skip("only root mounts file systems")
    source, points = tmp_path / "source", (tmp_path / "a", tmp_path / "b")
    for folder in (source, *points):
        folder.mkdir()
    export = f"127.0.0.1:{source}"
    if kind == "nfs":
        if "\tnfs" not in Path("/proc/filesystems").read_text() and (wrong := run("modprobe", "nfs")):
            pytest.skip(f"this kernel mounts no NFS: {wrong}")
        if wrong := run("exportfs", "-o", "rw,no_root_squash,insecure,fsid=27", export):
            pytest.skip(f"NFS cannot be served here: {wrong}")
    for point in points:
        how = ["bindfs", str(source)] if kind == "fuse" else ["mount", "-t", "nfs", "-o", options or "rw", export]
        if wrong := run(*how, str(point)):
            pytest.skip(f"{kind} cannot be mounted here: {wrong}")
    yield points
    for point in points:
        run("umount", "-l", str(point))
    if kind == "nfs":
        run("exportfs", "-u", export)


def folder(path):
    return LocalFolder(str(path), at=lambda _: None, exchange=False, patience=5, lease=LIVES)


@pytest.fixture
def far(monkeypatch):
    """Makes this process one of another machine for as long as it is asked for."""
    this = lease._this

    def be(boot):
        monkeypatch.setattr(lease, "_this", lambda: lease.Holder(**{**vars(this()), "boot": boot}))

    return be


def test_local_disks_are_written_in_ranges_and_what_is_not_known_file_by_file(tmp_path, monkeypatch):
    assert sharing_of(Path("/dev/shm") if sys.platform == "linux" else tmp_path) in (Sharing.RANGES, Sharing.FILES)
    kinds = {0xEF53: 0, 0x01021994: 0, 0x0BD00BD0: 1, 0x47504653: 1, 0x6969: 2, 0xFF534D42: 2, 0x65735546: 2, 7: 2}
    for magic, expected in kinds.items():
        monkeypatch.setattr(sharing, "_magic", lambda _, magic=magic: magic)
        assert sharing_of(tmp_path / "not" / "there") == expected


@pytest.mark.parametrize("alignment", [8, 4096, 1 << 20])
def test_data_begins_at_the_edge_of_a_page_and_safetensors_reads_it(tmp_path, alignment):
    from safetensors.torch import load_file

    value = torch.arange(6.0)
    header, laid = encode_header({"w": (value.dtype, tuple(value.shape))}, alignment=alignment)
    assert len(header) == laid.data_begin
    assert laid.data_begin % alignment == 0
    (tmp_path / "f").write_bytes(header + bytes(value.numpy().tobytes()))
    assert torch.equal(load_file(tmp_path / "f")["w"], value)


def test_a_checkpoint_goes_from_one_mount_to_the_other(mounts):
    a, b = mounts
    assert sharing_of(a) is Sharing.FILES
    model = {"w": torch.arange(3_000_000.0), "v": torch.ones(5)}
    pc.save(a / "run", model=model, max_shard_size="4MB")
    for number in range(3):
        other = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        pc.load(b / "run", model=other)
        assert all(torch.equal(other[name], tensor) for name, tensor in model.items())
        model["v"] += 1
        pc.save((a, b)[number % 2] / "run", model=model, max_shard_size="4MB", overwrite=True)
    assert sorted(path.name for path in a.iterdir()) == ["run"]


def test_a_saver_on_one_mount_is_not_swept_from_the_other(mounts, far):
    a, b = mounts
    staging = folder(a / "run").stage("first")
    staging.create(["model.safetensors"], 0)
    staging.write("model.safetensors", b"first")
    for boot in ("here", "there"):  # as on the saver's machine, and as on another one
        if boot == "there":
            far(boot)
        assert folder(b / "run").sweep() == []
        second = folder(b / "run").stage(boot)
        second.create(["model.safetensors"], 0)
        second.write("model.safetensors", b"second")
        second.publish(overwrite=True)
    staging.publish(overwrite=True)
    assert folder(b / "run").read("model.safetensors") == b"first"
    assert sorted(path.name for path in b.iterdir()) == ["run"]


def test_a_dead_saver_on_one_mount_is_swept_from_the_other(mounts, far):
    a, b = mounts
    for boot in ("here", "there"):
        with forked() as saver:
            if not saver:
                folder(a / "run").stage("dead").create([], 0)
        assert os.waitpid(saver, 0)[1] == 0
        if boot == "there":
            far(boot)
            assert folder(b / "run").sweep() == [], "it may live: its lease is young"
            left = json.loads((b / ".run.lease-dead").read_text())
            assert left["pid"] != os.getpid()
            os.utime(a / ".run.lease-dead", (1, 1))
        assert folder(b / "run").sweep() == [str(b / ".run.tmp-dead")]
        assert list(b.iterdir()) == []


def test_two_savers_on_two_mounts_leave_one_of_their_checkpoints_whole(mounts):
    code = (
        "import sys, torch, par_checkpoint as pc\n"
        "for number in range(4):\n"
        "    try:\n"
        "        pc.save(sys.argv[1], model={'w': torch.full((1000,), float(sys.argv[2]))}, overwrite=True)\n"
        "    except pc.CheckpointError as error:\n"
        "        assert 'another process' in str(error), error\n"
    )
    savers = [
        subprocess.Popen([sys.executable, "-c", code, str(mount / "run"), str(number)])
        for number, mount in enumerate(mounts)
    ]
    assert [saver.wait(60) for saver in savers] == [0, 0]
    found = {"w": torch.full((1000,), -1.0)}
    pc.load(mounts[0] / "run", model=found)
    assert found["w"].unique().tolist() in ([0.0], [1.0])
    assert pc.verify(mounts[1] / "run") == []
