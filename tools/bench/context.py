"""Attention over a sequence that is cut across two gloo ranks, beside torch's on one process, and another library's.

Forward and backward of one attention. Contenders take turns in the same processes, in another order each time, and each
case has processes of its own; ratios are medians over the turns. Run as `python tools/bench/context.py`; takes fifteen
minutes, and writes docs/benchmarks/context.md and .json. Names of cases as arguments (`memory` and `longest` are two)
measure these alone, and `--turns` says how often; a part is printed, not written.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from _ranks import spawned
from _table import Section, table, write_sections
from _turns import chosen_cases, quartile, ratio, shuffled
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from par_groups import ProcessGroups, Topology
from par_layers import AttentionShape, Context, Mask, Tokens, layer_cost
from par_layers._collectives import finish
from par_layers.context.kernels.choose import choose_kernels
from par_layers.context.modes import gather, ring
from par_layers.context.modes.attention import CPU_BLOCK
from par_layers.context.steps import PieceStep

CORES, HEADS, HEAD = 2, 8, 64
WARM_UPS = 2

REFERENCE, DENSE, THEIRS = "one process", "one process, torch with the dense mask", "ring-attention-pytorch"
AT_ONCE, BARE = ", waiting at once", ", bare"


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
        dense: The window, if one process computes it with the dense mask too, whose memory the others would feel.
        at_once: Whether gather and ring are also measured when they wait for each message as soon as it has begun.
    """

    length: int
    key_heads: int
    mask: Mask
    documents: bool = False
    ranks: int = 2
    ours: tuple[tuple[str, str], ...] = (("gather", "auto"), ("ring", "auto"), ("ulysses", "auto"))
    theirs: bool = False
    dense: int | None = None
    at_once: bool = False


CAUSAL, FULL = Mask(causal=True), Mask()

CASES = {
    "causal, 4096": Case(length=4096, key_heads=8, mask=CAUSAL, theirs=True),
    "full, 4096": Case(length=4096, key_heads=8, mask=FULL, theirs=True),
    "causal, 8192, 2 key heads": Case(length=8192, key_heads=2, mask=CAUSAL),
    "window 512 of 8192, 2 key heads": Case(length=8192, key_heads=2, mask=Mask(causal=True, window=512)),
    "window 512 of 8192, dense": Case(length=8192, key_heads=2, mask=Mask(causal=True, window=512), ours=(), dense=512),
    "packed, 8192, 2 key heads": Case(
        length=8192,
        key_heads=2,
        mask=CAUSAL,
        documents=True,
        ours=(("gather", "auto"), ("gather", "zigzag"), ("ring", "zigzag"), ("ulysses", "auto")),
    ),
    "causal, 2048": Case(length=2048, key_heads=8, mask=CAUSAL, at_once=True),
    "causal, 1024": Case(length=1024, key_heads=8, mask=CAUSAL, theirs=True),
    "causal, 4096, 2 key heads, 4 ranks": Case(length=4096, key_heads=2, mask=CAUSAL, ranks=4),
}


MEMORY = (
    *((1, "gather", length) for length in (2048, 4096, 8192)),
    *((2, "gather", length) for length in (4096, 8192, 16_384)),
    (2, "ring", 16_384),
    *((4, "gather", length) for length in (8192, 16_384, 32_768)),
)
"""Ranks, mode, and length of the row; those of one rank come first."""

LONGEST, FINEST = 4096, 64
"""How many tokens one rank trains with the memory that all ranks are given, and what lengths are multiples of."""

BLOCKS, WIDTH = 4, 256


