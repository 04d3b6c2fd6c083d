"""What still works when the main thread is done and the interpreter ends: a save in the background, and its threads."""

import subprocess
import sys

import pytest
import torch

from par_checkpoint import load, verify

FIRST = """
import threading, time

last_line = threading.Event()

def wait():
    last_line.wait()
    time.sleep(0.3)  # by then the interpreter is about to end
"""

COPY = """
import sys, torch
from torch import nn
from par_checkpoint import Transfer, save
from par_checkpoint.transfer.snapshot import Snapshot

finish = Snapshot.finish
Snapshot.finish = lambda self: (wait(), finish(self))
model = {name: nn.Parameter(torch.full((3 << 20,), 7.0)) for name in "abc"}
save(PATH, model=model, async_=True, transfer=Transfer(copy="background", budget="8MB"))
assert "torch._dynamo" not in sys.modules  # importing it takes a second
"""

COPY_OF_WHAT_CHANGES = f"{COPY}\nmodel['b'].detach().zero_()"

EXECUTORS = """
import torch
from concurrent.futures import ThreadPoolExecutor
from par_checkpoint import Transfer, save
from par_checkpoint.transfer.snapshot import Snapshot

finish, pool = Snapshot.finish, ThreadPoolExecutor(1)  # as a store's client has one
Snapshot.finish = lambda self: (wait(), pool.submit(finish, self).result())
save(PATH, model={"a": torch.full((3 << 20,), 7.0)}, async_=True, transfer=Transfer(copy="background"))
"""

WORKERS = """
import threading
from par_checkpoint.transfer.workers import Workers

def late(workers):
    wait()
    with workers:
        print(sum(job.result() for job in [workers.submit(lambda: 20), workers.submit(lambda: 3)]))

threading.Thread(target=late, args=(Workers(2, "w"),)).start()
"""

IN_FORKS = """
import os, sys, warnings
import torch, par_checkpoint

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: nothing has started a thread so far
for name, script in SCRIPTS.items():
    child = os.fork()
    if not child:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{FOLDER}/{name}.{kind}", os.O_WRONLY | os.O_CREAT), number)
        exec(script, {"__name__": "__main__"})
        break  # and the interpreter ends as ever
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} failed")
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder where all scripts have run, each to the end of a process that did not have to import torch."""
    folder = tmp_path_factory.mktemp("ended")
    scripts = {"copy": COPY, "changed": COPY_OF_WHAT_CHANGES, "executors": EXECUTORS, "workers": WORKERS}
    scripts = {name: script.replace("PATH", repr(str(folder / name / "c"))) for name, script in scripts.items()}
    scripts = {name: f"{FIRST}{script}\nlast_line.set()" for name, script in scripts.items()}
    program = IN_FORKS.replace("SCRIPTS", repr(scripts)).replace("{FOLDER}", str(folder))
    subprocess.run([sys.executable, "-c", program], check=True)
    return folder


@pytest.mark.storm
def test_a_copy_that_waits_is_made_and_saved(ended):
    assert (ended / "copy.err").read_text() == ""
    assert verify(ended / "copy" / "c") == []
    found = {name: torch.empty(3 << 20) for name in "abc"}
    load(ended / "copy" / "c", model=found)
    assert all(bool((tensor == 7).all()) for tensor in found.values())


def test_a_copy_of_what_was_changed_is_refused(ended):
    assert "c' failed: 'b' was changed" in (ended / "changed.err").read_text()
    assert list((ended / "changed").iterdir()) == []


def test_executors_work_until_a_save_is_done(ended):
    assert (ended / "executors.err").read_text() == ""
    assert verify(ended / "executors" / "c") == []


def test_workers_go_on(ended):
    assert ((ended / "workers.out").read_text(), (ended / "workers.err").read_text()) == ("23\n", "")
