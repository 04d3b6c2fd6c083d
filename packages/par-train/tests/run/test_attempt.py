import os
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from par_train._errors import UserError
from par_train.jobs.begin import after_restart, find_start, leave_if_asked
from par_train.jobs.options import DataOptions, ModelOptions, Options
from par_train.run.lock import BEGUN, SAVED, has_begun, has_come_to, lock_folder, note_of, read_note
from par_train.run.stop import Stop, StoppedEarly


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "words.txt").write_text("all the words that there are " * 40)
    data = DataOptions(folder=str(tmp_path / "text"))
    return Options(data=data, model=ModelOptions(context=16), output=str(tmp_path / "out"), overwrite=True)


@pytest.mark.ranks(2)
def test_ranks_that_are_started_again_go_on_only_from_what_their_job_began(options):
    """Also where a rank was never started before, as those of a node that has taken the place of a lost one."""
    rank = dist.get_rank()
    os.environ["TORCHELASTIC_RUN_ID"] = "mine"
    for restarts in (["0", "0"], ["1", "1"], ["0", "1"], ["1", "0"]):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = restarts[rank]
        for note, begun in (("", False), (note_of(BEGUN, "another"), False), (note_of(BEGUN), True)):
            dist.barrier()
            if rank == 0:
                with lock_folder(options.files) as lock:
                    lock.note(note)
            dist.barrier()
            assert has_begun(options.files) == begun
            chosen = after_restart(options)
            goes_on = begun and "1" in restarts
            assert (chosen.resume, chosen.overwrite) == (("auto", False) if goes_on else ("no", True))


def test_a_save_counts_for_its_job_alone(options):
    with lock_folder(options.files) as lock:
        lock.note(note_of(SAVED))
    assert has_come_to(SAVED, options.files, "mine")
    assert not has_come_to(SAVED, options.files, "another")


def test_a_job_that_is_refused_forgets_what_an_earlier_one_of_its_name_noted(options, monkeypatch):
    options = Options(data=options.data, model=options.model, output=options.output)
    for restarts, kept in (("1", True), ("0", False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        with lock_folder(options.files) as lock:
            lock.note(note_of(SAVED))
        options.files.metrics.write_text("{}\n")
        refuse(options)
        assert (read_note(options.files) == note_of(SAVED)) == kept


def refuse(options):
    with pytest.MonkeyPatch.context() as patch, ExitStack() as held:
        patch.setattr(dist, "get_rank", lambda: 0)
        patch.setattr("par_train.jobs.begin.agree", lambda problem, said, group: {0: said})
        with pytest.raises(UserError, match="holds a run already"):
            find_start(options, Stop(), held)


@pytest.mark.ranks(3)
def test_all_ranks_leave_before_training_if_one_was_asked():
    stop = Stop()
    leave_if_asked(stop)
    if dist.get_rank() == 1:
        stop.ask(15)
    with pytest.raises(StoppedEarly, match=r"SIGTERM: stopped before training began") as raised:
        leave_if_asked(stop)
    assert raised.value.number == 15
