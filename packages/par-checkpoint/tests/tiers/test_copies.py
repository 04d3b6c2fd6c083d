"""A first tier of each host's own, and copies on the neighbours: hosts by their names alone, in one world."""

import errno
import os
import re
import shutil
import socket
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_checkpoint import CheckpointError, CorruptError, Format, Tiers, load, save, verify
from par_checkpoint import _save as saving
from par_checkpoint.format.manifest import BLOCK
from par_checkpoint.storage import local
from par_checkpoint.storage.local import LocalSource, LocalWriter
from par_checkpoint.storage.sharing import Sharing
from par_checkpoint.tiers.saving import PartStaging
from par_testing import default_device_type, storm

from ..helpers import policies

SHAPES = {"rows": (1023, 1023), "columns": (257, 1024), "all": (3, 300001), "few": (3,)}
"""Together a little more than two blocks of a file, so that each of two parts has one of its own."""
CUTS = {"rows": Shard(0), "columns": Shard(1), "all": Replicate(), "few": Replicate()}


@contextmanager
def on_hosts(*names):
    """Each rank on the host of a name."""
    with mock.patch.object(socket, "gethostname", return_value=names[dist.get_rank()]):
        yield


def drawn():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def cut(values, shape=None):
    """The values on a mesh of (replicas, parts)."""
    mesh = init_device_mesh(
        default_device_type(), shape or (1, dist.get_world_size()), mesh_dim_names=("data", "tensor")
    )
    return {name: distribute_tensor(values[name], mesh, [Replicate(), CUTS[name]]) for name in values}


def empty(shape=None):
    return cut({name: torch.zeros(shape) for name, shape in SHAPES.items()}, shape)


def is_same(model, values):
    return all(torch.equal(model[name].full_tensor(), values[name]) for name in values)


def tiers_of(folder, host):
    return [str(folder / host / "memory"), str(folder / "disk")]


@contextmanager
def saved_on_two_hosts(folder, copies=2):
    """A checkpoint in the memory of hosts "a" and "b", and on the disk; this rank's host, the tiers and the values."""
    names, values = ("a", "b"), drawn()
    with on_hosts(*names):
        host = names[dist.get_rank()]
        tiers = tiers_of(folder, host)
        save("c", model=cut(values), tiers=Tiers(tiers, copies=copies)).wait()
        yield host, tiers, values


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_", [False, True])
def test_a_lost_host_comes_back_from_its_neighbours_memory(tmp_path, async_):
    names, values = ("a", "b"), drawn()
    with on_hosts(*names):
        host = names[dist.get_rank()]
        tiers = tiers_of(tmp_path, host)
        save(
            "run/step-1", model=cut(values), async_=async_, extra={"x": 5}, step=1, tiers=Tiers(tiers, copies=2)
        ).wait()
        dist.barrier()
        parts = sorted(path.name for path in (tmp_path / host / "memory/run/step-1").iterdir())
        assert parts == ["part-00000-of-00002", "part-00001-of-00002"]
        assert verify(tmp_path / "disk/run/step-1") == []
        dist.barrier()
        for lost in names:
            model, read, read_into = empty(), [], LocalSource.read_into

            def counted(source, begin, view, read=read, read_into=read_into):
                read.append(str(source._path))
                read_into(source, begin, view)

            if host == lost:
                (tmp_path / host / "memory").rename(tmp_path / host / "away")
            dist.barrier()
            with mock.patch.object(LocalSource, "read_into", counted):
                report = load("run/step-1", model=model, tiers=Tiers(tiers))
            assert report.extra == {"x": 5}
            assert report.step == 1
            assert is_same(model, values)
            assert not [path for path in read if "disk" in path], "no slower tier is read"
            assert bool(read) == (host != lost)
            dist.barrier()
            if host == lost:
                (tmp_path / host / "away").rename(tmp_path / host / "memory")
            dist.barrier()


