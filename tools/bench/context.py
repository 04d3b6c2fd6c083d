"""Attention over a sequence that is cut across two gloo ranks, beside torch's on one process, and another library's.

Forward and backward of one attention. Contenders take turns in the same processes, in another order each time, and each
case has processes of its own; ratios are medians over the turns. Run as `python tools/bench/context.py`; takes ten
minutes, and writes docs/benchmarks/context.md and .json. Names of cases as arguments (`memory` is one) measure these
alone, and `--turns` says how often; a part is printed, not written.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _ranks import spawned
from _table import Section, table, write_sections
from _turns import quartile, ratio, shuffled
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from par_groups import ProcessGroups, Topology
from par_layers import Context, Mask, Tokens

CORES, HEADS, HEAD = 2, 8, 64
WARM_UPS = 2

REFERENCE, DENSE, THEIRS = "one process", "one process, torch with the dense mask", "ring-attention-pytorch"


@dataclass(frozen=True, kw_only=True)
class Case:
    """An attention, and who computes it.

    Args:
        length: Number of tokens of the only row.
        key_heads: Number of key heads, for eight heads of 64.
        mask: What a token sees.
        documents: Whether the row is packed with documents of lognormal lengths, a twelfth of it in the mean.
        ranks: Number of ranks.
        ours: Modes and cuts that are compared.
        theirs: Whether the other library computes it too.
    """

    length: int
    key_heads: int
    mask: Mask
    documents: bool = False
    ranks: int = 2
    ours: tuple[tuple[str, str], ...] = (("gather", "auto"), ("ring", "auto"), ("ulysses", "auto"))
    theirs: bool = False


CAUSAL, FULL = Mask(causal=True), Mask()

CASES = {
    "causal, 4096": Case(length=4096, key_heads=8, mask=CAUSAL, theirs=True),
    "full, 4096": Case(length=4096, key_heads=8, mask=FULL, theirs=True),
    "causal, 8192, 2 key heads": Case(length=8192, key_heads=2, mask=CAUSAL),
    "window 512 of 8192, 2 key heads": Case(length=8192, key_heads=2, mask=Mask(causal=True, window=512)),
    "packed, 8192, 2 key heads": Case(
        length=8192,
        key_heads=2,
        mask=CAUSAL,
        documents=True,
        ours=(("gather", "auto"), ("gather", "zigzag"), ("ring", "zigzag"), ("ulysses", "auto")),
    ),
    "causal, 1024": Case(length=1024, key_heads=8, mask=CAUSAL, theirs=True),
    "causal, 4096, 2 key heads, 4 ranks": Case(length=4096, key_heads=2, mask=CAUSAL, ranks=4),
}


MEMORY = ((1, "gather", 8192), (2, "gather", 16_384), (2, "ring", 16_384), (4, "gather", 32_768))
"""Ranks, mode, and length of the row, whose parts are equally long."""

BLOCKS, WIDTH = 4, 256


def main() -> None:
    """Measures, and writes medians, quartiles and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CASES, "memory"]
    parser.add_argument("cases", nargs="*", metavar="case", help=f"cases: {'; '.join(names)}")
    parser.add_argument("--turns", type=int, default=9, metavar="NUMBER", help="how often every contender runs")
    given = parser.parse_args()
    unknown = [name for name in given.cases if name not in names]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; there are {'; '.join(names)}")
    if not find_spec("ring_attention_pytorch"):
        parser.error("ring-attention-pytorch is not installed, which is a contender; run `nox -s bench -- context`")
    rows = [row for name in given.cases or CASES if name in CASES for row in times(name, CASES[name], given.turns)]
    held = memory() if "memory" in (given.cases or names) else []
    if given.cases:
        print("\n".join([*(table(rows) if rows else []), "", *(table(held) if held else [])]))
        return
    of_time = (
        f"Forward and backward of one attention, fp32, one row, {HEADS} heads of {HEAD}, on gloo ranks with one thread "
        f"each. One process is torch's attention, document by document where the row is packed; with a window it is "
        "our own attention on one rank. A share of its time is a half, as there are two cores, however many ranks, and "
        "1.00 is the ideal; a share of its CPU time is that of a rank. Times are those of the slowest rank, medians of "
        f"{given.turns} turns; ratios are medians of the ratios within a turn. Waits is the share of its time in which "
        f"the rank that waits most computes nothing. {THEIRS} is version 0.5.20."
    )
    of_memory = (
        f"A step of {BLOCKS} blocks of width {WIDTH} with 4 heads and 2 key heads, fp32, causal, each rank with 8192 "
        "tokens of one row: what its process needs at most over what it had before, of the rank that needs most."
    )
    sections = [
        Section(title="Time", note=of_time, rows=rows),
        Section(title="Memory", note=of_memory, rows=held),
    ]
    write_sections("context", "Attention over a sequence that is cut", sections)


