"""Tiers: the first blocks, the others follow by themselves, each is whole, and the nearest is loaded."""

import shutil
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import CheckpointError, Format, Tiers, Transfer, _copy, load, read_tensor, save, verify
from par_checkpoint import _save as saving

from .helpers import make_model, train


@pytest.fixture
def gate(monkeypatch):
    """Holds copies to further tiers until it is set."""
    opened, copy = threading.Event(), saving.copy_checkpoint
    monkeypatch.setattr(saving, "copy_checkpoint", lambda *args, **options: opened.wait(240) and copy(*args, **options))
    yield opened
    opened.set()


def tiers_in(folder):
    return [str(folder / name) for name in ("memory", "disk")] + [f"memory://{folder.name}/store"]


def local_tiers(folder):
    return [str(folder / name) for name in ("memory", "disk", "share")]


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("style", ["huggingface", "torch"])
def test_all_tiers_come_to_hold_the_same_and_each_by_itself(tmp_path, async_, style):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    model.register_buffer("large", torch.randn(3 << 20))  # of several blocks
    tiers, extra = tiers_in(tmp_path), {"rng": torch.get_rng_state()}
    handle = save(
        "run/step-1",
        model=model,
        optimizer=optimizer,
        extra=extra,
        async_=async_,
        step=1,
        format=Format(style=style, max_shard_size="5MB", config={"a": 1}),
        tiers=Tiers(tiers),
    )
    assert handle.path == f"{tiers[0]}/run/step-1"
    handle.wait()
    for tier in tiers:
        assert verify(f"{tier}/run/step-1") == []
        other = make_model(1)
        other.register_buffer("large", torch.zeros(3 << 20))
        again = torch.optim.AdamW(other.parameters())
        report = load(f"{tier}/run/step-1", model=other, optimizer=again)
        assert report.step == 1
        assert torch.equal(report.extra["rng"], extra["rng"])
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_", [False, True])
def test_a_step_waits_for_the_first_tier_alone_and_so_does_the_next_save(tmp_path, async_):
    tiers, model = local_tiers(tmp_path), {"w": torch.arange(3.0 * (1 << 20))}
    opened, copy = threading.Event(), saving.copy_checkpoint
    with mock.patch.object(saving, "copy_checkpoint", lambda *a, **options: opened.wait(240) and copy(*a, **options)):
        handles = []
        for step in range(3):
            model["w"].fill_(step)
            handles.append(
                save(f"{step}", model=model, async_=async_, transfer=Transfer(pending="wait"), tiers=Tiers(tiers))
            )
        into = {"w": torch.zeros(3 << 20)}
        load("2", model=into, tiers=Tiers(tiers))  # waits until the first tier has it
        assert into["w"][5] == 2
        dist.barrier()
        assert not any(handle.done() for handle in handles)
        assert not (tmp_path / "disk").exists()
        opened.set()
        handles[-1].wait()
        assert all(handle.done() for handle in handles)  # in order
    dist.barrier()
    for step in range(3):
        for tier in tiers:
            assert verify(f"{tier}/{step}") == []
            assert read_tensor(f"{tier}/{step}", "w")[7] == step


@pytest.mark.ranks(2)
def test_what_is_loaded_is_the_nearest_whole_one_that_all_ranks_see(tmp_path):
    tiers, model, rank = local_tiers(tmp_path), {"w": torch.ones(5)}, dist.get_rank()
    save("c", model=model, tiers=Tiers(tiers)).wait()
    save("c", model={"w": torch.full((5,), 7.0)}, overwrite=True, tiers=Tiers([tiers[0]])).wait()
    dist.barrier()
    load("c", model=model, tiers=Tiers(tiers))
    assert model["w"][0] == 7
    dist.barrier()
    if rank == 0:
        (tmp_path / "memory" / "c" / "model.safetensors").unlink()
    dist.barrier()
    load("c", model=model, tiers=Tiers(tiers))
    assert model["w"][0] == 1
    mine = [str(tmp_path / f"memory-{rank}"), *tiers[1:]]  # a folder that only one rank has any longer
    shutil.copytree(tmp_path / "disk", mine[0])
    if rank == 1:
        shutil.rmtree(mine[0])
    model["w"].zero_()
    load("c", model=model, tiers=Tiers(mine))
    assert model["w"][0] == 1
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"none of the tiers has a whole checkpoint that all ranks see: .*memory"):
        load("nothing", model=model, tiers=Tiers(tiers))


