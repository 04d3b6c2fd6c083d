"""What it costs to move a model into another sharding in memory: `reshard`, DCP through tmpfs, and raw messages.

Four gloo ranks hold DTensors by rows and fill DTensors by columns. The contenders run in one process group, in a drawn
order. Raw messages send as many bytes between the same ranks as the move must, from one contiguous buffer for each
peer. The plan is that of one rank of a simulated world: 1 T parameters of a mixture of experts, from 256 ranks to 128.
Run as `python tools/bench/moving.py`; writes docs/benchmarks/moving.md and .json.
"""

import shutil
import statistics
import time
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

RANKS, TENSORS, SHAPE, TURNS = 4, 8, (2048, 4096), 9
GIVERS, TAKERS, LAYERS, EXPERTS, WIDE, HIDDEN, VOCABULARY = 256, 128, 60, 384, 2048, 7168, 163840
MOVE, RAW, FILES = "reshard", "raw messages of the same bytes", "DCP through tmpfs"

Shape = tuple[int, ...]
Held = Iterator[tuple[int, Shape, Shape]]


def main() -> None:
    """Measure both and write the page."""
    taken, received = spawned(RANKS, measure)
    bytes_ = torch.Size(SHAPE).numel() * 4
    moving = [
        {
            "contender": name,
            "median ms": f"{1e3 * statistics.median(seconds):.0f}",
            "quartiles": f"{1e3 * quartile(seconds, 1):.0f} to {1e3 * quartile(seconds, 3):.0f}",
            "time relative to raw messages (lower is better)": f"{ratio(seconds, taken[RAW]):.2f}",
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
                "turn runs the contenders in a random order. The ratio is the median over the turns. Other jobs used "
                "the machine at the same time."
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


def measure() -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each contender in each turn, of the slowest rank, and the bytes that rank 0 received."""
    mesh = init_device_mesh("cpu", (RANKS,))
    rank = dist.get_rank()
    source = {
        f"t{number}": distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)], src_data_rank=None)
        for number in range(TENSORS)
    }
    target = {name: distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)], src_data_rank=None) for name in source}
    size = TENSORS * torch.Size(SHAPE).numel() // RANKS**2
    leaving, arriving = torch.ones(RANKS, size), torch.ones(RANKS, size)
    folder = Path("/dev/shm/par-bench-moving")
    found: dict[str, list[float]] = {MOVE: [], RAW: [], FILES: []}
    acts: dict[str, Callable[[], object]] = {
        MOVE: lambda: reshard(State(model=source), State(model=target)).received,
        RAW: partial(raw, rank, leaving, arriving),
        FILES: partial(through_files, folder, source, target),
    }
    received = 0
    for turn in range(-1, TURNS):  # one to warm up
        for name in shuffled(list(acts), turn):
            dist.barrier()
            begin = time.perf_counter()
            outcome = acts[name]()
            seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn >= 0:
                found[name].append(seconds.item())
            if name == MOVE and isinstance(outcome, int):
                received = outcome
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return found, received


def raw(rank: int, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
    """Send a row of a buffer to each other rank, and receive one from it."""
    for step in range(1, RANKS):
        to, source = (rank + step) % RANKS, (rank - step) % RANKS
        works = [dist.irecv(arriving[source], source), dist.isend(leaving[to], to)]
        for work in works:
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
