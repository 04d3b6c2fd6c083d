"""Saving to and loading from an object store: par-checkpoint, DCP through fsspec and s3fs, and the limit of the store.

The limit is the plainest way to move these bytes with a checksum of each part: by the same client of HTTP, with as many
requests at a time, on as many ranks. A way that is written by hand for these tensors does our work, the same file. The
store is once as fast as this machine makes it; once every request takes 20 ms more, and a body comes at 8 MB/s, while
others go on beside it: a tenth of what S3 gives to one request, as this server does a small part of all that S3 does.
Run as `python tools/bench/objects.py`; writes docs/benchmarks/objects.md and .json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _object_server import PROCESSES, Server
from _table import write
from _turns import shuffled
from crc32c import crc32c
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import par_checkpoint
from par_checkpoint.storage.files import IN_FLIGHT
from par_checkpoint.storage.objects.s3 import PART, S3Store, UploadParts
from par_checkpoint.storage.remote import RemoteFolder
from par_groups import Box, Sharding, bytes_of

TENSORS, SHAPE = 8, (2048, 2048)  # 16 MiB each
TOTAL = TENSORS * SHAPE[0] * SHAPE[1] * 4
OURS = "par-checkpoint"
CALLS = dict.fromkeys(("save", "load"), ("limit", "by hand", OURS, "DCP"))
SLOW = "20 ms, 8 MB/s a request"
STORES = {"as fast as it goes": (0.0, 0.0, 5, 1), SLOW: (0.02, 8e6, 4, 4)}
"""By name: seconds of delay, bytes a second, turns, and every which of them has DCP in it."""
BUDGET = 256 * 10**6  # of a save and a load, as it comes
PATH = "bucket/by-hand"
PUTS = min(IN_FLIGHT, BUDGET // (2 * PART))  # under way at a time, of one rank

Seconds = dict[tuple[str, str], float]


def main() -> None:
    """Measures every store and number of ranks."""
    rows: list[dict[str, object]] = []
    for store in STORES:
        for ranks in (1, 2):
            rows += rows_of(store, ranks, of_store(store, ranks))
    note = (
        f"A checkpoint of {TENSORS} fp32 tensors of {SHAPE[0]} x {SHAPE[1]}, {TOTAL >> 20} MiB in total, sharded by "
        "columns over the ranks. *DCP*: torch.distributed.checkpoint saves and loads DTensors with FsspecWriter and "
        "FsspecReader on s3fs. Each rank writes and reads its own file. *par-checkpoint*: writes full tensors into "
        "one file, which Transformers can open, so ranks exchange their columns. *limit*: the least that a rank's "
        f"bytes cost with the HTTP client of par-checkpoint. Each {PART >> 20} MiB of a rank's own bytes is one object "
        f"with a crc32c, written or read by one request. {PUTS} writes or {IN_FLIGHT} reads are in flight at a time, "
        "as in par-checkpoint. *by hand*: a few lines of code that do the work of par-checkpoint for exactly these "
        "tensors. The store joins parts of full rows into one object, and a load reads ranges of this object. Two "
        "ranks exchange their columns at the same time: a save sends them directly from the tensors, and a load "
        "receives them directly into the tensors. This code has no plan, no agreement between ranks, no header, index "
        "or manifest, and removes no old files. Each turn runs every contender once, in another order each time. "
        f"There are {STORES['as fast as it goes'][2]} turns, and {STORES[SLOW][2]} on the slow store, of which one "
        "includes DCP. The columns `against` are the median, over the turns, of the time relative to a contender "
        f"(lower is better). The server is nanio in {PROCESSES} processes, which holds the objects in memory. Server "
        "and ranks share the machine. The first store therefore compares the CPU time of the contenders. The second "
        "store delays each request and limits its bandwidth, so it compares how well the contenders run requests in "
        "parallel."
    )
    write("objects", "Checkpoints on an object store", rows, note)


def of_store(name: str, ranks: int) -> list[Seconds]:
    """Seconds of each call in every turn, on a store of its own."""
    delay, pace, turns, seldom = STORES[name]
    with tempfile.TemporaryDirectory(prefix="par-bench-", dir=in_memory()) as folder:
        server = Server(Path(folder), delay=delay, pace=pace)
        try:
            return measured(server.url, ranks, turns, seldom)
        finally:
            server.close()


def in_memory() -> str | None:
    """A folder in memory, if this machine has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def rows_of(store: str, ranks: int, turns: Sequence[Seconds]) -> list[dict[str, object]]:
    """The table's lines of one store and number of ranks."""
    rows: list[dict[str, object]] = []
    for call, contenders in CALLS.items():
        for name in contenders:
            seconds = [turn[call, name] for turn in turns if (call, name) in turn]
            line: dict[str, object] = {"store": store, "ranks": ranks, "call": call, "what": name}
            line["median s"] = f"{statistics.median(seconds):.2f}"
            line["range s"] = f"{min(seconds):.2f} to {max(seconds):.2f}"
            line["MiB/s"] = f"{TOTAL / 2**20 / statistics.median(seconds):.0f}"
            for base in ("limit", "by hand", OURS):
                pairs = [
                    (turn[call, name], turn[call, base])
                    for turn in turns
                    if {(call, name), (call, base)} <= turn.keys()
                ]
                line[f"against {base}"] = f"{statistics.median(it / other for it, other in pairs):.2f}" if pairs else ""
            rows.append(line)
    return rows