def times(name: str, case: Case, turns: int) -> list[dict[str, object]]:
    """A row for each contender of a case."""
    plain: dict[str, list[tuple[float, float, float]]] = spawned(case.ranks, timed, name, case, turns)
    measured = {each: [Turn(*turn) for turn in of_contender] for each, of_contender in plain.items()}
    wall = {each: [turn.seconds for turn in of_contender] for each, of_contender in measured.items()}
    spent = {each: [turn.processor for turn in of_contender] for each, of_contender in measured.items()}
    rows: list[dict[str, object]] = []
    for each, of_contender in measured.items():
        alone = each in {REFERENCE, DENSE}
        share, least = (1, 1) if alone else (CORES, case.ranks)
        rows.append(
            {
                "case": name,
                "contender": each,
                "median ms": f"{1000 * statistics.median(wall[each]):.0f}",
                "quartiles ms": f"{1000 * quartile(wall[each], 1):.0f} to {1000 * quartile(wall[each], 3):.0f}",
                "to its share of one process": f"{share * ratio(wall[each], wall[REFERENCE]):.2f}",
                "CPU to its share": f"{least * ratio(spent[each], spent[REFERENCE]):.2f}",
                "waits": "" if alone else f"{100 * statistics.median(turn.waits for turn in of_contender):.0f}%",
            }
        )
    return rows


def memory() -> list[dict[str, object]]:
    """A row for each number of ranks."""
    rows: list[dict[str, object]] = []
    alone = 0.0
    for ranks, mode, length in MEMORY:
        needed: float = spawned(ranks, peak, mode, length)
        alone = alone or needed
        rows.append(
            {
                "ranks": ranks,
                "mode": "" if ranks == 1 else mode,
                "tokens": length,
                "peak MiB": f"{needed:.0f}",
                "to one rank": f"{needed / alone:.2f}",
            }
        )
    return rows


