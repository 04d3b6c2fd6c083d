"""File systems that several machines mount, as far as this machine can mount any: FUSE twice, NFS from itself."""

import json
import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import par_checkpoint as pc
from par_checkpoint.storage import lease, local
from par_checkpoint.storage.local import LocalFolder, LocalStaging, LocalWriter
from par_checkpoint.storage.sharing import Sharing, sharing_of

from ..forks import forked

LIVES = 1.2  # seconds without a sign of life
KEPT = 1.0  # seconds for which the late file systems keep names, sizes and that a name was not there
FUSE = "fuse"
LATE_FUSE = f"fuse attr_timeout={KEPT},entry_timeout={KEPT},negative_timeout={KEPT}"
SIZES = {"w": 1000, "v": 70_000}
NFS = {"nfs3": "vers=3", "nfs3_without_locks": "vers=3,nolock", "nfs4": "vers=4.2"}
LATE_NFS = {"late_nfs3": "vers=3,actimeo=30", "late_nfs4": "vers=4.2,actimeo=30"}


def cases(*fuse, **nfs):
    """The file systems of a test, as `mounted` takes them."""
    return [*fuse, *(pytest.param(f"nfs nosharecache,{options}", id=name) for name, options in nfs.items())]


def run(*command):
    """Runs a command as far as this machine lets it; what it says where it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return f"there is no {command[0]}"
    return done.stderr.strip() or f"{command[0]} failed" if done.returncode else ""


@contextmanager
def mounted(asked, tmp_path, second=""):
    """Two mounts of one folder.

    Args:
        asked: "fuse" or "nfs", and options of the mounts.
        tmp_path: Where all of it lies.
        second: Further options of the second mount.
    """
    kind, _, options = asked.partition(" ")
    if os.geteuid() != 0:
        pytest.skip("only root mounts file systems")
    source, points = tmp_path / "source", (tmp_path / "a", tmp_path / "b")
    for each in (source, *points):
        each.mkdir()
    export = f"127.0.0.1:{source}"  # which is the root of what release 4 sees
    if kind == "nfs":
        if "\tnfs" not in Path("/proc/filesystems").read_text() and (wrong := run("modprobe", "nfs")):
            pytest.skip(f"this kernel mounts no NFS: {wrong}")
        if wrong := run("exportfs", "-o", "rw,no_root_squash,insecure,no_subtree_check,fsid=0", export):
            pytest.skip(f"NFS cannot be served here: {wrong}")
    try:
        for point, more in zip(points, ("", second), strict=True):
            chosen = [f"-o{of_mount}" for of_mount in (options, more) if of_mount]
            seen = "127.0.0.1:/" if "vers=4" in options else export
            how = ["bindfs", *chosen, str(source)] if kind == "fuse" else ["mount", "-t", "nfs", *chosen, seen]
            if wrong := run(*how, str(point)):
                pytest.skip(f"{asked} cannot be mounted here: {wrong}")
        yield points
    finally:
        for point in points:
            run("umount", "-l", str(point))
        if kind == "nfs":
            run("exportfs", "-u", export)


@pytest.fixture(params=cases(FUSE, **NFS))
def mounts(request, tmp_path):
    """Two mounts of one folder."""
    with mounted(request.param, tmp_path) as points:
        yield points


@pytest.fixture(params=cases(LATE_FUSE, **LATE_NFS))
def late(request, tmp_path):
    """Two mounts of one folder, each of which shows late what was written through the other one."""
    with mounted(request.param, tmp_path) as points:
        yield points


def folder(path, at=lambda _: None):
    return LocalFolder(str(path), at=at, exchange=False, patience=5, lease=LIVES)


def die_at(moment):
    """What kills this process at a step of a commit."""

    def at(step):
        if step == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def commit(target, nonce, data):
    """Saves one file."""
    staging = target.stage(nonce)
    staging.create(["model.safetensors"], 0)
    staging.write("model.safetensors", data)
    staging.publish(overwrite=True)


def killed(act):
    """Does something in a process that is killed by it."""
    with forked() as child:
        if not child:
            act()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.fixture
def far(monkeypatch):
    """Makes this process one of another machine for as long as it is asked for."""
    this = lease._this

    def be(boot):
        monkeypatch.setattr(lease, "_this", lambda: lease.Holder(**{**vars(this()), "boot": boot}))

    return be


def test_a_checkpoint_goes_from_one_mount_to_the_other(mounts):
    a, b = mounts
    assert sharing_of(a) is Sharing.FILES
    model = {"w": torch.arange(3_000_000.0), "v": torch.ones(5)}
    pc.save(a / "run", model=model, format=pc.Format(max_shard_size="4MB"))
    for number in range(3):
        other = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        pc.load(b / "run", model=other)
        assert all(torch.equal(other[name], tensor) for name, tensor in model.items())
        model["v"] += 1
        pc.save((a, b)[number % 2] / "run", model=model, overwrite=True, format=pc.Format(max_shard_size="4MB"))
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
        commit(folder(b / "run"), boot, b"second")
    staging.publish(overwrite=True)
    assert folder(b / "run").read("model.safetensors") == b"first"
    assert sorted(path.name for path in b.iterdir()) == ["run"]


def test_a_dead_saver_on_one_mount_is_swept_from_the_other(mounts, far):
    a, b = mounts
    for boot in ("here", "there"):
        killed(lambda: commit(folder(a / "run", die_at("synced-staging")), "dead", b"dead"))
        if boot == "there":
            far(boot)
            assert folder(b / "run").sweep() == [], "it may live: its lease is young"
            left = json.loads((b / ".run.lease-dead").read_text())
            assert left["pid"] != os.getpid()
            os.utime(a / ".run.lease-dead", (1, 1))
        assert folder(b / "run").sweep() == [str(b / ".run.tmp-dead")]
        assert list(b.iterdir()) == []


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_of_the_server_that_jumps_kills_no_saver(mounts, far, jump):
    """Nor does this machine's, that goes another way; the lease is written anew meanwhile, and then not any more."""
    a, b = mounts
    path, ended, now = a / ".run.lease-a", threading.Event(), time.time()
    begin, began = os.pipe()
    end, over = os.pipe()
    with forked() as saver:
        if not saver:
            held = lease.Lease(path, LIVES)
            os.write(began, b"!")
            os.close(over)
            while not select.select([end], [], [], LIVES / 6)[0]:
                held._write()  # in place of its thread
    os.read(begin, 1)

    def turn():  # there is another time after each sign of life
        while not ended.wait(0.01):
            os.utime(path, (now + jump,) * 2)

    ages, read = [], lease._read

    def noted(path):
        holder, age = read(path)
        ages.append(age)
        return holder, age

    far("there")
    clock = threading.Thread(target=turn)
    clock.start()
    try:
        with mock.patch.object(lease, "_read", noted), mock.patch.object(time, "time", return_value=5.0):
            while not any(abs(age) > LIVES for age in ages):
                assert lease.is_held(b / path.name, LIVES)
    finally:
        ended.set()
        clock.join()
    assert lease.is_held(b / path.name, LIVES)
    os.close(over)
    assert os.waitpid(saver, 0)[1] == 0
    for pipe in (begin, began, end):
        os.close(pipe)
    os.utime(path, (1, 1))
    assert not lease.is_held(b / path.name, LIVES)


