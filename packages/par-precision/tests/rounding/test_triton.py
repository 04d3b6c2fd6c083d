"""The kernel for GPUs, without one."""

from pathlib import Path

from par_testing.commands.interpreted import run_interpreted


def test_the_kernel_rounds_like_torchs_operations_in_the_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_rounding.py"))
