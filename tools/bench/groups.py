"""par-groups against DeviceMesh: planning a huge world, and the groups of a live one.

Every figure pair is measured in one run, each contender in a fresh process, in turn. Run as
`python tools/bench/groups.py`; writes docs/benchmarks/groups.md and .json.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from _table import write

RUNS = 5

MEASURE = """
import json, resource, sys, time
def rss():  # of this very process, in MB
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
{setup}
before, start = rss(), time.perf_counter()
{body}
print(json.dumps([time.perf_counter() - start, rss() - before]))
"""

PLAN = {
    "Topology": (
        "from par_groups import Topology",
        """
topology = Topology.from_config({"pipeline": 16, "tensor": {"size": 8, "mode": "3d"}}, 102_400)
groups = [topology.group(axes, 77_777) for axes in (*topology.axes, *topology.products)]
""",
    ),
    "ProcessGroups, fake backend": (
        """
import torch.distributed as dist
from par_groups import ProcessGroups, Topology
import torch.distributed.device_mesh
dist.init_process_group("fake", rank=77_777, world_size=102_400)
""",
        """
topology = Topology.from_config({"pipeline": 16, "tensor": {"size": 8, "mode": "3d"}}, 102_400)
groups = ProcessGroups(topology)
""",
    ),
    "DeviceMesh, fake backend": (
        """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("fake", rank=77_777, world_size=102_400)
""",
        """
names = ("data", "pipeline", "output", "input", "weight")
mesh = init_device_mesh("cpu", (800, 16, 2, 2, 2), mesh_dim_names=names)
groups = [mesh.get_group(name) for name in names]
""",
    ),
}


def main() -> None:
    """Measures in turn, A B C A B C, and writes medians and ranges."""
    samples: dict[str, list[list[float]]] = {name: [] for name in PLAN}
    for _ in range(RUNS):
        for name, (setup, body) in PLAN.items():
            samples[name].append(measured(setup, body))
    reference = statistics.median(seconds for seconds, _ in samples["DeviceMesh, fake backend"])
    rows = []
    for name, runs in samples.items():
        seconds, megabytes = ([run[column] for run in runs] for column in (0, 1))
        median = statistics.median(seconds)
        rows.append(
            {
                "contender": name,
                "median s": round(median, 5),
                "range s": f"{min(seconds):.5f} to {max(seconds):.5f}",
                "ratio": round(median / reference, 5),
                "growth MB": round(statistics.median(megabytes), 1),
            }
        )
    note = (
        f"Each contender ran in {RUNS} fresh processes, and the contenders took turns: A B C A B C. `median s` and "
        "`range s` are the seconds of one process that plans or creates the groups of one rank, without imports. "
        "`ratio` is the median relative to DeviceMesh (lower is better). `growth MB` is the growth of the peak memory "
        "of the process."
    )
    write("groups", "Process groups on all axes, one rank of 102,400", rows, note)


def measured(setup: str, body: str) -> list[float]:
    """Seconds and megabytes of one contender in a process of its own; imports are not counted."""
    code = MEASURE.format(setup=setup, body=body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.home())
    result: list[float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