def measured(url: str, ranks: int, turns: int, seldom: int) -> list[Seconds]:
    """Seconds of each call in every turn, by ranks in processes of their own."""
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = os.environ | keys | {"AWS_ENDPOINT_URL": url, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="par-bench-") as folder:
        running = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(ranks), folder, str(turns), str(seldom)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        outputs = [each.communicate()[0] for each in running]
        if any(each.returncode for each in running):
            raise RuntimeError("a rank failed")
    return [{(call, name): seconds for call, name, seconds in turn} for turn in json.loads(outputs[0].splitlines()[-1])]


def run(rank: int, ranks: int, folder: str, turns: int, seldom: int) -> list[list[tuple[str, str, float]]]:
    """Calls with their seconds, in every turn, on this rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    rows, columns = SHAPE[0], SHAPE[1] // ranks
    state = {f"layer.{i}.weight": torch.randn(rows, columns) for i in range(TENSORS)}
    box = Box((0, columns * rank), (rows, columns), 0, (columns, 1), (rank,))
    layout = dict.fromkeys(state, Sharding(SHAPE, (box,)))
    cut: dict[str, Any] = {name: DTensor.from_local(tensor, mesh, [Shard(1)]) for name, tensor in state.items()}
    options: dict[str, Any] = {
        "model": state,
        "format": par_checkpoint.Format(layout=layout),
        "transfer": par_checkpoint.Transfer(budget=BUDGET, progress=False),
    }
    plain, by_hand = Plain(state, rank), ByHand(state, rank, ranks)
    dist.barrier()
    acts: dict[tuple[str, str], Callable[[int], object]] = {
        ("save", "limit"): lambda _: plain.put(),
        ("save", "by hand"): lambda _: by_hand.save(),
        ("save", OURS): lambda i: par_checkpoint.save(f"s3://bucket/par-{i}", overwrite=True, **options),
        ("save", "DCP"): lambda i: dcp_save(cut, storage_writer=FsspecWriter(f"s3://bucket/dcp-{i}")),
        ("load", "limit"): lambda _: plain.get(),
        ("load", "by hand"): lambda _: by_hand.load(),
        ("load", OURS): lambda i: par_checkpoint.load(f"s3://bucket/par-{i}", **options),
        ("load", "DCP"): lambda i: dcp_load(cut, storage_reader=FsspecReader(f"s3://bucket/dcp-{i}")),
    }
    found: list[list[tuple[str, str, float]]] = []
    for turn in range(turns + 1):  # the first is a warm-up
        found.append([])
        for call, names in CALLS.items():
            wanted = [name for name in names if name != "DCP" or (turn % seldom == 0 and (turn or seldom == 1))]
            for name in shuffled(wanted, turn):
                dist.barrier()
                begin = time.perf_counter()
                acts[call, name](turn % 2)
                dist.barrier()
                found[-1].append((call, name, time.perf_counter() - begin))
    dist.destroy_process_group()
    return found[1:]


class Plain:
    """What moving a rank's bytes takes at least.

    Args:
        state: The rank's tensors.
        rank: The rank.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], rank: int) -> None:
        self._store, self._rank = store_of_bench(), rank
        if rank == 0:
            self._store.call("create_bucket", Bucket="bucket")
        memories = map(bytes_of, state.values())
        self._parts = [memory[begin : begin + PART] for memory in memories for begin in range(0, len(memory), PART)]
        self._crcs = [0] * len(self._parts)

    def put(self) -> None:
        """Every part is an object."""

        def one(number: int) -> None:
            self._crcs[number] = crc32c(self._parts[number])
            self._store.put(f"bucket/{self._rank}-{number}", bytes(self._parts[number]))

        with ThreadPoolExecutor(PUTS) as pool:
            list(pool.map(one, range(len(self._parts))))

    def get(self) -> None:
        """Every part comes into the tensors, and is checked."""

        def one(number: int) -> None:
            part = self._parts[number]
            self._store.open(f"bucket/{self._rank}-{number}", len(part)).read_into(0, part)
            check(part, self._crcs[number])

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(one, range(len(self._parts))))


