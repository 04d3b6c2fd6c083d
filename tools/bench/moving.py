"""What it costs to move a model into another sharding in memory: `reshard`, DCP through tmpfs, and raw messages.

Four gloo ranks hold DTensors by rows and fill DTensors by columns. The contenders run in one process group, in a drawn
order. Raw messages send as many bytes between the same ranks as the move must, from contiguous memory to contiguous
memory. The columns of a shard of rows are not contiguous, so a second kind of raw messages copies each piece into a
buffer first: that is the least that any move over these ranks has to do. The plan is that of one rank of a simulated
world: 1 T parameters of a mixture of experts, from 256 ranks to 128.
Run as `python tools/bench/moving.py`; writes docs/benchmarks/moving.md and .json.
"""

import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _ranks import spawned
from _table import Section, write_sections
from _turns import quartile, ratio, shuffled
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from par_checkpoint import State, reshard
from par_checkpoint.live.wanted import PieceRequests, Wanted, pieces_of
from par_groups import Box, Claims, Sharding, merge_claims
from par_groups.sharding.held import by_shape

RANKS, TENSORS, SHAPE, TURNS = 4, 8, (4096, 8192), 9
GIVERS, TAKERS, LAYERS, EXPERTS, WIDE, HIDDEN, VOCABULARY = 256, 128, 60, 384, 2048, 7168, 163840
MOVE, RAW, FILES = "reshard", "raw messages of the same bytes", "DCP through tmpfs"
COPIED = "raw messages with the copies that the move needs"

Shape = tuple[int, ...]
Held = Iterator[tuple[int, Shape, Shape]]


def main() -> None:
    """Measure both and write the page."""
    taken, used, received = spawned(RANKS, measure)
    bytes_ = torch.Size(SHAPE).numel() * 4
    moving = [
        {
            "contender": name,
            "median ms": f"{1e3 * statistics.median(seconds):.0f}",
            "quartiles": f"{1e3 * quartile(seconds, 1):.0f} to {1e3 * quartile(seconds, 3):.0f}",
            "time relative to raw messages (lower is better)": f"{ratio(seconds, taken[RAW]):.2f}",
            "relative to those with copies": f"{ratio(seconds, taken[COPIED]):.2f}",
            "CPU ms of all ranks": f"{1e3 * statistics.median(used[name]):.0f}",
        }
        for name, seconds in taken.items()
    ]
    sections = [
        Section(
            title="From rows to columns",
            note=(
                f"The state has {TENSORS} fp32 tensors of {SHAPE[0]} x {SHAPE[1]} ({TENSORS * bytes_ >> 20} MiB in "
                f"total), on {RANKS} gloo ranks with one thread each. A rank received {received:,} bytes. The lower "
                f"bound is {TENSORS * bytes_ * (RANKS - 1) // RANKS**2:,} bytes. There are {TURNS} turns, and each "
                "turn runs the contenders in a random order. A ratio is the median over the turns. On this machine "
                "the ranks share two cores, so a copy takes CPU time from the messages: no move that copies each piece "
                "once can be faster than the raw messages with copies."
            ),
            rows=moving,
        ),
        Section(
            title="Plan for 1 T parameters, from 256 to 128 ranks",
            note=(
                "CPU seconds of one rank in a simulated world. The sending ranks shard experts over 64 ranks and the "
                "rows of an expert over 4, and all other tensors by rows over 256 ranks. The receiving ranks shard "
                "experts over 128 ranks, and all other tensors by columns over 8."
            ),
            rows=[plan()],
        ),
    ]
    write_sections("moving", "Resharding in memory", sections)


