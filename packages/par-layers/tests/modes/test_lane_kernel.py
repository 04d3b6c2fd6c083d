"""The kernel of products in lanes for GPUs, without one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_has_the_same_bits_for_every_division_in_the_interpreter():
    """In a process of its own, since Triton reads the setting when a kernel is defined."""
    script = Path(__file__).with_name("interpreted_lane_kernel.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