def test_a_reader_of_a_mount_for_reading_alone_sees_what_a_saver_had_when_it_was_killed(tmp_path):
    """Between its two renames: nothing is put back from there, as nothing can be."""
    with mounted(FUSE, tmp_path, second="ro") as (a, b):
        pc.save(a / "run", model={"w": torch.ones(4)})
        old = {path.name: path.read_bytes() for path in (a / "run").iterdir()}

        def save():
            with mock.patch.object(pc._save, "open_folder", lambda path: folder(path, die_at("renamed-old"))):
                pc.save(a / "run", model={"w": torch.zeros(4)}, overwrite=True)

        killed(save)
        assert not (a / "run").exists()
        before = sorted(path.name for path in b.iterdir())
        found = {"w": torch.zeros(4)}
        pc.load(b / "run", model=found)
        assert found["w"].tolist() == [1.0] * 4
        assert pc.verify(b / "run") == []
        assert sorted(path.name for path in a.iterdir()) == before
        with pytest.raises(pc.CheckpointError, match=r"a save died; rename .*Read-only"):
            pc.save(b / "run", model=found, overwrite=True)
        folder(a / "run").repair()
        assert {path.name: path.read_bytes() for path in (a / "run").iterdir()} == old


def test_a_saver_that_still_sees_a_name_does_not_remove_what_had_it(late):
    """One was killed on another machine between its renames: the old checkpoint is the only whole one.

    It may keep its name: where a machine believes that both names are of one folder, a rename does nothing.
    """
    (a, b), served = late, late[0].parent / "source" / "run"

    def there():
        found = folder(served)
        found.recover()
        return found.read("model.safetensors")

    commit(folder(a / "run"), "0", b"old")
    (b / "run").stat()  # kept from now on
    killed(lambda: commit(folder(a / "run", die_at("renamed-old")), "1", b"new"))
    assert folder(b / "run").sweep() == [str(b / ".run.tmp-1")]
    assert there() == b"old"
    commit(folder(b / "run"), "2", b"newer")
    assert there() == b"newer"
    assert [path.name for path in served.parent.iterdir()] == ["run"]


