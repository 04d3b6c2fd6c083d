"""The start of a job on ranks: its folder, its tiers and its data, before a model exists."""

import os
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from par_train._errors import UserError
from par_train.jobs.begin import leave_if_asked, read_start
from par_train.jobs.hooks import FLAGS
from par_train.jobs.job_run import train
from par_train.jobs.options import CheckpointOptions, DataOptions, ModelOptions, Options, TrainOptions
from par_train.run.files import RunFiles
from par_train.run.lock import BEGUN, SAVED, has_begun, lock_folder, note_of, read_note
from par_train.run.opening import FolderOpening
from par_train.run.policies import CheckpointPolicy, LoggingPolicy, MonitoringPolicy
from par_train.run.stop import Stop, StoppedEarly


def options(folder, **changes):
    data = DataOptions(folder=str(folder / "text"))
    sizes = ModelOptions(width=8, layers=1, heads=2, context=16)
    train = TrainOptions(steps=2, batch_size=6, warmup_steps=1)
    made = {"data": data, "model": sizes, "train": train, "output": str(folder / "out"), "device": "cpu"}
    return Options(**{**made, **changes})


def opening_of(files, *, resume=None, overwrite=False):
    policies = (CheckpointPolicy(), LoggingPolicy(), MonitoringPolicy())
    master = not dist.is_initialized() or dist.get_rank() == 0
    return FolderOpening(files, resume=resume, overwrite=overwrite, policies=policies, is_master=master, spelling=FLAGS)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "words.txt").write_text("all the words that there are " * 40)
    return tmp_path


@pytest.fixture
def occupied(folder):
    """A folder whose output another run, which is pytest, is writing."""
    files = RunFiles(folder / "out")
    files.folder.mkdir()
    with lock_folder(files):
        yield folder


@pytest.mark.ranks(3)
def test_folder_of_another_run_is_refused_on_all_ranks(occupied):
    for changes in ({}, {"overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=r"out' is being written by another run \(process .*name another folder"):
            train(options(occupied, **changes), Stop())


@pytest.mark.ranks(3)
def test_folder_is_locked_until_the_run_ends(folder):
    for _ in range(2):
        with ExitStack() as held:
            opening_of(RunFiles(folder / "out")).take(held)
            with pytest.raises(UserError, match="another run"), lock_folder(RunFiles(folder / "out")):
                pass
            dist.barrier()  # every rank has looked
        dist.barrier()


@pytest.mark.ranks(3)
def test_text_that_one_rank_lacks_is_an_error_on_all(folder):
    chosen = options(folder / "elsewhere" if dist.get_rank() == 1 else folder)
    with pytest.raises(UserError, match=r"rank 1: data\.folder: '.+elsewhere/text'"):
        read_start(chosen, Stop())


@pytest.mark.ranks(2)
def test_tiers_that_cannot_be_are_refused_on_every_rank_before_training_begins(folder):
    (folder / "file").write_text("")
    for tiers, copies, words in (
        (("near", "out", "out/../out"), 0, r"checkpoint\.tiers: .*all different|is another one, or lies in it"),
        (("near", "near/below"), 0, r"'.*near.*' is another one, or lies in it; give folders"),
        (("near", "file/below"), 0, "the tier '.*file/below/checkpoints' cannot be written on .*: Not a directory"),
        (("near", "out"), 2, r"copies is 2, but the ranks are on 1 host \("),
    ):
        chosen = CheckpointOptions(tiers=tuple(str(folder / tier) for tier in tiers), copies=copies)
        with pytest.raises(UserError, match=words):
            train(options(folder, checkpoint=chosen), Stop())
        dist.barrier()
    assert not (folder / "near").exists()


@pytest.mark.ranks(2)
def test_ranks_that_are_started_again_go_on_only_from_what_their_job_began(folder):
    """Also where a rank was never started before, as those of a node that has taken the place of a lost one."""
    rank, files = dist.get_rank(), RunFiles(folder / "out")
    os.environ["TORCHELASTIC_RUN_ID"] = "mine"
    for restarts in (["0", "0"], ["1", "1"], ["0", "1"], ["1", "0"]):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = restarts[rank]
        for note, begun in (("", False), (note_of(BEGUN, "another"), False), (note_of(BEGUN), True)):
            dist.barrier()
            if rank == 0:
                with lock_folder(files) as lock:
                    lock.note(note)
            dist.barrier()
            assert has_begun(files) == begun
            opening = opening_of(files, overwrite=True)
            with ExitStack() as held:
                opening.take(held)
            goes_on = begun and "1" in restarts
            assert (opening._found.resume, opening._found.overwrite) == (("auto", False) if goes_on else (None, True))


def test_a_save_counts_for_its_job_alone(folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    files = RunFiles(folder / "out")
    with lock_folder(files) as lock:
        lock.note(note_of(SAVED))
    assert read_note(files) == note_of(SAVED, "mine") != note_of(SAVED, "another")


@pytest.mark.ranks(1)
def test_a_start_forgets_what_an_earlier_job_of_its_name_noted(folder, monkeypatch):
    files = RunFiles(folder / "out")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    for restarts, kept in (("1", True), ("0", False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        with lock_folder(files) as lock:
            lock.note(note_of(SAVED))
        with ExitStack() as held:
            opening_of(files).take(held)
        assert (read_note(files) == note_of(SAVED)) == kept


@pytest.mark.ranks(3)
def test_all_ranks_leave_before_training_if_one_was_asked():
    stop = Stop()
    leave_if_asked(stop)
    if dist.get_rank() == 1:
        stop.ask(15)
    with pytest.raises(StoppedEarly, match=r"SIGTERM: stopped before training began") as raised:
        leave_if_asked(stop)
    assert raised.value.number == 15