def main() -> None:
    """Measures, and writes medians, quartiles and ratios."""
    names = [*CASES, "memory", "longest"]
    chosen = chosen_cases(__doc__, names, 9, bench="context", contender="ring-attention-pytorch")
    rows = [row for name in chosen.cases or CASES if name in CASES for row in times(name, CASES[name], chosen.turns)]
    held = memory() if "memory" in (chosen.cases or names) else []
    reached = longest() if "longest" in (chosen.cases or names) else []
    if chosen.cases:
        print("\n\n".join("\n".join(table(found)) for found in (rows, held, reached) if found))
        return
    of_time = (
        f"Forward and backward of one attention call: fp32, one sequence, {HEADS} heads of {HEAD} features, gloo "
        f"ranks with one thread each. Times are those of the slowest rank, medians of {chosen.turns} rounds; "
        "ratios are medians of the ratios within a round. Lower is better in all columns. The baseline *one "
        "process* is torch's attention, called once per document if the sequence is packed. With a window it is "
        "par's attention on one rank. The machine has two cores, so the ideal time of any number of ranks is half "
        "of the baseline's, which the table shows as 1.00. The ideal CPU time of a rank is the baseline's divided "
        "by the number of ranks. *Bare* is the lower bound of a mode on this machine, measured in the same "
        "rounds: the same number of bytes in as few messages, then the same kernels, on all ranks at once. It "
        "adds and copies nothing, except for one copy of each message of ulysses, from the order of tokens to the "
        "order of heads or back. *Waits* is the part of its time in which a rank computes nothing, for the rank "
        f"that waits most. {THEIRS} is version 0.5.20."
    )
    of_memory = (
        f"Peak memory of a training step of {BLOCKS} causal blocks (width {WIDTH}, 4 heads, 2 key heads, fp32) on "
        "one sequence that all ranks share. Each number is the growth of a process during the step, for the rank "
        "that grows most."
    )
    of_longest = (
        f"The longest sequence whose step needs no more memory on any rank than one rank needs for {LONGEST} "
        f"tokens, and its ratio to {LONGEST} tokens per rank (higher is better). The search begins there and takes "
        f"{FINEST} tokens per rank less each time."
    )
    sections = [
        Section(title="Time", note=of_time, rows=rows),
        Section(title="Memory", note=of_memory, rows=held),
        Section(title="Longest sequence", note=of_longest, rows=reached),
    ]
    write_sections("context", "Context parallelism: time and memory", sections)


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
                "to its bare self": f"{ratio(wall[each], wall[bound]):.2f}" if (bound := limit(each)) in wall else "",
                "CPU to its share": f"{least * ratio(spent[each], spent[REFERENCE]):.2f}",
                "waits": "" if alone else f"{100 * statistics.median(turn.waits for turn in of_contender):.0f}%",
            }
        )
    return rows


def limit(contender: str) -> str:
    """Which contender is the limit of another one."""
    return contender.removesuffix(AT_ONCE) + BARE


