"""A process learns that its parent has died, however that happened."""

import os
import subprocess
import sys
import threading

from par_groups import watch_parent

# It reports on stderr, which it inherits: the pipe of its stdout ends with its parent.
ORPHAN = """
import os, sys, threading
from par_groups import watch_parent
died = threading.Event()
watch_parent(os.getppid(), died.set)
print("watching", flush=True)
sys.stderr.write("died" if died.wait(60) else "waited in vain")
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
os.kill(os.getpid(), 9)
"""


def test_watch_of_a_killed_parent_calls_the_function():
    found = subprocess.run([sys.executable, "-c", PARENT, ORPHAN], stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (-9, "died")


def test_watch_that_has_ended_calls_nothing():
    calls, alive = [], {thread.name for thread in threading.enumerate()}
    end = watch_parent(os.getppid(), lambda: calls.append("died"))
    end()
    for thread in threading.enumerate():
        if thread.name == "watch-parent" and thread.name not in alive:
            thread.join(10)
            assert not thread.is_alive()
    assert not calls


def test_watch_of_a_parent_that_is_gone_already_calls_at_once():
    died = threading.Event()
    watch_parent(os.getppid() + 1, died.set)
    assert died.wait(10)
