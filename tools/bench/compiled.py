"""A training step with compiled blocks under par-zero and FSDP2, on gloo ranks of one machine.

Each contender's blocks are eager or compiled one by one, by the inductor's CPU backend. All contenders live in the same
processes and take turns, each turn in another order; ratios are medians over the turns. Run as
`python tools/bench/compiled.py`, on a machine with a C++ compiler; writes docs/benchmarks/compiled.md and .json.
`--turns 2` is a quick look, and writes nothing.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from _ranks import spawned, world
from _table import write
from _transformer import Block
from _turns import quartile, ratio, shuffled
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from par_zero import shard

Trained = tuple[nn.Module, Optimizer]

RANKS, BLOCKS, WIDTH, HEADS, ROWS, TOKENS, TURNS = 2, 8, 256, 8, 4, 64, 20

REFERENCE = "FSDP2, compiled blocks"


def main() -> None:
    """Measures all contenders, and writes medians, quartiles and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS, metavar="NUMBER", help="how often every contender runs")
    turns = parser.parse_args().turns
    rows = rows_of(spawned(RANKS, timed, turns))
    note = (
        f"{BLOCKS} blocks of a decoder, {WIDTH} wide, {ROWS} x {TOKENS} tokens a rank, {RANKS} ranks, fp32, "
        f"fused AdamW, gloo, one thread a rank, {turns} turns. Compiled blocks are compiled one by one with the "
        "inductor, as torchtitan does. Times are those of the slowest rank, per step; contenders take turns in the "
        "same processes, each turn in another order. The ratio is the median of the ratios to FSDP2 with compiled "
        "blocks within a turn (lower is better). Graphs are those of the forward of all blocks: one, because "
        "the blocks share it."
    )
    if turns < TURNS:
        print(*rows, sep="\n")
    else:
        write("compiled", "Compiled blocks", rows, note)


def rows_of(measured: tuple[Sequence[dict[str, float]], dict[str, int]]) -> list[dict[str, object]]:
    """The table."""
    turns, graphs = measured
    rows: list[dict[str, object]] = []
    for name in contenders():
        times = [turn[name] for turn in turns]
        rows.append(
            {
                "contender": name,
                "median ms": f"{statistics.median(times):.1f}",
                "quartiles ms": f"{quartile(times, 1):.1f} to {quartile(times, 3):.1f}",
                "ratio": f"{ratio(times, [turn[REFERENCE] for turn in turns]):.2f}",
                "graphs": graphs[name] or "",
            }
        )
    return rows


def contenders() -> dict[str, Callable[[Callable[[], None]], Trained]]:
    """Contenders by name: functions that make one. They call their argument for each graph."""
    made: dict[str, Callable[[Callable[[], None]], Trained]] = {}
    for compiles in (False, True):
        kind = "compiled blocks" if compiles else "eager blocks"
        made[f"FSDP2, {kind}"] = partial(fully_sharded, compiles=compiles)
        for stage in range(4):
            made[f"stage {stage}, {kind}"] = partial(ours, stage, compiles=compiles)
    return made


def stack(note: Callable[[], None], *, compiles: bool) -> nn.Sequential:
    """The model. A list of modules stays eager around its compiled blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(WIDTH, HEADS) for _ in range(BLOCKS)))
    backend = partial(counted, note)  # blocks share graphs only if their backend is one object
    for block in list(model)[1:] if compiles else ():
        block.compile(backend=backend, fullgraph=True)
    return model


def counted(note: Callable[[], None], graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
    """Compiles a graph with the inductor, and counts it."""
    note()
    compile_graph: Callable[..., Callable[..., object]] = torch._dynamo.lookup_backend("inductor")
    return compile_graph(graph, inputs)


def fully_sharded(note: Callable[[], None], *, compiles: bool) -> Trained:
    """FSDP2, a unit for each block."""
    model = stack(note, compiles=compiles)
    for block in list(model)[1:]:
        fully_shard(block)
    fully_shard(model)
    return model, AdamW(model.parameters(), lr=1e-4, fused=True)


def ours(stage: int, note: Callable[[], None], *, compiles: bool) -> Trained:
    """par-zero with its defaults."""
    model = stack(note, compiles=compiles)
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    shard(model, optimizer, stage=stage, group=world())
    return model, optimizer


def timed(turns: int) -> tuple[list[dict[str, float]], dict[str, int]]:
    """What a step of each contender takes, turn by turn, and how many graphs each has compiled."""
    graphs: dict[str, int] = {}

    def note(name: str) -> None:
        graphs[name] += 1

    made: dict[str, Trained] = {}
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for name, make in contenders().items():
        graphs[name] = 0
        torch.compiler.reset()  # all blocks have one code, and graphs of other contenders count against its limit
        made[name] = make(partial(note, name))
        step(made[name], x)
    torch.compiler.reset()  # each reset has dropped the graphs of the contenders before
    graphs.update(dict.fromkeys(graphs, 0))
    return [{name: taken(made[name], x) for name in shuffled(list(made), turn)} for turn in range(turns + 1)][
        1:
    ], graphs


def step(trained: Trained, x: Tensor) -> None:
    """One training step."""
    module, optimizer = trained
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def taken(trained: Trained, x: Tensor) -> float:
    """Milliseconds of a step on the slowest rank."""
    step(trained, x)
    dist.barrier()
    begin = time.perf_counter()
    step(trained, x)
    longest = torch.tensor((time.perf_counter() - begin) * 1e3)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


if __name__ == "__main__":
    main()