def peak(mode: str, length: int) -> float:
    """MiB that a step needs over what the process had before, of the rank that needs most; on Linux."""
    ranks = dist.get_world_size()
    context = Context(ProcessGroups(Topology.from_config({"sequence": ranks}, ranks)), mode=mode)
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(context) for _ in range(BLOCKS))
    for tokens in (ranks * 64, length):  # a small step first, for what is made once
        x = torch.randn(1, tokens // ranks, WIDTH, requires_grad=True)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        before = resident("VmHWM")
        for block in blocks:
            x = block(x)
        x.square().mean().backward()
        needed = torch.tensor(resident("VmHWM") - before)
    dist.all_reduce(needed, op=dist.ReduceOp.MAX)
    return float(needed)


def resident(which: str) -> float:
    """MiB of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(which))


class Block(nn.Module):
    """Attention and an MLP, each with a norm before."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream [1, s, WIDTH]."""
        q, k, v = (part.unflatten(2, (-1, HEAD)) for part in self.qkv(self.norms[0](x)).split([WIDTH, 128, 128], 2))
        x = x + self.out(self.context.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Turn(NamedTuple):
    """What one contender took in one turn, of the rank that took most.

    Args:
        seconds: Seconds by the clock.
        processor: Seconds of the processor, over all threads.
        waits: The share of the seconds in which the main thread did not compute.
    """

    seconds: float
    processor: float
    waits: float


def timed(name: str, case: Case, turns: int) -> Mapping[str, list[tuple[float, ...]]]:
    """All turns by contender, each a `Turn`."""
    runs = contenders(case)
    found: dict[str, list[Turn]] = {each: [] for each in runs}
    progress = tqdm(total=turns, desc=name, unit="turn", disable=dist.get_rank() > 0)
    for turn in range(-WARM_UPS, turns):
        for each in shuffled(list(runs), turn):
            dist.barrier()
            begin, spent, computed = time.perf_counter(), time.process_time(), time.thread_time()
            runs[each]()
            seconds = time.perf_counter() - begin
            waits = 1 - (time.thread_time() - computed) / seconds
            taken = torch.tensor([seconds, time.process_time() - spent, waits], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if turn >= 0:
                found[each].append(Turn(*taken.tolist()))
        progress.update(turn >= 0)
    progress.close()
    return {each: [tuple(turn) for turn in turns] for each, turns in found.items()}  # as torch.load takes them


def contenders(case: Case) -> dict[str, Callable[[], object]]:
    """One step of each."""
    documents = lengths(case.length, case.length / 12) if case.documents else [case.length]
    groups = ProcessGroups(Topology.from_config({"sequence": case.ranks}, case.ranks))
    whole = numbers(case.length, case.key_heads)
    here = Context(None)
    steps: dict[str, Callable[[], object]] = {}
    if case.mask.window is None:
        steps[REFERENCE] = on_one(lambda q, k, v: by_document(q, k, v, documents, causal=case.mask.causal), whole)
    else:
        steps[REFERENCE] = on_one(ours(here, here.tokens(case.length), case.mask), whole)
        place = torch.arange(case.length)
        far = place[:, None] - place
        visible = (far >= 0) & (far < case.mask.window)
        steps[DENSE] = on_one(lambda q, k, v: attend(q, k, v, attn_mask=visible), whole)
    for mode, cut in case.ours:
        context = Context(groups, mode=mode, cut=cut)
        tokens = context.tokens(case.length, documents=documents, masks=(case.mask,))
        index = torch.from_numpy(tokens.index(dist.get_rank()))
        local = tuple(x.detach()[:, index].requires_grad_() for x in whole)
        steps[mode if cut == "auto" else f"{mode}, {cut}"] = step(ours(context, tokens, case.mask), local)
    if case.theirs:
        part = slice(*tokens_of_rank(case.length, case.ranks))
        local = tuple(x.detach()[:, part].contiguous().requires_grad_() for x in whole)
        steps[THEIRS] = step(theirs(causal=case.mask.causal), local)
    return steps


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(context: Context, tokens: Tokens, mask: Mask) -> Attention:
    """Attention of a context, over one cut."""
    return lambda q, k, v: context.attention(q, k, v, tokens, mask=mask)


def theirs(*, causal: bool) -> Attention:
    """The other library's."""
    attention: Any = import_module("ring_attention_pytorch").ring_flash_attn
    return lambda q, k, v: attention(q, k, v, causal=causal, bucket_size=512, ring_reduce_col=True)


def by_document(q: Tensor, k: Tensor, v: Tensor, documents: list[int], *, causal: bool) -> Tensor:
    """Torch's attention, of one document after the other."""
    parts = zip(*(x.split(documents, 1) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*part, is_causal=causal) for part in parts], 1)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Torch's attention, of [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


def on_one(attention: Attention, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """A step of the first rank, while the others wait for it and compute nothing."""
    run = step(attention, inputs)
    return run if dist.get_rank() == 0 else lambda: None


def step(attention: Attention, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Forward and backward."""
    gradient = torch.ones_like(inputs[0])

    def run() -> None:
        attention(*inputs).backward(gradient)
        for each in inputs:
            each.grad = None

    return run


def numbers(length: int, key_heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of the whole row, the same on all ranks."""
    torch.manual_seed(0)
    return tuple(torch.randn(1, length, heads, HEAD).requires_grad_() for heads in (HEADS, key_heads, key_heads))


def tokens_of_rank(length: int, ranks: int) -> tuple[int, int]:
    """The contiguous part of this rank."""
    part = length // ranks
    return dist.get_rank() * part, (dist.get_rank() + 1) * part


def lengths(length: int, mean: float) -> list[int]:
    """Lognormal lengths of documents that fill a row."""
    drawn, found, left = random.Random(0), list[int](), length
    while left:
        found.append(min(left, max(1, round(drawn.lognormvariate(0, 1) * mean / 1.65))))  # exp(1/2) is the mean of e^N
        left -= found[-1]
    return found


if __name__ == "__main__":
    main()
