"""Running the command as its users do: in a process of its own, with a small text and a small model."""

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config):
    """Has what the command imports, beside torch, imported where ranks and warm commands are forked."""
    drawing = ("matplotlib.figure", "matplotlib.backends.backend_agg")
    models = ("transformers.models.llama.modeling_llama", "transformers.generation.utils")  # a second a rank
    models += ("par_testing.ranks.transformers_once",)
    for module in ("par_train.jobs.job_run", "torch.distributed.run", *drawing, *models):
        config.addinivalue_line("ranks_preload", module)


SMALL = ["--model.width=16", "--model.layers=1", "--model.heads=2", "--model.context=16", "--train.batch_size=6"]
SMALL += ["--train.steps=12", "--train.warmup_steps=4", "--train.validate_every=3", "--ranks=3", "--device=cpu"]

# Read by Python when it starts, so that a test can reach into a rank that the command starts. With TEST_HOLD=3 a rank
# waits in its fourth step until it is asked to leave, or the file TEST_GO is there: nothing depends on who is faster.
# With TEST_HOLD_COPY nothing comes into the second tier until that file is there, which a run makes that says it waits.
FAULTS = """
import os, sys, time
import par_train.jobs.trainer
import par_train.jobs.text
import par_train.run.metrics
import par_train.run.saver
import par_train.run.hooks
import par_train.run.stop
from par_checkpoint import _save as _saving
from par_checkpoint.storage import local as _local

advance, read_text = par_train.jobs.trainer.Trainer.advance, par_train.jobs.text.read_text

asked = []

def note_and_ask(stop, number):
    asked.append(number)
    ask(stop, number)

def may_go_on():
    return asked or os.path.exists(os.environ.get("TEST_GO", ""))

def slow_or_failing(trainer, batch):
    time.sleep(float(os.environ.get("TEST_SLEEP", 0)))
    while "TEST_HOLD" in os.environ and trainer.step >= int(os.environ["TEST_HOLD"]) and not may_go_on():
        time.sleep(0.01)
    if trainer.step and os.environ.get("TEST_KILLED_RANK") == os.environ.get("RANK"):
        os.kill(os.getpid(), 9)
    if trainer.step and os.environ.get("TEST_FAILING_RANK") == os.environ.get("RANK"):
        raise RuntimeError("the fault of the test")
    return advance(trainer, batch)

def other_text(options):
    text = read_text(options)
    if os.environ.get("TEST_OTHER_TEXT") == os.environ.get("RANK", "none"):
        object.__setattr__(text, "train", text.train[::-1])
    return text

saves = []

def publish_or_die(staging, **options):
    saves.append(1)
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first_start and os.environ.get("TEST_KILL_SAVE") == str(len(saves)):
        os.kill(os.getpid(), 9)
    return publish(staging, **options)

def held_copy(*arguments, **options):
    while not os.path.exists(os.environ.get("TEST_HOLD_COPY", os.curdir)):
        time.sleep(0.01)
    return copy_checkpoint(*arguments, **options)

def say_and_release(text, stream=None):
    say(text, stream)
    if "waits until" in text and "TEST_HOLD_COPY" in os.environ:
        open(os.environ["TEST_HOLD_COPY"], "w").close()

copy_checkpoint, _saving.copy_checkpoint = _saving.copy_checkpoint, held_copy
say, par_train.run.saver.say = par_train.run.saver.say, say_and_release
ask = par_train.run.stop.Stop.ask
par_train.run.stop.Stop.ask = note_and_ask
publish = _local.LocalStaging.publish
_local.LocalStaging.publish = publish_or_die
par_train.jobs.trainer.Trainer.advance = slow_or_failing
for name in ("par_train.jobs.text", "par_train.jobs.checks"):  # a forked command has imported who calls it
    if name in sys.modules:
        sys.modules[name].read_text = other_text
if "TEST_PICTURES" not in os.environ:  # which take as long as all steps
    for name in ("par_train.run.metrics", "par_train.jobs.hooks", "par_train.run.hooks"):
        if name in sys.modules:
            sys.modules[name].draw_loss = lambda *_, **__: None
"""


@dataclass(frozen=True)
class Command:
    """Starts `par-train` in a folder of the test's own.

    Args:
        folder: The folder.
        warm: The fixture `warm_python`, which forks the command and its ranks, in a tenth of the time; None starts new
            processes.
    """

    folder: Path
    warm: Any = None

    def start(self, *arguments, **variables):
        return self.start_python("-m", "par_train", *arguments, **variables)

    def start_python(self, *arguments, ranks=4, **variables):
        path = f"{self.folder / 'faults'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
        if self.warm is not None:
            return self.warm.start(arguments, folder=self.folder, environment=environment, first=FAULTS, ranks=ranks)
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process, timeout=240):
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()  # its ranks follow it
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def train(self, output, *arguments, **variables):
        return self.start("run", "--data.folder=text", f"--output={output}", *SMALL, *arguments, **variables)

    def train_after(self, code, output, *arguments, **variables):
        """As `train`, in a Python that runs some code first."""
        command = f"{code}; import runpy; runpy.run_module('par_train', run_name='__main__', alter_sys=True)"
        flags = ["run", "--data.folder=text", f"--output={output}", *SMALL, *arguments]
        return self.start_python("-c", command, *flags, **variables)

    def torchrun(self, output, *arguments, **variables):
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone", "--max-restarts=1"]
        flags = ["run", "--data.folder=text", f"--output={output}", *SMALL, *arguments]
        return self.start_python(*torchrun, "-m", "par_train", *flags, ranks=6, **variables)

    def wait_for_steps(self, output, count, timeout=240):
        metrics, deadline = self.folder / output / "metrics.jsonl", time.monotonic() + timeout
        while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, f"{metrics} did not reach {count} steps"
            time.sleep(0.02)


def write_text(folder):
    folder.mkdir()
    for number in range(6):
        lines = [f"{word} {(number * word) % 89} {word * word}" for word in range(300)]
        (folder / f"{number}.txt").write_text("\n".join(lines))


@pytest.fixture(scope="session")
def new_command(tmp_path_factory):
    """The command in new processes, for what a fork leaves out: imports, flags, streams, signals that come early."""
    folder = tmp_path_factory.mktemp("command")
    write_text(folder / "text")
    (folder / "faults").mkdir()
    (folder / "faults" / "sitecustomize.py").write_text(FAULTS)
    return Command(folder)


@pytest.fixture(scope="session")
def command(new_command, warm_python):
    return Command(new_command.folder, warm_python)


def ranks_of(launcher):
    """The process ids of the ranks that a launcher started, wherever they hang in the process tree by now.

    A rank that was started has the launcher in its command line, one that was forked has it in its short name.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, name = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "comm").read_text().strip()
        except OSError:  # it has ended in between
            continue
        started = b"par_train.jobs.rank" in words and str(launcher).encode() in words
        if started or (name == f"rank of {launcher}" and words != [b""]):  # a zombie has no command line
            found.append(int(entry.name))
    return found


@pytest.fixture(name="ranks_of", scope="session")
def ranks_of_fixture():
    return ranks_of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with the config and the tokenizer of a tiny model, and paths of small corpora by their format."""
    pytest.importorskip("transformers")
    script = Path(__file__).parents[3] / "tools" / "tiny_model.py"
    if not script.exists():
        pytest.skip("tools/tiny_model.py is not part of this source distribution")
    spec = importlib.util.spec_from_file_location("tiny_model", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("tiny")
    module.make_model(folder / "model", files=8, weights=0)
    return folder / "model", module.write_corpora(folder / "texts", files=20)
