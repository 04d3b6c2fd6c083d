"""Every schedule of par-pipeline: what it promises, and how long the simulator takes to find out.

Run as `python tools/bench/schedules.py`; writes docs/benchmarks/schedules.md and .json.
"""

import json
import statistics
import subprocess
import sys
import time

from _table import write

from par_pipeline import Costs, schedule, simulate

NAMES = ["gpipe", "1f1b", "zb_h1", "zb_h2", "looped_bfs", "interleaved", "dualpipe_v", "zb_v", "v_half", "v_min"]
RANKS, MICROBATCHES = 8, 32
LARGE = {"1f1b", "zb_h1"}
RUNS = 5

MEASURE = """
import json, time
from par_pipeline import schedule, simulate
start = time.perf_counter()
simulate(schedule({name!r}, 1000, 10_000))
line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([time.perf_counter() - start, int(line.split()[1]) / 1024]))
"""


def main() -> None:
    """Writes a row a schedule."""
    note = (
        f"{RANKS} ranks with {MICROBATCHES} microbatches. Each rank takes one unit of time for the forward of a "
        "microbatch, one for its input gradient and one for its weight gradient. If a rank has two stages, each stage "
        "takes half of that. Peak is the number of activations that a rank holds at most, where 1 is one microbatch on "
        f"a full rank. Seconds are the time to list and simulate the actions, medians of {RUNS} runs. MB and the "
        "seconds next to it belong to a fresh process that simulates 1,000 ranks with 10,000 microbatches. Lower is "
        "better in all columns."
    )
    write("schedules", "Schedules, simulated", [row(name) for name in NAMES], note)


def row(name: str) -> dict[str, object]:
    """What one schedule promises, and the simulator's times for it."""
    made = schedule(name, RANKS, MICROBATCHES)
    chunks = made.stages // RANKS
    timeline = simulate(made, Costs(1 / chunks, 1 / chunks, 1 / chunks))
    seconds, megabytes = large(name) if name in LARGE else ("", "")
    return {
        "schedule": name,
        "makespan": f"{timeline.makespan:g}",
        "bubble": f"{timeline.bubble:.1%}",
        "peak": f"{max(timeline.peak(rank) for rank in range(RANKS)) / chunks:g}",
        "64 x 512, s": f"{statistics.median(seconds_of(name) for _ in range(RUNS)):.2f}",
        "1,000 x 10,000, s": seconds,
        "MB": megabytes,
    }


def seconds_of(name: str) -> float:
    """Listing and simulating 64 ranks with 512 microbatches."""
    start = time.perf_counter()
    simulate(schedule(name, 64, 512))
    return time.perf_counter() - start


def large(name: str) -> tuple[str, str]:
    """Seconds and megabytes of 1,000 ranks with 10,000 microbatches, in a process of its own."""
    code = MEASURE.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, megabytes = json.loads(done.stdout)
    return f"{seconds:.1f}", f"{megabytes:.0f}"


if __name__ == "__main__":
    main()
