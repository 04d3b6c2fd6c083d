"""The kernel of products in lanes for GPUs, without one."""

from pathlib import Path

from par_testing.commands.interpreted import run_interpreted


def test_the_kernel_has_the_same_bits_for_every_division_in_the_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_lane_kernel.py"))
