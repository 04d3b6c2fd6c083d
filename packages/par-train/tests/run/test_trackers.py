"""Trackers by name: imported only where they are asked for; what cannot be is said before anything is changed."""

import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from par_train import LoggingPolicy, Run, Strategy
from par_train.run.files import RunFiles
from par_train.run.trackers import check_trackers, make_trackers

WANDB = """
    class _Run:
        id = "abc"
        def log(self, values, step): calls.append(("log", values, step))
        def finish(self): calls.append(("finish",))
    calls = []
    def init(**options):
        calls.append(("init", options))
        return _Run()
"""
MLFLOW = """
    from types import ModuleType, SimpleNamespace
    calls = []
    def start_run(**options):
        calls.append(("start", options))
        return SimpleNamespace(info=SimpleNamespace(run_id="xyz"))
    def log_params(params): calls.append(("params", params))
    def log_metrics(values, step): calls.append(("log", values, step))
    def end_run(): calls.append(("end",))
"""


@pytest.fixture
def services(tmp_path, monkeypatch):
    """Modules that stand for the services' own, and note what they are told."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "wandb.py").write_text(textwrap.dedent(WANDB))
    (folder / "mlflow.py").write_text(textwrap.dedent(MLFLOW))
    monkeypatch.syspath_prepend(str(folder))
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def follow(trackers, folder, lines=((1, 2.5), (2, 2.0)), **keywords):
    made = make_trackers(trackers, folder, {"precision": "fp32"}, **keywords)
    for step, loss in lines:
        for tracker in made:
            tracker.log({"loss": loss}, step)
    for tracker in made:
        tracker.close()


@pytest.mark.usefixtures("services")
def test_services_get_lines_under_one_id_also_when_a_run_goes_on(tmp_path):
    for _ in range(2):
        follow(["wandb", "mlflow"], tmp_path)
    calls = sys.modules["wandb"].calls
    first, again = (call[1] for call in calls if call[0] == "init")
    assert (first["id"], again["id"]) == (None, "abc")
    assert first["config"] == {"precision": "fp32"}
    assert calls[1:4] == [("log", {"loss": 2.5}, 1), ("log", {"loss": 2.0}, 2), ("finish",)]
    calls = sys.modules["mlflow"].calls
    assert [call[1]["run_id"] for call in calls if call[0] == "start"] == [None, "xyz"]
    assert [call for call in calls if call[0] == "params"] == [("params", {"precision": "fp32"})]
    assert calls[-1] == ("end",)


@pytest.mark.usefixtures("services")
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_services_of_a_replaced_run_begin_a_new_one(tmp_path, name):
    follow([name], tmp_path)
    follow([name], tmp_path, replaces=True)
    begun = [call[1] for call in sys.modules[name].calls if call[0] in ("init", "start")]
    assert [call.get("id", call.get("run_id")) for call in begun] == [None, None]
    make_trackers([], tmp_path, {}, replaces=True)  # a run without trackers: a later one must not continue the old one
    assert not list(tmp_path.glob("*-id.txt"))
    follow([name], tmp_path)
    RunFiles(tmp_path).clear()
    assert not list(tmp_path.glob("*-id.txt"))


@pytest.mark.usefixtures("services")
def test_trackers_that_have_begun_are_closed_if_one_fails(tmp_path, monkeypatch):
    sys.modules.pop("mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    with pytest.raises(AttributeError):
        make_trackers(["wandb", "mlflow"], tmp_path, {})
    assert sys.modules["wandb"].calls[-1] == ("finish",)


class Writer:
    """Stands for TensorBoard's: notes what it is told."""

    made = ()

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.scalars, self.texts, self.closed = folder, purge_step, [], [], False
        folder.mkdir(exist_ok=True)
        (folder / f"events.{len(self.made)}").touch()
        Writer.made = (*self.made, self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def close(self):
        self.closed = True


def test_tensorboard_goes_on_where_the_lines_end_and_shows_texts(tmp_path, monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Writer, "made", ())
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    follow(["tensorboard"], tmp_path)
    first = Writer.made[0]
    assert (first.folder, first.purge_step, first.closed) == (folder, None, True)
    assert first.scalars == [("loss", 2.5, 1), ("loss", 2.0, 2)]
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tracker = make_trackers(["tensorboard"], tmp_path, {})[0]
    tracker.log_texts([{"prompt": "import ", "text": "os"}], 3)
    assert Writer.made[1].purge_step == 3  # goes on, and hides what a run that came to nothing wrote after it
    assert Writer.made[1].texts == [("sample 0", "import **os**", 3)]
    assert len(list(folder.iterdir())) == 2
    path.unlink()
    follow(["tensorboard"], tmp_path)
    assert len(list(folder.iterdir())) == 1  # another run: what was there is gone


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        (["tensorbord"], "unknown tracker 'tensorbord'; known ones: tensorboard, wandb, mlflow"),
        (["wandb"], "the tracker 'wandb' needs the package wandb; install it"),
        ([7], "which has no log"),
        ("wandb", r"trackers='wandb': it must be a list .*; pass trackers=\['wandb'\]"),
        (SimpleNamespace(log=print), r"it must be a list of names and objects; pass trackers=\[tracker\]"),
    ],
)
def test_what_cannot_be_is_said_in_words(trackers, words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=words):
        check_trackers(trackers)


@pytest.mark.ranks(2)
def test_every_rank_hears_of_an_unknown_tracker_before_anything_is_made(tmp_path):
    strategy = Strategy()
    linear = torch.nn.Linear(2, 2)
    strategy.initialize(linear, torch.optim.SGD(linear.parameters()))
    for trackers, words in ((["x"], "unknown tracker 'x'"), ("wandb", r"pass trackers=\['wandb'\]")):
        logging = LoggingPolicy(trackers=trackers)
        with pytest.raises(ValueError, match=words), Run(tmp_path / "run", strategy, logging=logging):
            pass
    dist.barrier()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_nothing_is_imported_that_is_not_asked_for():
    code = "import sys, par_train.run.run; sys.exit(any(n in sys.modules for n in ('tensorboard', 'wandb', 'mlflow')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_object_with_log_stays_what_it_is(tmp_path):
    mine = SimpleNamespace(log=lambda values, step: None)
    check_trackers([mine])
    assert make_trackers([mine], tmp_path, {}) == [mine]
