"""Host memory that saving and loading take beside the state, as the operating system counts it.

Each case runs in processes of its own; a rank reads its peak (VmHWM), reset just before, against its memory then. Run
as `python tools/bench/checkpoint_memory.py`; writes docs/benchmarks/checkpoint_memory.md and .json.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _table import write

import par_checkpoint
from par_checkpoint import Format, Transfer
from par_groups import Box, Sharding

BUDGET = 256_000_000
SHAPE, TENSORS = (8192, 4096), 16  # 128 MiB each
CALLS = ("save", "load")
CASES = {
    "1 rank, 2 GiB": (1, "auto"),
    "1 rank, 2 GiB, one rank a file": (1, "owner"),
    "2 ranks, columns, 1 GiB each": (2, "auto"),
    "2 ranks, columns, 1 GiB each, one rank a file": (2, "owner"),
}


def main() -> None:
    """Measures every case."""
    rows = [row for case in CASES for row in measured(case)]
    note = (
        f"{TENSORS} fp32 tensors of {SHAPE[0]} x {SHAPE[1]}, budget {BUDGET / 1e6:.0f} MB. Growth is a "
        "rank's peak resident memory during the call minus its resident memory before it (lower is better), without "
        "the page cache. Each call is the first of its process, so it includes the modules that it imports and its "
        "communicator."
    )
    write("checkpoint_memory", "Memory of saving and loading", rows, note)


def measured(case: str) -> list[dict[str, object]]:
    """Rows of a case; the largest of its ranks."""
    ranks, _ = CASES[case]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="par-bench-") as folder:
        for call in CALLS:  # in processes of their own: memory that a save has freed would serve a load
            commands = [[sys.executable, __file__, case, call, str(rank), folder] for rank in range(ranks)]
            running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
            outputs = [each.communicate()[0] for each in running]
            if any(each.returncode for each in running):
                raise RuntimeError(f"{case}, {call}: a rank failed")
            size = max(int(output.splitlines()[-1]) for output in outputs)
            rows.append(
                {"case": case, "call": call, "growth MB": f"{size / 1e6:.1f}", "of budget": f"{size / BUDGET:.2f}"}
            )
    return rows


def run(case: str, call: str, rank: int, folder: Path) -> int:
    """Growth of one rank, in bytes."""
    ranks, writer = CASES[case]
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows, columns = SHAPE[0], SHAPE[1] // ranks
    state = {f"layer.{i}.weight": torch.full((rows, columns), float(i)) for i in range(TENSORS)}
    box = Box((0, columns * rank), (rows, columns), 0, (columns, 1), (rank,))
    layout = dict.fromkeys(state, Sharding(SHAPE, (box,)))

    if call == "save":
        files, how = Format(layout=layout, max_shard_size="1GB"), Transfer(budget=BUDGET, writer=writer, progress=False)
        return growth(lambda: par_checkpoint.save(folder / "all", model=state, format=files, transfer=how))
    files, how = Format(layout=layout), Transfer(budget=BUDGET, progress=False)
    return growth(lambda: par_checkpoint.load(folder / "all", model=state, format=files, transfer=how))


def growth(act: Callable[[], object]) -> int:
    """The most memory that this process had during a call, less what it had before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def status(name: str) -> int:
    """Bytes, as the system counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        print(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