@pytest.mark.ranks(4)
def test_uneven_hosts_and_other_numbers_of_ranks(tmp_path):
    """Three hosts of one, two and one ranks; any one may be lost, and other ranks may load, in other cuts."""
    names, values, rank = ("a", "b", "b", "c"), drawn(), dist.get_rank()
    pair = dist.new_group([0, 3])
    with on_hosts(*names):
        folder = tmp_path / names[rank]
        tiers = [str(folder / "memory")]
        save("c", model=cut(values, (2, 2)), format=Format(max_shard_size="1MB"), tiers=Tiers(tiers, copies=2)).wait()
        dist.barrier()
        for lost in "abc":
            if names[rank] == lost and rank != 2:
                (folder / "memory").rename(folder / "away")
            dist.barrier()
            for shape in ((1, 4), (2, 2), (4, 1)):
                model = empty(shape)
                load("c", model=model, verify="full" if shape == (4, 1) else "auto", tiers=Tiers(tiers))
                assert is_same(model, values)
            if lost == "b" and rank in (0, 3):  # two new hosts go on, which have all parts between them
                whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
                load("c", model=whole, group=pair, tiers=Tiers(tiers))
                assert all(torch.equal(whole[name], values[name]) for name in values)
            dist.barrier()
            if names[rank] == lost and rank != 2:
                (folder / "away").rename(folder / "memory")
            dist.barrier()
        if rank < 3:  # two hosts at once
            shutil.rmtree(folder / "memory", ignore_errors=True)
        dist.barrier()
        with pytest.raises(CheckpointError, match="of 3 parts, part 0 is on no host that loads"):
            load("c", model=empty(), tiers=Tiers(tiers))


@pytest.mark.ranks(2)
def test_without_a_copy_a_lost_host_means_the_next_tier_and_a_broken_part_is_none(tmp_path):
    with saved_on_two_hosts(tmp_path, copies=1) as (host, tiers, values):
        model = empty()
        load("c", model=model, tiers=Tiers(tiers[:1]))
        assert is_same(model, values)
        dist.barrier()
        part = tmp_path / "b/memory/c/part-00001-of-00002"
        if host == "b":
            os.truncate(part / "model.safetensors.part", 1000)
        dist.barrier()
        for message in ("part 1 is on no host that loads.*has 1000 bytes", "part 1 is on no host that loads"):
            model = empty()
            if dist.get_rank() == 0:  # which tells of it, for all
                with pytest.warns(UserWarning, match=rf"{message}.*What is loaded is in '.*disk/c'"):
                    load("c", model=model, tiers=Tiers(tiers))
            else:
                load("c", model=model, tiers=Tiers(tiers))
            assert is_same(model, values)
            with pytest.raises(CheckpointError, match=r"none of the tiers has a whole checkpoint.*part 1 is on"):
                load("c", model=model, tiers=Tiers(tiers[:1]))
            if host == "b":
                shutil.rmtree(part, ignore_errors=True)
            dist.barrier()


@pytest.mark.ranks(2)
def test_a_later_save_of_the_same_name_and_one_whose_copies_never_came(tmp_path):
    names, values = ("a", "b"), drawn()
    with on_hosts(*names):
        host = names[dist.get_rank()]
        tiers, opened, copy = tiers_of(tmp_path, host), threading.Event(), saving.copy_on
        held = mock.patch.object(saving, "copy_on", lambda *a, **options: opened.wait(240) and copy(*a, **options))
        with held:
            handles = []
            for number in range(3):
                model = cut({name: value + number for name, value in values.items()})
                handles.append(save("c", model=model, overwrite=True, tiers=Tiers(tiers, copies=2)))
            opened.set()
            for handle in handles:
                handle.wait()
        dist.barrier()
        for kept in (tiers, tiers[1:]):
            model = empty()
            load("c", model=model, tiers=Tiers(kept))
            assert is_same(model, {name: value + 2 for name, value in values.items()})
        dist.barrier()
        with mock.patch.object(saving, "copy_on", return_value=True):  # both hosts have their part, and no more
            save("c", model=cut(values), overwrite=True, tiers=Tiers(tiers, copies=2)).wait()
        dist.barrier()
        model = empty()
        load("c", model=model, tiers=Tiers(tiers))
        assert is_same(model, values)
        dist.barrier()
        shutil.rmtree(tmp_path / "a" / "memory", ignore_errors=True)  # a host is lost before the copies came
        dist.barrier()
        model = empty()
        if dist.get_rank() == 0:
            with pytest.warns(UserWarning, match="part 0 is on no host"):
                load("c", model=model, tiers=Tiers(tiers))
        else:
            load("c", model=model, tiers=Tiers(tiers))
        assert is_same(model, {name: value + 2 for name, value in values.items()}), "of the next tier"