def test_what_is_seen_late_is_read_once_more(late, monkeypatch):
    """The reader has looked at the old files: their names and sizes are what its mount believes."""
    a, b = late
    monkeypatch.setattr(local, "_SETTLES", 1.2 * KEPT)
    for size in (5000, 70, 90_000):
        pc.save(a / "run", model={"w": torch.full((size,), float(size))}, extra="x" * size, overwrite=True)
        found = {"w": torch.zeros(size)}
        assert pc.load(b / "run", model=found).extra == "x" * size
        assert found["w"].eq(size).all()
        assert pc.verify(b / "run") == []
        for path in (b / "run").iterdir():
            path.stat()
    broken = b / "run" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + b"x")
    waited = []
    with mock.patch.object(time, "sleep", waited.append), pytest.raises(pc.CorruptError, match="checksum is wrong"):
        pc.load(b / "run", model=found)
    assert waited.count(local._SETTLES) == 1


def test_old_sizes_and_names_are_what_a_late_mount_tells(tmp_path):
    """Else the tests of it would show nothing."""
    with mounted(LATE_FUSE, tmp_path) as (a, b):
        (a / "file").write_bytes(b"1")
        assert (b / "file").stat().st_size == 1
        assert not (b / "new").exists()
        (a / "file").write_bytes(b"12345")
        (a / "new").touch()
        assert (b / "file").stat().st_size == 1
        assert not (b / "new").exists()


def test_savers_that_cross_leave_one_checkpoint_whole_with_what_it_took_over(mounts):
    """Each comes while the other one is between two steps of its commit; the later one has the last word."""
    a, b = mounts
    before, after = ("linked", "synced-staging"), ("renamed-old", "renamed-new", "retired")
    for moment in before + after:
        pc.save(a / "run", model={"w": torch.zeros(9)}, overwrite=True, format=pc.Format(config={"is": "carried"}))
        crossing = []

        def cross(step, moment=moment, crossing=crossing):
            if step == moment and not crossing:
                crossing.append(threading.Thread(target=commit, args=(folder(b / "run"), "b", b"b")))
                crossing[0].start()
                crossing[0].join(None if moment in before else 0.2)  # between the renames it waits for this one

        commit(folder(a / "run", cross), "a", b"a")
        crossing[0].join()
        last, expected = (a, b"a") if moment in before else (b, b"b")  # the other one may know it later
        assert (folder(last / "run").read("model.safetensors"), moment) == (expected, moment)
        assert json.loads(folder(last / "run").read("config.json")) == {"is": "carried"}
        left = [path.name for path in (a.parent / "source").iterdir()]
        assert [name for name in left if not name.startswith(".run.tmp-")] == ["run"]  # NFS may keep what is removed
        folder(last / "run").sweep()
        folder(last / "run").remove()
        assert list((a.parent / "source").iterdir()) == []


def test_a_saver_that_waits_for_another_one_in_vain_names_it(mounts):
    a, b = mounts
    commit(folder(a / "run"), "0", b"old")
    said = []

    def hang(step):
        if step == "renamed-old":
            with (
                mock.patch.object(socket, "gethostname", return_value="elsewhere"),
                pytest.raises(pc.CheckpointError) as told,
            ):
                LocalFolder(str(b / "run"), at=lambda _: None, exchange=False, patience=0.1, lease=LIVES).repair()
            said.append(str(told.value))

    commit(folder(a / "run", hang), "1", b"new")
    assert f"process {os.getpid()} on {socket.gethostname()} is replacing {b / 'run'}" in said[0]


def count_outcomes(act, seconds):
    """How often something went how, for some seconds and at least once, in words."""
    outcomes, end = Counter(), time.monotonic() + seconds
    while not outcomes or time.monotonic() < end:
        try:
            outcomes[act()] += 1
        except pc.CheckpointError as error:
            outcomes[f"{type(error).__name__}: {error}"] += 1
    return outcomes


