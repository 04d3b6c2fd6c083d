from contextlib import ExitStack

import pytest
import torch.distributed as dist

from par_train._errors import UserError
from par_train.jobs.begin import find_start, leave_if_asked
from par_train.jobs.options import DataOptions, ModelOptions, Options
from par_train.jobs.start import _after_restart
from par_train.run.attempt import BEGUN, SAVED, has_begun, has_saved, note_of
from par_train.run.lock import lock_folder, read_note
from par_train.run.stop import Stop, StoppedEarly


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "words.txt").write_text("all the words that there are " * 40)
    data = DataOptions(folder=str(tmp_path / "text"))
    return Options(data=data, model=ModelOptions(context=16), output=str(tmp_path / "out"), overwrite=True)


def test_ranks_that_are_started_again_go_on_only_from_what_their_job_began(options, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _after_restart(options) == options
    for note, begun in (("", False), (note_of(BEGUN, "another"), False), (note_of(BEGUN), True)):
        with lock_folder(options.files) as lock:
            lock.note(note)
        assert has_begun(options.files) == begun
        chosen = _after_restart(options)
        assert (chosen.resume, chosen.overwrite) == (("auto", False) if begun else ("no", True))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert _after_restart(options) == options


def test_a_save_counts_for_its_job_alone(options):
    with lock_folder(options.files) as lock:
        lock.note(note_of(SAVED))
    assert has_saved(options.files, "mine")
    assert not has_saved(options.files, "another")


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
