"""A world that never ends; test_orphans.py ends the pytest process instead."""

import os
import subprocess
import time
from pathlib import Path

import pytest


@pytest.mark.ranks(2, timeout=60)
def test_forever():
    folder = Path(os.environ["PIDS"])
    child = subprocess.Popen(["sleep", "60"])
    (folder / str(os.getpid())).touch()
    (folder / str(os.getppid())).touch()  # the forkserver
    if "CHILDREN" in os.environ:
        (folder / str(child.pid)).touch()
    time.sleep(60)
