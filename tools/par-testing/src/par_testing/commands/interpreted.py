"""Scripts whose Triton kernels run in Triton's interpreter, on a CPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def run_interpreted(script: Path) -> None:
    """Run a script in a process of its own, since Triton reads the setting when a kernel is defined.

    Raises:
        pytest.skip.Exception: Triton is not installed.
        AssertionError: The script has failed; the message has what it wrote to stderr.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr  # noqa: S101 - of a test