def memory() -> list[dict[str, object]]:
    """A row for each number of ranks and length."""
    rows: list[dict[str, object]] = []
    alone: dict[int, float] = {}
    for ranks, mode, length in tqdm(MEMORY, desc="memory", unit="case"):
        needed: float = spawned(ranks, peak, mode, length)
        alone.setdefault(length // ranks, needed)
        rows.append(
            {
                "ranks": ranks,
                "mode": "" if ranks == 1 else mode,
                "tokens": length,
                "peak MiB": f"{needed:.0f}",
                "to one rank with its tokens": f"{needed / alone[length // ranks]:.2f}",
            }
        )
    return rows


def longest() -> list[dict[str, object]]:
    """A row for each number of ranks and mode: the longest row whose step needs no more than one rank's does."""
    limit = spawned(1, peak, "gather", LONGEST)
    rows: list[dict[str, object]] = []
    for ranks, mode in ((2, "gather"), (2, "ring"), (4, "gather"), (4, "ring")):
        part, needed = LONGEST, spawned(ranks, peak, mode, ranks * LONGEST)
        while needed > limit:
            part -= FINEST
            needed = spawned(ranks, peak, mode, ranks * part)
        rows.append(
            {
                "ranks": ranks,
                "mode": mode,
                "longest": ranks * part,
                "to linear": f"{part / LONGEST:.2f}",
                "peak MiB": f"{needed:.0f}",
                "one rank's MiB": f"{limit:.0f}",
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
    documents = documents_of(case)
    groups = ProcessGroups(Topology.from_config({"sequence": case.ranks}, case.ranks))
    whole = numbers(case.length, case.key_heads)
    here = Context(None)
    steps: dict[str, Callable[[], object]] = {}
    if case.mask.window is None:
        steps[REFERENCE] = on_one(lambda q, k, v: by_document(q, k, v, documents, causal=case.mask.causal), whole)
    else:
        steps[REFERENCE] = on_one(ours(here, here.tokens(case.length), case.mask), whole)
    if case.dense is not None:
        place = torch.arange(case.length)
        far = place[:, None] - place
        visible = (far >= 0) & (far < case.dense)
        steps[DENSE] = on_one(lambda q, k, v: attend(q, k, v, attn_mask=visible), whole)
    for mode, cut in case.ours:
        context = Context(groups, mode=mode, split=cut)
        tokens = context.tokens(case.length, documents=documents, masks=(case.mask,))
        index = torch.from_numpy(tokens.index(dist.get_rank()))
        local = tuple(x.detach()[:, index].requires_grad_() for x in whole)
        contender = mode if cut == "auto" else f"{mode}, {cut}"
        steps[contender] = step(ours(context, tokens, case.mask), local)
        steps[contender + BARE] = bare(
            mode, case, tokens, layer_cost(mode, {"sequence": case.ranks}, shape(case, cut)).each
        )
        if case.at_once and mode != "ulysses":  # which has nothing to compute meanwhile
            steps[contender + AT_ONCE] = waiting(steps[contender])
    if case.theirs:
        part = slice(*tokens_of_rank(case.length, case.ranks))
        local = tuple(x.detach()[:, part].contiguous().requires_grad_() for x in whole)
        steps[THEIRS] = step(theirs(causal=case.mask.causal), local)
    return steps


def shape(case: Case, cut: str) -> AttentionShape:
    """A case as `layer_cost` takes it."""
    return AttentionShape(
        tokens=case.length,
        width=HEADS * HEAD,
        key_width=case.key_heads * HEAD,
        mask=case.mask,
        documents=documents_of(case),
        heads=HEADS,
        key_heads=case.key_heads,
        split=cut,  # type: ignore[arg-type]
    )


def bare(mode: str, case: Case, tokens: Tokens, received: Fraction) -> Callable[[], None]:
    """The limit of a mode: its elements in as few messages as it has, then the calls of its kernels; nothing else.

    No partial result is added up, nothing is copied, and autograd takes no part. With ulysses what is sent or has
    arrived is copied once, between the order of tokens and that of heads, into memory that is there.
    """
    rank, inner = (0, case.ranks) if mode == "ulysses" else (dist.get_rank(), 1)
    heads, key_heads = HEADS // inner, max(1, case.key_heads // inner)
    head = torch.empty(1, 1, 1, HEAD)
    kernels = choose_kernels(head, head)
    plan_of = ring.plan_ring if mode == "ring" else gather.plan_gather
    plan = plan_of(case.mask, tokens.merged(inner), rank, CPU_BLOCK, kernels.joins)
    torch.manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, case.length, number, HEAD) for number in (heads, key_heads, key_heads))
    upstream, out, lse = torch.ones_like(q), torch.zeros_like(q), torch.zeros(1, heads, case.length)
    calls = [told for buffer in plan.works[0].buffers for told in buffer]
    number = {"gather": 3, "ring": 3 * (case.ranks - 1), "ulysses": 4}[mode]
    message = torch.ones(case.ranks, max(1, round(received / number / max(1, case.ranks - 1))))
    arrived = torch.empty_like(message)

    def call(told: PieceStep, *, forward: bool) -> None:
        q0, q1, k0, k1, kind, *_ = told.piece
        kernel = kernels.of(kind)
        rows, given = slice(q0, q1), (q[:, q0:q1], k[:, k0:k1], v[:, k0:k1])
        options: Any = {"visible": plan.masks.visible(told, q, biased=kind in kernel.biased), "scale": HEAD**-0.5}
        if forward:
            kernel.forward(*given, **options)
        else:
            kernel.backward(upstream[:, rows], *given, out[:, rows], lse[:, :, rows], **options)

    by_token = torch.ones(case.length // case.ranks, case.ranks, arrived.numel() // case.length)
    by_head = torch.empty_like(by_token.transpose(0, 1).contiguous())

    def run() -> None:
        for _ in range(number):
            dist.all_to_all_single(arrived, message)
            if mode == "ulysses":
                by_head.copy_(by_token.transpose(0, 1))
        for forward in (True, False):
            for told in calls:
                call(told, forward=forward)

    return run


def waiting(run: Callable[[], object]) -> Callable[[], None]:
    """A step of gather or ring that waits for each message as soon as it has begun."""

    def run_and_wait() -> None:
        with waits_at_once():
            run()

    return run_and_wait


@contextmanager
def waits_at_once() -> Iterator[None]:
    """Gather and ring wait for each message as soon as it has begun."""
    begin, begin_home, send = gather.KeyExchange.start, gather.KeyExchange.start_home, dist.batch_isend_irecv

    def start(self: gather.KeyExchange, *given: Any) -> list[Tensor]:
        message, arriving = begin(self, *given)
        return [message, finish(arriving)]

    def start_home(self: gather.KeyExchange, *given: Any) -> tuple[Tensor, Tensor]:
        message, arriving = begin_home(self, *given)
        return message, finish(arriving)

    def exchange(batch: list[dist.P2POp]) -> list[dist.Work]:
        for work in send(batch):
            work.wait()
        return []

    with (
        mock.patch.object(gather.KeyExchange, "start", start),
        mock.patch.object(gather.KeyExchange, "start_home", start_home),
        mock.patch.object(dist, "batch_isend_irecv", exchange),
    ):
        yield


def documents_of(case: Case) -> list[int]:
    """The lengths of the documents of a case's row."""
    return lengths(case.length, case.length / 12) if case.documents else [case.length]


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