@pytest.mark.ranks(2)
def test_a_save_that_dies_between_two_hosts_renames_leaves_the_old_one(tmp_path):
    names, values = ("a", "b"), drawn()
    with on_hosts(*names):
        host = names[dist.get_rank()]
        tiers = tiers_of(tmp_path, host)[:1]
        save("c", model=cut(values), tiers=Tiers(tiers, copies=2)).wait()
        publish = PartStaging.publish_part

        def broken(staging):
            if host == "b":
                raise OSError(5, "the host is on fire")
            publish(staging)

        later = cut({name: value + 1 for name, value in values.items()})
        with (
            mock.patch.object(PartStaging, "publish_part", broken),
            pytest.raises(OSError, match="the host is on fire"),
        ):
            save("c", model=later, overwrite=True, tiers=Tiers(tiers, copies=2))
        dist.barrier()
        model = empty()
        load("c", model=model, tiers=Tiers(tiers))
        assert is_same(model, values)
        save("c", model=later, overwrite=True, tiers=Tiers(tiers, copies=2)).wait()
        dist.barrier()
        load("c", model=model, tiers=Tiers(tiers))
        assert is_same(model, {name: value + 1 for name, value in values.items()})
        left = sorted(path.name for path in (tmp_path / host / "memory/c").iterdir())
        assert left == ["part-00000-of-00002", "part-00001-of-00002"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharing", [Sharing.RANGES, Sharing.FILES])
def test_a_flipped_byte_in_memory_is_not_copied_on(tmp_path, sharing):
    """To a tier in which ranks write one file together, and to one in which each file has one writer."""
    names, values, sharing_of = ("a", "b"), drawn(), local.sharing_of
    with (
        on_hosts(*names),
        mock.patch.object(local, "sharing_of", lambda path: sharing if "disk" in str(path) else sharing_of(path)),
    ):
        host = names[dist.get_rank()]
        tiers = tiers_of(tmp_path, host)
        save("good", model=cut(values), format=Format(max_shard_size="2MB"), tiers=Tiers(tiers, copies=2)).wait()
        dist.barrier()
        assert verify(tmp_path / "disk/good") == []
        opened, copy = threading.Event(), saving.copy_on
        held = mock.patch.object(saving, "copy_on", lambda *a, **options: opened.wait(240) and copy(*a, **options))
        with held:
            handle = save("c", model=cut(values), tiers=Tiers(tiers, copies=2))
            if host == "b":
                path = tmp_path / "b/memory/c/part-00001-of-00002/model.safetensors.part"
                data = bytearray(path.read_bytes())
                data[-5] ^= 1
                path.write_bytes(data)
            opened.set()
            with pytest.raises(CheckpointError, match=r"block 2 in the memory of rank 1's host is not what was"):
                handle.wait()
        dist.barrier()
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["good"]
        own = f"part-0000{'ab'.index(host)}-of-00002"
        assert [path.name for path in (tmp_path / host / "memory/c").iterdir()] == [own]
        with pytest.raises(CheckpointError, match="is corrupt"):
            load("c", model=empty(), tiers=Tiers(tiers))


def spoil(part):
    """Flips a bit in each block of a part's files, or flips it back; where another part has the block, in a hole."""
    for path in part.glob("**/*.safetensors.part"):
        data = bytearray(path.read_bytes())
        for begin in range(8 + int.from_bytes(data[:8], "little"), len(data), BLOCK):
            data[begin + 3] ^= 1
        path.write_bytes(data)


def loaded(name, tiers, values, warned, **options):
    """Loads on all ranks, of which the first warns of something, or none of anything."""
    model = empty()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(name, model=model, tiers=Tiers(tiers), **options)
    texts = [str(warning.message) for warning in caught]
    if warned is None or dist.get_rank() != 0:
        assert texts == []
    else:
        assert any(re.search(warned, text) for text in texts), texts
    assert is_same(model, values)
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("verify", ["auto", storm("full")])
def test_a_wrong_byte_in_a_part_is_read_from_its_copy_and_in_both_from_the_next_tier(tmp_path, verify):
    with saved_on_two_hosts(tmp_path) as (host, tiers, values):
        dist.barrier()
        parts = {(on, n): tmp_path / on / f"memory/c/part-0000{n}-of-00002" for on in "ab" for n in (0, 1)}

        def flipped(*places):
            for on, number in places:
                if on == host:
                    spoil(parts[on, number])
            dist.barrier()

        def is_lost_in_both():
            flipped(("a", 1), ("b", 1))
            said = r"block \d of 'model.safetensors' in part-00001-of-00002 .* on host [ab].*, and there is no other"
            loaded("c", tiers, values, rf"{said}.* What is loaded is in '.*/disk/c'", verify=verify)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of blocks that are read elsewhere, until one is wrong there, too
                with pytest.raises(CorruptError, match=rf"{said}.*is corrupt: its checksum is wrong"):
                    load("c", model=empty(), verify=verify, tiers=Tiers(tiers[:1]))
            dist.barrier()
            flipped(("a", 1), ("b", 1))
            loaded("c", tiers[:1], values, None, verify=verify)

        for on, other in (("a", "b"), ("b", "a")):  # whatever a rank of this host reads is wrong
            flipped((on, 0), (on, 1))
            said = rf"block \d of 'model.safetensors' in part-0000[01]-of-00002 of '.*' is corrupt on host {on}"
            loaded("c", tiers[:1], values, rf"{said}, and read on host {other}", verify=verify)
            flipped((on, 0), (on, 1))
        is_lost_in_both()
        if host == "a":
            (tmp_path / "a/memory").rename(tmp_path / "a/away")
        dist.barrier()
        is_lost_in_both()
        if host == "b":
            path = parts["b", 0] / "model.safetensors.part"
            data = bytearray(path.read_bytes())
            data[12] ^= 1  # in the header, which the other part has, too
            path.write_bytes(data)
        dist.barrier()
        loaded("c", tiers[:1], values, r"header of .*part-00000-of-00002/model.safetensors.part is corrupt")


@pytest.mark.ranks(2)
def test_the_later_save_is_loaded_though_the_clock_was_set_back(tmp_path):
    names, values = ("a", "b"), drawn()
    with on_hosts(*names):
        tiers = tiers_of(tmp_path, names[dist.get_rank()])[:1]
        with mock.patch.object(time, "time_ns", return_value=1 << 62):
            save("c", model=cut(values), tiers=Tiers(tiers, copies=2)).wait()
        later = {name: value + 1 for name, value in values.items()}
        with mock.patch.object(saving, "copy_on", return_value=True):  # the copies of the first save are still there
            save("c", model=cut(later), overwrite=True, tiers=Tiers(tiers, copies=2)).wait()
        dist.barrier()
        loaded("c", tiers, later, None)


@pytest.mark.ranks(2)
def test_a_part_that_a_cleaner_takes_before_it_is_copied_on_is_told(tmp_path):
    names, values = ("a", "b"), drawn()
    with on_hosts(*names):
        host = names[dist.get_rank()]
        tiers, opened, copy = tiers_of(tmp_path, host), threading.Event(), saving.copy_on
        with mock.patch.object(saving, "copy_on", lambda *a, **options: opened.wait(240) and copy(*a, **options)):
            handle = save("c", model=cut(values), tiers=Tiers(tiers, copies=2))
            if host == "b":
                shutil.rmtree(tmp_path / "b/memory/c")
            opened.set()
            with pytest.raises(CheckpointError, match=r"part-00001-of-00002 on b is gone before it was copied on"):
                handle.wait()
        dist.barrier()
        with pytest.raises(CheckpointError, match="of 2 parts, part 1 is on no host that loads"):
            load("c", model=empty(), tiers=Tiers(tiers))
        save("c", model=cut(values), overwrite=True, tiers=Tiers(tiers, copies=2)).wait()
        dist.barrier()
        loaded("c", tiers[1:], values, None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("full", ["b/memory/c/.part-00000", "disk/.c"])
def test_a_tier_that_fills_up_behind_the_trainer_is_told_everywhere_and_the_others_are_whole(tmp_path, full):
    names, values, write_at = ("a", "b"), drawn(), LocalWriter.write_at

    def limited(writer, begin, view):
        if full in str(Path(f"/proc/self/fd/{writer._fd}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(writer, begin, view)

    with on_hosts(*names):
        host = names[dist.get_rank()]
        tiers = tiers_of(tmp_path, host)
        with mock.patch.object(LocalWriter, "write_at", limited):
            handle = save("c", model=cut(values), tiers=Tiers(tiers, copies=2))
            with pytest.raises(OSError, match="No space left") as caught:
                handle.wait()
        assert caught.value.errno == errno.ENOSPC
        dist.barrier()
        own, of_both = f"part-0000{names.index(host)}-of-00002", ["part-00000-of-00002", "part-00001-of-00002"]
        in_memory = sorted(path.name for path in (tmp_path / host / "memory/c").iterdir())
        assert in_memory == (of_both if full == "disk/.c" else [own])
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ([] if full == "disk/.c" else ["c"])
        loaded("c", tiers[:1], values, None)
        save("d", model=cut(values), tiers=Tiers(tiers, copies=2)).wait()  # there is room again
        dist.barrier()
        assert verify(tmp_path / "disk/d") == []


@pytest.mark.ranks(2)
def test_hosts_that_were_booted_and_parts_of_which_half_was_copied(tmp_path):
    with saved_on_two_hosts(tmp_path) as (host, tiers, values):
        dist.barrier()
        own, half = [tmp_path / host / f"memory/c/part-0000{number}-of-00002" for number in (0, 1)]
        if host == "a":  # half synced by another tool: of one part the record is missing, of one the end of a file
            (own / "par_checkpoint.part.json").unlink()
            os.truncate(half / "model.safetensors.part", 100)
        dist.barrier()
        loaded("c", tiers[:1], values, r"part-00000-of-00002/par_checkpoint.part.json is missing: .*has 100 bytes, but")
        for booted in "ab":
            if host == booted:
                shutil.rmtree(tmp_path / host / "memory")
            dist.barrier()
            loaded("c", tiers, values, None)  # of the other one's memory, and then of the disk
        with pytest.raises(CheckpointError, match=r"none of the tiers has a whole checkpoint that all ranks see: "):
            load("c", model=empty(), tiers=Tiers(tiers[:1]))


@pytest.mark.ranks(2)
def test_what_cannot_be_copied_is_refused_on_all_ranks(tmp_path):
    names, model = ("a", "b"), cut(drawn())
    memory = str(tmp_path / names[dist.get_rank()] / "memory")
    cases = [
        ({"copies": 3, "tiers": [memory]}, ValueError, r"copies is 3, but the ranks are on 2 hosts \(a, b\); give 2"),
        ({"copies": 2, "tiers": ["memory://x", memory]}, ValueError, "the first tier, of 'memory://x/c', is no folder"),
        ({"copies": 2, "tiers": [str(tmp_path / "shared")]}, ValueError, "hosts [ab] and [ab] share the first tier"),
        ({"copies": 2, "tiers": [memory], "style": "torch"}, ValueError, "style is 'torch', of which one rank writes"),
        (
            {"copies": dist.get_rank() + 1, "tiers": [memory]},
            ValueError,
            "copies is 1 on rank 0, and 2 on rank 1; give",
        ),
    ]
    with on_hosts(*names):
        for options, kind, match in cases:
            with pytest.raises(kind, match=match):
                save("c", model=model, **policies(**options))
            dist.barrier()
            assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left of it"
            dist.barrier()
        save("c", model=model, tiers=Tiers([memory], copies=1)).wait()
        with pytest.raises(FileExistsError, match="pass overwrite=True"):
            save("c", model=model, tiers=Tiers([memory], copies=1))
        (tmp_path / names[dist.get_rank()] / "memory/c/notes").write_text("mine")
        with pytest.raises(CheckpointError, match="holds what is no part of a host, such as notes"):
            save("c", model=model, overwrite=True, tiers=Tiers([memory], copies=1))


def test_copies_on_one_host(tmp_path):
    model = {"w": torch.ones(3)}
    save("c", model=model, tiers=Tiers([tmp_path / "memory", tmp_path / "disk"], copies=1)).wait()
    assert verify(tmp_path / "disk" / "c") == []
    into = {"w": torch.zeros(3)}
    load("c", model=into, tiers=Tiers([tmp_path / "memory"]))
    assert torch.equal(into["w"], model["w"])
    with pytest.raises(ValueError, match=r"copies is 2, but the ranks are on 1 host \("):
        save("d", model=model, tiers=Tiers([tmp_path], copies=2))
