"""A rank of a real job is killed while it saves: the old or the new is there whole, and what is left goes on."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import par_checkpoint as pc
from par_checkpoint import _save
from par_checkpoint.storage.local import LocalFolder
from par_checkpoint.transfer.exchange import PieceExchange
from par_groups import Box, Sharding

from .helpers import policies

OLD, NEW, NEXT = 1, 2, 3
FRESH = ["swept", "created", "made", "synced-staging", "renamed-new", "synced"]
EXCHANGED = ["made", "linked", "synced-staging", "exchanged", "synced", "removed"]
RENAMED = ["linked", "renamed-old", "renamed-new", "synced", "retired", "removed"]
OPTIONS = {"timeout": 1000, "max_shard_size": "300KB"}


def state(seed):
    """A model of several files, and an optimizer of more, all of whose values tell the seed and their place."""
    values = (torch.arange(1 << 16).view(256, 256) + seed * each for each in (1.0, 2.0, 3.0))
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in zip("abc", values, strict=True)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for parameter in model.values() if seed else ():
        slots = {"exp_avg": parameter.detach() + 1, "exp_avg_sq": parameter.detach() + 2}
        optimizer.state[parameter] = {"step": torch.tensor(float(seed)), **slots}
    return model, optimizer


def saved(path, seed, **options):
    model, optimizer = state(seed)
    chosen = policies(config={"seed": seed}, **OPTIONS, **options)
    return pc.save(path, model=model, optimizer=optimizer, extra=seed, **chosen)


def restored(path, group):
    """The seed of a checkpoint all of whose values, and whose lr, are of that seed."""
    model, optimizer = state(0)
    seed = pc.load(path, model=model, optimizer=optimizer, group=group, verify="full").extra
    wanted, of_it = state(seed)
    assert optimizer.param_groups[0]["lr"] == of_it.param_groups[0]["lr"]
    for mine, its in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert optimizer.state[mine].keys() == of_it.state[its].keys()
        assert all(torch.equal(value, of_it.state[its][slot]) for slot, value in optimizer.state[mine].items())
    return seed


def pids():
    """The processes of all ranks."""
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def wait_for_the_end_of(victim):
    """Until there is no such process."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(victim, 0)
            time.sleep(0.001)


def check_after(root, allowed, victim):
    """What the job that is left, or the one that is started anew, must find; it then saves once more."""
    assert not [each for each in open_files() if str(root) in each], "a removed file that is open still takes room"
    wait_for_the_end_of(victim)  # it loses its connections first, and its locks a moment later
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    path = root / "step-00000001"
    found = pc.latest(root, group=alone)
    if found is None:
        assert None in allowed
        assert not path.exists()
    else:
        assert found == str(path)
        assert pc.verify(path) == []
        assert restored(path, alone) in allowed
    saved(path, NEXT, overwrite=True, group=alone)
    assert restored(path, alone) == NEXT
    assert [each.name for each in root.iterdir()] == [path.name], "what the dead save left is gone"
    return found


def open_files():
    """The paths of all files that this process has open, where the system tells."""
    paths = []
    for each in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            paths.append(str(each.readlink()))
    return paths


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def folders(at, *, exchange):
    """What opens folders of which one kills this process, or not, after a step."""
    return mock.patch.object(
        _save, "open_folder", lambda path: LocalFolder(os.fspath(path), at=at, exchange=exchange, patience=60)
    )


def survive(save):
    """The save of a rank whose peer dies: it is done, or it raises, and waits for no timeout."""
    try:
        save()
    except RuntimeError:
        failed = True
    else:
        failed = False
    return failed


def every(steps, usual=None):
    """Each step with `async_` on and off, in storms; by default some, on and off in turn.

    What a kill leaves at every step, in every kind of folder, is tested with single processes in test_commit.
    """
    usual, found = usual or steps, []
    for step in steps:
        for async_ in (False, True):
            rare = step not in usual or async_ != bool(usual.index(step) % 2)
            found.append(pytest.param(step, async_, marks=[pytest.mark.storm] if rare else []))
    return found


def dies_at(step, root, before, *, exchange, async_=False):
    """Rank 0, which commits, dies after a step; rank 1 sees what is there then."""
    path, victim = root / "step-00000001", pids()[0]
    if before is not None:
        saved(path, before)

    def at(reached):
        if reached == step and dist.get_rank() == 0:
            die()

    with folders(at, exchange=exchange):
        failed = survive(lambda: saved(path, NEW, overwrite=before is not None, async_=async_).wait())
    assert dist.get_rank() == 1, f"there is no step {step}"
    assert failed
    return check_after(root, (before, NEW), victim)