class ByHand:
    """Whole tensors in one object, written for these tensors alone: nothing is planned, looked up or agreed upon.

    A part is half of the rows of a tensor, and the ranks take turns. Of each pair of parts a rank gives the other one
    its columns of that one's part, straight from where they lie, and a load brings them straight to where they belong.

    Args:
        state: The rank's tensors.
        rank: The rank.
        ranks: How many there are, one or two.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], rank: int, ranks: int) -> None:
        self._store, self._rank, self._peer, self._ranks = store_of_bench(), rank, 1 - rank, ranks
        width = SHAPE[1] // ranks
        self._columns = [slice(width * each, width * (each + 1)) for each in range(ranks)]
        rows = PART // 4 // SHAPE[1]
        self._halves = [tensor[first : first + rows] for tensor in state.values() for first in range(0, SHAPE[0], rows)]
        self._mine = range(rank, len(self._halves), ranks)
        self._crcs = dict.fromkeys(self._mine, 0)

    def save(self) -> None:
        """Columns go back and forth, parts go to the store as soon as they are whole, and the store joins them."""
        upload = [self._store.begin(PATH)] if self._rank == 0 else [""]
        dist.broadcast_object_list(upload)

        def one(number: int, others: torch.Tensor) -> None:
            half = self._halves[number]
            part = torch.cat([half, others][:: 1 - 2 * self._rank], 1) if self._ranks > 1 else half
            self._crcs[number] = crc32c(bytes_of(part))
            self._store.send(PATH, upload[0], number, bytes(bytes_of(part)))

        with ThreadPoolExecutor(PUTS) as pool:
            jobs = []
            for number in self._mine:
                others = torch.empty_like(self._halves[number])
                if self._ranks > 1:
                    waits(self._receive(others), self._send(self._halves[number - self._rank + self._peer]))
                jobs.append(pool.submit(one, number, others))
            for job in jobs:
                job.result()
        dist.barrier()
        if self._rank == 0:
            self._store.join(PATH, upload[0], UploadParts(size=TOTAL, head=0, part=PART))

    def load(self) -> None:
        """Each rank gets every other part by a request for a range, checks it, and hands on what is not its own."""
        source = self._store.open(PATH, TOTAL)

        def one(number: int) -> torch.Tensor:
            half = self._halves[number]
            part = half if self._ranks == 1 else torch.empty(len(half), SHAPE[1])
            source.read_into(PART * number, bytes_of(part))
            check(bytes_of(part), self._crcs[number])
            if self._ranks == 1:
                return part
            half[:] = part[:, self._columns[self._rank]]
            return part[:, self._columns[self._peer]].contiguous()

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            jobs = {number: pool.submit(one, number) for number in self._mine}
            passing = []
            for number, job in jobs.items():
                others = job.result()
                if self._ranks > 1:
                    passing += [self._receive(self._halves[number - self._rank + self._peer]), self._send(others)]
            waits(*passing)

    def _receive(self, into: torch.Tensor) -> dist.Work | None:
        """Begins to receive from the other rank."""
        return dist.irecv(into, self._peer)

    def _send(self, what: torch.Tensor) -> dist.Work | None:
        """Begins to send to the other rank."""
        return dist.isend(what, self._peer)


def waits(*passing: dist.Work | None) -> None:
    """Waits for what is under way between ranks."""
    for work in passing:
        if work is not None:
            work.wait()


def store_of_bench() -> S3Store:
    """The store, by the client that ours uses."""
    store = RemoteFolder("s3://bucket/plain", at=lambda _: None).store
    if not isinstance(store, S3Store):
        raise TypeError(f"s3:// is {type(store).__name__}")
    return store


def check(data: memoryview, crc: int) -> None:
    """Raises unless bytes are what was put there."""
    if crc32c(data) != crc:
        raise RuntimeError("a part is not what was put there")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank, ranks, folder, turns, seldom = sys.argv[1:]
        print(json.dumps(run(int(rank), int(ranks), folder, int(turns), int(seldom))))
    else:
        main()