def in_processes(*acts):
    """Does things at once, each in a process of its own; what each returns."""
    asked = []
    for act in acts:
        read, write = os.pipe()
        with forked(threads=True) as child:
            if not child:
                os.write(write, json.dumps(act()).encode())
        os.close(write)
        asked.append((child, read))
    results = []
    for child, read in asked:
        with os.fdopen(read, "rb") as pipe:
            results.append(json.loads(pipe.read() or b"null"))
        assert os.waitpid(child, 0)[1] == 0
    return results


def saver(path, number):
    """What saves tensors all of whose values are one number, in ever other files, and says "ok"."""
    counter = iter(range(1, 1 << 20))

    def save():
        value, room = float(number * 100_000 + next(counter)), random.choice([1000, 3000, 200_000])
        model = {name: torch.full((size,), value) for name, size in (("room", room), *SIZES.items())}
        pc.save(
            path,
            model=model,
            extra=value,
            overwrite=True,
            format=pc.Format(max_shard_size="256KB", config={"room": room}),
        )
        return "ok"

    return save


def reader(path):
    """What loads what is there, and says whether all of it is of one save."""

    def read():
        model = {name: torch.zeros(size) for name, size in SIZES.items()}
        value = pc.load(path, model=model, strict=False).extra
        return "ok" if all(tensor.eq(value).all() for tensor in model.values()) else "mixed"

    return read


def test_two_savers_on_two_mounts_leave_one_of_their_checkpoints_whole(mounts):
    acts = [
        lambda path=mount / "run", number=n: count_outcomes(saver(path, number), 0.6) for n, mount in enumerate(mounts)
    ]
    outcomes = in_processes(*acts)
    assert all(set(each) == {"ok"} for each in outcomes), outcomes
    assert reader(mounts[0] / "run")() == "ok"
    assert pc.verify(mounts[1] / "run") == []
    assert [path.name for path in mounts[0].iterdir()] == ["run"]


@pytest.mark.storm
@pytest.mark.parametrize("asked", cases(FUSE, LATE_FUSE, LATE_FUSE.replace(f"={KEPT}", "=20"), **NFS, **LATE_NFS))
def test_savers_and_readers_of_two_mounts_never_mix_two_checkpoints(tmp_path, asked):
    """Whatever fails, fails as a CheckpointError; no other error ends any of these processes."""
    with mounted(asked, tmp_path) as mounts:
        saver(mounts[0] / "run", 9)()
        paths = [mount / "run" for mount in mounts]
        acts = [saver(path, number) for number, path in enumerate(paths)] + [reader(path) for path in paths]
        outcomes = in_processes(*(lambda act=act: count_outcomes(act, 8) for act in acts))
        for each in outcomes:
            assert each.get("ok", 0) > sum(each.values()) / 3, each
            assert "mixed" not in each
        time.sleep(0 if asked == FUSE else 1)
        assert [path.name for path in (tmp_path / "source").iterdir()] == ["run"]
        assert pc.verify(tmp_path / "source" / "run") == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("writer", ["auto", "pwrite"])
def test_two_machines_write_no_file_together_or_no_page_of_one(mounts, writer):
    """Each rank has a mount of its own, as on two machines."""
    rank, written = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (2,))
    whole = {
        name: torch.arange(float(rows * 1031)).view(rows, 1031) for name, rows in (("a", 701), ("b", 33), ("c", 2500))
    }
    model = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    opened, write_at = LocalStaging.writer, LocalWriter.write_at

    def named(staging, name):
        found = opened(staging, name)
        found.name = name
        return found

    def noted(found, begin, view):
        written.append((found.name, begin, begin + len(view)))
        write_at(found, begin, view)

    with (
        mock.patch.object(socket, "gethostname", return_value=f"host{rank}"),
        mock.patch.object(LocalStaging, "writer", named),
        mock.patch.object(LocalWriter, "write_at", noted),
    ):
        pc.save(
            mounts[rank] / "run",
            model=model,
            format=pc.Format(max_shard_size="2MB"),
            transfer=pc.Transfer(writer=writer),
        )
    told = [None, None]
    dist.all_gather_object(told, [each for each in written if each[0].endswith("safetensors")])
    files = [{name for name, _, _ in each} for each in told]
    if writer == "auto":
        assert files[0]
        assert files[1]
        assert not files[0] & files[1]
    else:
        assert files[0] & files[1]
        pages = [{(name, page) for name, a, b in each for page in range(a // 4096, -(-b // 4096))} for each in told]
        assert not pages[0] & pages[1]
    dist.barrier()
    for tensor in model.values():
        tensor.to_local().zero_()
    pc.load(mounts[1 - rank] / "run", model=model)
    assert all(torch.equal(model[name].full_tensor(), tensor) for name, tensor in whole.items())