def measure() -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """Return seconds of the slowest rank and CPU seconds of all ranks in each turn, and the bytes rank 0 received."""
    mesh = init_device_mesh("cpu", (RANKS,))
    rank = dist.get_rank()
    source = {
        f"t{number}": distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)], src_data_rank=None)
        for number in range(TENSORS)
    }
    target = {name: distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)], src_data_rank=None) for name in source}
    held = [(source[name].to_local(), target[name].to_local()) for name in source]
    buffers = [torch.ones(SHAPE[0] // RANKS, SHAPE[1] // RANKS) for _ in range(3)]
    folder = Path("/dev/shm/par-bench-moving")
    acts: dict[str, Callable[[], object]] = {
        MOVE: lambda: reshard(State(model=source), State(model=target)).received,
        RAW: partial(raw, rank, held),
        COPIED: partial(copied, rank, held, buffers),
        FILES: partial(through_files, folder, source, target),
    }
    found: dict[str, list[float]] = {name: [] for name in acts}
    used: dict[str, list[float]] = {name: [] for name in acts}
    received = 0
    for turn in range(-1, TURNS):  # one to warm up
        for name in shuffled(list(acts), turn):
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            outcome = acts[name]()
            seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            work = torch.tensor(time.process_time() - worked, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            dist.all_reduce(work)
            if turn >= 0:
                found[name].append(seconds.item())
                used[name].append(work.item())
            if name == MOVE and isinstance(outcome, int):
                received = outcome
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return found, used, received


def raw(rank: int, held: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Send a part of each source to each other rank, and receive a part of each target from it."""
    for step in range(1, RANKS):
        to, giver = (rank + step) % RANKS, (rank - step) % RANKS
        for source, target in held:
            works = [dist.irecv(target.chunk(RANKS)[giver], giver), dist.isend(source.chunk(RANKS)[to], to)]
            for work in works:
                if work is not None:
                    work.wait()


def copied(rank: int, held: list[tuple[torch.Tensor, torch.Tensor]], buffers: list[torch.Tensor]) -> None:
    """Send the columns of each other rank, copied to a buffer, and receive its rows in the target itself."""
    for source, target in held:
        target.chunk(RANKS)[rank].copy_(source.chunk(RANKS, 1)[rank])
    receiving, sending = [], deque[dist.Work | None]([None] * len(buffers))
    for step in range(1, RANKS):
        to, giver = (rank + step) % RANKS, (rank - step) % RANKS
        for number, (source, target) in enumerate(held):
            receiving.append(dist.irecv(target.chunk(RANKS)[giver], giver))
            buffer = buffers[((step - 1) * len(held) + number) % len(buffers)]
            if (last := sending.popleft()) is not None:  # the message that used this buffer before
                last.wait()
            sending.append(dist.isend(buffer.copy_(source.chunk(RANKS, 1)[to]), to))
    for work in (*receiving, *sending):
        if work is not None:
            work.wait()


def through_files(folder: Path, source: dict[str, DTensor], target: dict[str, DTensor]) -> None:
    """Save with DCP to host memory, and load again."""
    save(dict(source), checkpoint_id=folder)
    load(dict(target), checkpoint_id=folder)


def plan() -> dict[str, object]:
    """Return the seconds and the bytes that one rank needs to plan a move of 1 T parameters."""
    table = tuple((f"model:{name}", torch.bfloat16, shape) for name, shape in shapes())
    claims = [((rank,), Claims.of_boxes(table, held(rank))) for rank in range(GIVERS)]
    told = sum(len(claim.boxes()) for _, claim in claims) + len(claims[0][1].table())
    begin = time.process_time()
    tensors = merge_claims(claims)
    merged = time.process_time()
    wanted = [
        Wanted(number, Sharding(table[number][2], (Box(start, size, 0, size, (0,)),)), torch.bfloat16, 0)
        for number, start, size in filled(5)
    ]
    requests = PieceRequests(tensors, wanted, GIVERS + 5, [rank // 8 for rank in range(GIVERS + TAKERS)])
    asked = sum(len(Claims(tensors=(), rows=requests.rows_to(giver)).boxes()) for giver in requests.givers)
    requested = time.process_time()
    order = by_shape((tensor.key, tensor.dtype, tensor.shape) for tensor in tensors)
    pieces = sum(len(pieces_of(requests.rows_to(giver), tensors, order)) for giver in requests.givers)
    listed = time.process_time()
    return {
        "tensors": len(tensors),
        "claims of all ranks, kB": f"{told / 1e3:.0f}",
        "requests of one rank, kB": f"{asked / 1e3:.0f}",
        "merge, s": f"{merged - begin:.2f}",
        "requests, s": f"{requested - merged:.2f}",
        "pieces": pieces,
        "list of pieces, s": f"{listed - requested:.2f}",
    }


def shapes() -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of a model such as Kimi K2."""
    for layer in range(LAYERS):
        for name, shape in {
            "up": (EXPERTS, WIDE, HIDDEN),
            "gate": (EXPERTS, WIDE, HIDDEN),
            "down": (EXPERTS, HIDDEN, WIDE),
            "q": (12288, HIDDEN),
            "o": (HIDDEN, 8192),
            "kv": (576, HIDDEN),
            "kv_b": (16384, 512),
            "router": (EXPERTS, HIDDEN),
            "norm1": (HIDDEN,),
            "norm2": (HIDDEN,),
        }.items():
            yield f"layers.{layer}.{name}", shape
    yield "embed", (VOCABULARY, HIDDEN)
    yield "head", (VOCABULARY, HIDDEN)


def held(rank: int) -> Held:
    """Yield number, start and size of what a giver holds of each tensor."""
    expert, part = divmod(rank, 4)
    for number, (_, shape) in enumerate(shapes()):
        if len(shape) == 3:
            yield number, (expert * EXPERTS // 64, part * shape[1] // 4, 0), (EXPERTS // 64, shape[1] // 4, shape[2])
            continue
        low, high = rank * shape[0] // GIVERS, (rank + 1) * shape[0] // GIVERS
        if low < high:
            yield number, (low, *[0] * (len(shape) - 1)), (high - low, *shape[1:])


def filled(rank: int) -> Held:
    """Yield number, start and size of what a taker fills of each tensor."""
    column = rank % 8
    for number, (_, shape) in enumerate(shapes()):
        if len(shape) == 3:
            yield number, (rank * EXPERTS // TAKERS, 0, 0), (EXPERTS // TAKERS, *shape[1:])
        elif len(shape) == 2:
            yield number, (0, column * shape[1] // 8), (shape[0], shape[1] // 8)
        else:
            yield number, (0,), shape


if __name__ == "__main__":
    main()
