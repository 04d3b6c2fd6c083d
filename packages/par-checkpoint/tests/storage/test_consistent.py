"""Readers of a checkpoint that is replaced while they read: the old or the new, whole."""

import contextlib
import itertools
import time
import uuid
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import par_checkpoint as pc
from par_checkpoint import CheckpointError, CorruptError, ReplacedError, _apply, _load
from par_checkpoint.storage.consistent import read_consistently
from par_checkpoint.storage.folder import open_folder

NAMES, SHAPE = "abcdef", (300, 123)


def weights(seed):
    return {name: torch.full(SHAPE, float(seed)) for name in NAMES}


def save(path, seed, style="huggingface", **options):
    files = pc.Format(style=style, max_shard_size="200KB")
    pc.save(path, model=weights(seed), extra=seed, overwrite=True, format=files, **options)


def seed_of(path, local=None, **options):
    """The seed that all tensors and the extra of a load tell."""
    local = local or weights(-1)
    report = pc.load(path, model=local, **options)
    found = {float(value) for each in local.values() for value in getattr(each, "_local_tensor", each).unique()}
    assert found == {float(report.extra)}
    return report.extra


def alone():
    """A group of this rank."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@pytest.mark.storm
@pytest.mark.ranks(3)
def test_a_reader_gets_one_checkpoint_while_processes_replace_it(tmp_path):
    group = alone()
    for number, (scheme, style, count) in enumerate(
        (("", "huggingface", 1), ("", "huggingface", 2), ("", "torch", 2), ("file://", "huggingface", 1))
    ):
        path, done = f"{scheme}{tmp_path}/{number}/step-00000001", tmp_path / f"done{number}"
        if dist.get_rank() == 0:
            save(path, 0, group=group, style=style)
        dist.barrier()
        if dist.get_rank() == 0:
            check_reads(path, group)
            done.touch()
        elif dist.get_rank() <= count:
            save_until(done.exists, path, group, style)
        dist.barrier()


def check_reads(path, group):
    """Every way of reading gives one checkpoint, until several were seen."""
    seen, times, replaced = set(), 0, 0
    while len(seen) < 8:
        for verify in ("auto", "off", "full"):
            times += 1
            try:
                seen.add(seed_of(path, verify=verify, group=group))
                assert pc.verify(path) == []
                assert pc.inspect(path).extra >= min(seen)
                assert len(pc.read_tensor(path, "c").unique()) == 1
                assert pc.latest(path.removesuffix("/step-00000001"), group=group) == path
            except ReplacedError:
                replaced += 1
    assert replaced < times / 2


def save_until(done, path, group, style):
    """Goes on replacing a checkpoint."""
    for seed in itertools.count(dist.get_rank(), 2):
        if done():
            return
        with contextlib.suppress(pc.CheckpointError, OSError):  # another saver was first
            save(path, seed, group=group, style=style)
        time.sleep(0.01)


@contextlib.contextmanager
def meanwhile(module, name, act):
    """Does something, on rank 0, each time before a function of a module is called."""
    real = getattr(module, name)

    def late(*arguments, **keywords):
        act()
        if dist.is_initialized():
            dist.barrier()
        return real(*arguments, **keywords)

    with mock.patch.object(module, name, late):
        yield


def replaced(path, seeds, *, rank=0, **options):
    """A function that replaces a checkpoint with the next seed, while there are any."""
    seeds = iter(seeds)

    def replace():
        seed = next(seeds, None)
        if rank == 0 and seed is not None:
            save(path, seed, group=alone() if dist.is_initialized() else None, **options)

    return replace


@pytest.fixture(params=["local", "memory"])
def path(request, tmp_path):
    return f"memory://{uuid.uuid4().hex}/c" if request.param == "memory" else str(tmp_path / "c")


@pytest.mark.parametrize("verify", ["auto", "full", "off"])
@pytest.mark.parametrize("style", ["huggingface", "torch"])
def test_what_is_replaced_between_its_list_and_its_data_is_loaded_anew(path, style, verify):
    save(path, 0, style=style)
    with meanwhile(_load, "fill_", replaced(path, [1, 2], style=style)):
        assert seed_of(path, verify=verify) == 2


def test_a_reader_gives_up_when_it_is_always_too_late(path):
    save(path, 0)
    with (
        meanwhile(_load, "fill_", replaced(path, range(1, 9))),
        pytest.raises(ReplacedError, match=r"replaced while it was read, 5 times .*now undefined"),
    ):
        seed_of(path)
    assert seed_of(path) == 5


def test_an_error_after_a_replacement_tells_of_it(path):
    """Parameters hold some of the old one by then, although the new one alone would have changed nothing."""
    save(path, 0)

    def replace():
        pc.save(path, model={"other": torch.zeros(3)}, overwrite=True)

    with (
        meanwhile(_load, "fill_", replace),
        pytest.raises(ReplacedError, match=r"(?s)was replaced .*now undefined.*missing in the checkpoint: a"),
    ):
        seed_of(path)


def test_an_error_of_a_checkpoint_that_stays_is_raised_as_it_is(tmp_path):
    save(tmp_path / "c", 0)
    file = next((tmp_path / "c").glob("model-00002-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptError, match="checksum is wrong"):
        seed_of(tmp_path / "c")
    with pytest.raises(CheckpointError, match="there is no folder"):
        seed_of(tmp_path / "d")


def test_verified_data_needs_no_second_look(path):
    """All of it is of one checkpoint, though another is there by now."""
    save(path, 0)
    with meanwhile(_apply, "written_", replaced(path, [1])):
        assert seed_of(path) == 0
    with meanwhile(_apply, "written_", replaced(path, [2])):
        assert seed_of(path, verify="off") == 2


def test_other_errors_are_not_tried_again(path):
    calls = []

    def act():
        calls.append(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        read_consistently(open_folder(path), act)
    assert len(calls) == 1


def test_the_version_changes_with_every_save_of_the_same(path):
    folder, seen = open_folder(path), set()
    assert folder.version() is None
    for _ in range(5):
        save(path, 0)
        folder.recover()
        assert folder.version() == folder.version()
        seen.add(folder.version())
    assert len(seen) == 5


@pytest.mark.ranks(2)
def test_all_ranks_load_the_new_one_or_none_does(tmp_path):
    path, rank = str(tmp_path / "c"), dist.get_rank()
    if rank == 0:
        save(path, 0, group=alone())
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    local = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in weights(-1).items()}
    for scheme in ("", "file://"):
        url = scheme + path
        for verify in ("auto", "off", "full"):
            with meanwhile(_load, "fill_", replaced(url, [1, 2, 3], rank=rank)):
                assert seed_of(url, local, verify=verify) == 3
        with (
            meanwhile(_load, "fill_", replaced(url, range(9), rank=rank)),
            pytest.raises(ReplacedError, match="5 times"),
        ):
            seed_of(url, local)
        dist.barrier()