@pytest.mark.ranks(2)
def test_a_tier_that_fails_is_told_on_all_ranks_and_the_others_are_whole(tmp_path):
    tiers, model = local_tiers(tmp_path), {"w": torch.ones(3 << 20)}
    crc = _copy.crc32c

    def broken(data, *args):
        if dist.get_rank() == 1:
            raise OSError(5, "the disk is on fire")
        return crc(data, *args)

    with mock.patch.object(_copy, "crc32c", broken):
        handle = save("c", model=model, tiers=Tiers(tiers))
        while not handle.done():
            pass
    if dist.get_rank() == 0:
        with pytest.raises(OSError, match="the disk is on fire"):
            handle.wait()
    with pytest.raises(OSError, match="the disk is on fire"):  # on all ranks, as one of them has not heard of it
        save("d", model=model, tiers=Tiers(tiers))
    save("d", model=model, tiers=Tiers(tiers)).wait()
    dist.barrier()
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == ["c", "d"]
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["d"]  # nothing is left of the other


def test_a_flipped_byte_is_not_copied_on(tmp_path, gate):
    tiers = local_tiers(tmp_path)
    handle = save("c", model={"w": torch.ones(3 << 20)}, tiers=Tiers(tiers))
    path = tmp_path / "memory" / "c" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    gate.set()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not what was written, and was not copied"):
        handle.wait()
    assert list((tmp_path / "disk").iterdir()) == []


def test_what_a_cleaner_takes_before_it_is_copied_on_is_told(tmp_path, gate):
    tiers = local_tiers(tmp_path)
    handle = save("c", model={"w": torch.ones(3)}, tiers=Tiers(tiers))
    shutil.rmtree(tmp_path / "memory" / "c")
    gate.set()
    with pytest.raises(CheckpointError, match=r"par_checkpoint\.json is missing"):
        handle.wait()
    with pytest.raises(CheckpointError, match="none of the tiers has a whole checkpoint"):
        load("c", model={"w": torch.ones(3)}, tiers=Tiers(tiers))


@pytest.mark.ranks(2)
def test_a_tier_that_turns_out_to_be_corrupt_is_passed_over_with_a_warning(tmp_path):
    tiers, rank = local_tiers(tmp_path), dist.get_rank()
    model = {"w": torch.arange(3.0 * (1 << 20)), "half": torch.ones(5)}
    save("c", model=model, tiers=Tiers(tiers)).wait()
    dist.barrier()
    if rank == 1:
        for tier, at in (("memory", -3), ("disk", 12)):  # in the data, and in the header
            path = tmp_path / tier / "c" / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)
    dist.barrier()
    into = {"w": torch.zeros(3 << 20), "half": torch.zeros(5)}
    if rank == 0:
        with pytest.warns(UserWarning, match="What is loaded is in") as caught:
            load("c", model=into, tiers=Tiers(tiers))
        first, second = (str(warning.message) for warning in caught)
        assert "block 3 of" in first
        assert first.endswith(f"What is loaded is in '{tiers[1]}/c'")
        assert second.endswith(f"What is loaded is in '{tiers[2]}/c'")
        assert "undefined" not in first + second
    else:
        load("c", model=into, tiers=Tiers(tiers))
    assert all(torch.equal(into[name], value) for name, value in model.items())
    with pytest.raises(CheckpointError, match=r"block 3 of .*is now undefined"):
        load("c", model=into, tiers=Tiers(tiers[:1]))


def test_a_later_save_of_the_same_name_takes_the_place_of_one_that_is_still_to_be_copied(tmp_path, gate):
    tiers = local_tiers(tmp_path)
    handles = [
        save("c", model={"w": torch.full((3,), float(value))}, overwrite=True, tiers=Tiers(tiers)) for value in range(3)
    ]
    gate.set()
    for handle in handles:
        handle.wait()
    assert all(read_tensor(f"{tier}/c", "w")[0] == 2 for tier in tiers)


@pytest.mark.parametrize(
    ("path", "tiers", "kind", "match"),
    [
        ("c", "/dev/shm/ck", TypeError, "give a list of folders"),
        ("c", [], ValueError, "give one or more folders"),
        ("c", ["a", "a/"], ValueError, "all different"),
        ("c", ["a", "./b/../a"], ValueError, "of which 'a' is another one, or lies in it"),
        ("c", ["a/b", "a"], ValueError, "'a/b' is another one, or lies in it"),
        ("../c", ["a", "b"], ValueError, "the checkpoint's name in each of them"),
        ("/c", ["a", "b"], ValueError, "the checkpoint's name in each of them"),
    ],
)
def test_what_are_no_tiers_is_refused(path, tiers, kind, match):
    with pytest.raises(kind, match=match):
        save(path, model={"w": torch.ones(3)}, tiers=Tiers(tiers))
    with pytest.raises(kind, match=match):
        load(path, model={"w": torch.ones(3)}, tiers=Tiers(tiers))