@pytest.mark.parametrize(("step", "async_"), every(FRESH, usual=["swept", "made", "synced-staging", "renamed-new"]))
@pytest.mark.ranks(2, dies=(0,))
def test_the_committing_rank_dies_in_a_first_save(tmp_path, step, async_):
    found = dies_at(step, tmp_path, None, exchange=True, async_=async_)
    assert (found is not None) == (step in ("renamed-new", "synced"))


@pytest.mark.parametrize(("step", "async_"), every(EXCHANGED, usual=["made", "synced-staging", "exchanged", "removed"]))
@pytest.mark.ranks(2, dies=(0,))
def test_the_committing_rank_dies_while_it_exchanges_old_and_new(tmp_path, step, async_):
    dies_at(step, tmp_path, OLD, exchange=True, async_=async_)


@pytest.mark.parametrize(("step", "async_"), every(RENAMED, usual=["renamed-old", "renamed-new", "removed"]))
@pytest.mark.ranks(2, dies=(0,))
def test_the_committing_rank_dies_where_folders_cannot_be_exchanged(tmp_path, step, async_):
    dies_at(step, tmp_path, OLD, exchange=False, async_=async_)


@pytest.mark.parametrize(("step", "async_"), every(["made", "synced-staging", "exchanged"]))
@pytest.mark.ranks(2, dies=(1,))
def test_the_other_rank_dies_and_the_committing_one_cleans_up(tmp_path, step, async_):
    root, now = tmp_path / "run", tmp_path / "now"
    path, victim = root / "step-00000001", pids()[1]
    saved(path, OLD)

    def at(reached):
        if reached == step:
            now.touch()
            wait_for_the_end_of(victim)
            # A send at the moment when gloo hears of the end may miss it, and then waits for the whole timeout.
            time.sleep(0.5)

    def wait_and_die():
        while not now.exists():
            time.sleep(0.001)
        die()

    if dist.get_rank() == 1:
        threading.Thread(target=wait_and_die, daemon=True).start()
    with folders(at, exchange=True):
        assert survive(lambda: saved(path, NEW, overwrite=True, async_=async_).wait())
    assert dist.get_rank() == 0
    assert [each.name for each in root.iterdir()] == [path.name], "the rank that lives has removed the staging"
    check_after(root, (OLD if step == "made" else NEW,), victim)


@pytest.mark.ranks(2, dies=(1,))
def test_a_rank_dies_while_it_sends_its_columns(tmp_path):
    root, victim = tmp_path / "run", pids()[1]
    path, rank = root / "step-00000001", dist.get_rank()
    cut = Sharding((256, 256), (Box((0, 128 * rank), (256, 128), 0, (128, 1), (rank,)),))
    run, rounds = PieceExchange.run, []

    def die_in_the_third(*args, **kinds):
        rounds.append(1)
        if len(rounds) == 3 and rank == 1:
            die()
        run(*args, **kinds)

    saved(path, OLD)
    columns = {name: torch.ones(256, 128) for name in "abcdefgh"}
    chosen = policies(layout=dict.fromkeys(columns, cut), budget="16MB", **OPTIONS)
    with mock.patch.object(PieceExchange, "run", die_in_the_third), pytest.raises(RuntimeError):
        pc.save(path, model=columns, overwrite=True, **chosen)
    assert len(rounds) == 3
    assert [each.name for each in root.iterdir()] == [path.name]
    check_after(root, (OLD,), victim)


def dies_in_time(tmp_path, mode, number, victim):
    """One rank dies at some time of a save, as long as the one before took."""
    async_, overwrite = mode == "async", mode == "overwrite"
    root = tmp_path / "run"
    path, process = root / "step-00000001", pids()[victim]
    saved(tmp_path / "first", OLD, async_=async_).wait()  # it connects, plans and allocates
    if overwrite:
        saved(path, OLD)
    copy = ("blocking", "background")[number % 2]
    begin = time.monotonic()
    saved(tmp_path / "second", OLD, async_=async_, copy=copy).wait()
    moment = (time.monotonic() - begin) * random.Random(f"{mode} {number}").random()
    if dist.get_rank() == victim:
        threading.Timer(moment, die).start()
    survive(lambda: saved(path, NEW, overwrite=overwrite, async_=async_, copy=copy).wait())
    if dist.get_rank() == victim:
        die()
    check_after(root, (OLD if overwrite else None, NEW), process)


@pytest.mark.storm
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("mode", ["save", "async", "overwrite"])
@pytest.mark.ranks(2, dies=(0,))
def test_the_committing_rank_dies_at_any_time(tmp_path, mode, number):
    dies_in_time(tmp_path, mode, number, victim=0)


@pytest.mark.storm
@pytest.mark.parametrize("number", range(10, 20))
@pytest.mark.parametrize("mode", ["save", "async", "overwrite"])
@pytest.mark.ranks(2, dies=(1,))
def test_the_other_rank_dies_at_any_time(tmp_path, mode, number):
    dies_in_time(tmp_path, mode, number, victim=1)
