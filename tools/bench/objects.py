"""Saving to and loading from an object store: par-checkpoint against DCP through fsspec and s3fs, in the same run.

The store is moto's S3 server in a process of its own, behind a proxy. Once the proxy passes bytes on as fast as it can;
once every request takes 20 ms more, and a body comes at 8 MB/s, while others go on beside it: a tenth of what S3 gives
to one request, as this server does a small part of what S3 does in all. Run as `python tools/bench/objects.py`; writes
docs/benchmarks/objects.md and .json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable  # noqa: TC003
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _table import write
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import par_checkpoint
from par_groups import Box, Sharding

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "par-checkpoint" / "tests"))
import stores  # type: ignore[import-not-found]

TENSORS, SHAPE = 4, (2048, 2048)  # 16 MiB each
REPETITIONS = 2
STORES = {"as fast as it goes": (0.0, 0.0), "20 ms, 8 MB/s a request": (0.02, 8e6)}


def main() -> None:
    """Measures every store and number of ranks."""
    server = stores.Server()
    stores.make_bucket(server.url)
    rows = []
    for name, (slow, pace) in STORES.items():
        for ranks in (1, 2):
            proxy = stores.Proxy(server.port)
            proxy.start(slow=slow, pace=pace)
            found = measured(proxy.url, ranks)
            proxy.close()
            for call in ("save", "load"):
                ours, theirs = found[f"par {call}"], found[f"dcp {call}"]
                mib = TENSORS * SHAPE[0] * SHAPE[1] * 4 / 2**20
                rows.append(
                    {
                        "store": name,
                        "ranks": ranks,
                        "call": call,
                        "par-checkpoint MiB/s": f"{mib / ours:.0f}",
                        "DCP MiB/s": f"{mib / theirs:.0f}",
                        "ratio": f"{theirs / ours:.2f}",
                    }
                )
    server.close()
    note = (
        f"{TENSORS} fp32 tensors of {SHAPE[0]} x {SHAPE[1]}, 64 MiB, cut by columns over the ranks. DCP: "
        "FsspecWriter and FsspecReader on s3fs, as DTensors. Medians of "
        f"{REPETITIONS}, taken in turn. Server, proxy and ranks share the machine, so that the first store measures "
        "how much of it each way takes from the server; the second is what requests at a time are worth."
    )
    write("objects", "Checkpoints on an object store", rows, note)


def measured(url: str, ranks: int) -> dict[str, float]:
    """Seconds of each call, by ranks in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="par-bench-") as folder:
        commands = [[sys.executable, __file__, str(rank), str(ranks), folder] for rank in range(ranks)]
        environment = {**os.environ, **stores.settings(url), "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for command in commands
        ]
        outputs = [each.communicate()[0] for each in running]
        if any(each.returncode for each in running):
            raise RuntimeError("a rank failed")
    return dict(json.loads(outputs[0].splitlines()[-1]))


def run(rank: int, ranks: int, folder: str) -> dict[str, float]:
    """Medians of this rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    rows, columns = SHAPE[0], SHAPE[1] // ranks
    state = {f"layer.{i}.weight": torch.randn(rows, columns) for i in range(TENSORS)}
    box = Box((0, columns * rank), (rows, columns), 0, (columns, 1), (rank,))
    layout = dict.fromkeys(state, Sharding(SHAPE, (box,)))
    cut: dict[str, Any] = {name: DTensor.from_local(tensor, mesh, [Shard(1)]) for name, tensor in state.items()}
    calls: dict[str, Callable[[int], object]] = {
        "par save": lambda i: par_checkpoint.save(f"s3://bucket/par-{i}", model=state, layout=layout, overwrite=True),
        "dcp save": lambda i: dcp_save(cut, storage_writer=FsspecWriter(f"s3://bucket/dcp-{i}")),
        "par load": lambda i: par_checkpoint.load(f"s3://bucket/par-{i}", model=state, layout=layout),
        "dcp load": lambda i: dcp_load(cut, storage_reader=FsspecReader(f"s3://bucket/dcp-{i}")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(REPETITIONS + 1):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call(number % 2)
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
    else:
        main()
