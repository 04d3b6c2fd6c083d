"""What a multi-rank test costs: a trivial all-reduce on 2, 4 and 8 ranks, after the start of the server.

Run as `python tools/bench/ranks.py`; writes docs/benchmarks/ranks.md and .json.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _table import write

TESTS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.parametrize("run", range(8))
@pytest.mark.ranks([2, 4, 8])
def test_all_reduce(run):
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size()
"""

SECONDS = re.compile(r"([\d.]+)s call .*?(\d+)ranks")


def main() -> None:
    """Runs the tests under pytest and reads the times that it measured."""
    rows = [
        {
            "ranks": ranks,
            "tests": len(seconds),
            "median s": round(statistics.median(seconds), 3),
            "range s": f"{min(seconds):.3f} to {max(seconds):.3f}",
        }
        for ranks, seconds in sorted(durations(TESTS).items())
    ]
    note = "The table shows the duration of the test call in pytest, which includes the start of the ranks, in one run."
    write("ranks", "Time of a trivial multi-rank test", rows, note)


def durations(code: str) -> dict[int, list[float]]:
    """Seconds of each test's call, by number of ranks; the first test also starts the server and is left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_cost.py"
        path.write_text(code)
        command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=0.001", "-vv", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    times: dict[int, list[float]] = {}
    for seconds, ranks in SECONDS.findall(done.stdout):
        times.setdefault(int(ranks), []).append(float(seconds))
    return {ranks: sorted(found)[:-1] for ranks, found in times.items()}


if __name__ == "__main__":
    main()
