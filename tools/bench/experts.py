"""A layer of experts on one process and on gloo ranks, beside transformers' and DeepSpeed's, and the least it can take.

Forward and backward of router, dispatch and experts (SwiGLU). Contenders take turns in the same processes, in another
order each time, with one thread a rank. Run as `python tools/bench/experts.py`; takes some minutes, and writes
docs/benchmarks/experts.md and .json. Names of cases as arguments measure these anew and leave the others as they are,
and `--turns` says how often.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _experts_limit import Weights, forward_and_backward
from _ranks import spawned, world
from _table import FOLDER, Section, write_sections
from _turns import chosen_cases, quartile, ratio, shuffled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from tqdm import tqdm
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from par_groups import Channels, ProcessGroups, Topology
from par_layers import Experts, Grid, TokenDispatcher, grouped_linear, initialize
from par_layers.experts import products

OURS, CAPACITY = "par-layers", "par-layers, capacity 1.25"
LIMIT, LIMIT_OF_CAPACITY = "limit, by hand", "limit, by hand, capacity 1.25"
GROUPED, EAGER = "transformers, grouped_mm", "transformers, eager"
NO_DROP, DROP = "DeepSpeed, no drop", "DeepSpeed, capacity 1.25"
WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and its tokens.

    Args:
        ranks: Number of ranks.
        tokens: Number of tokens of each rank.
        hidden: Features of a token.
        intermediate: Features of an expert's activation.
        experts: Number of experts.
        top_k: Number of experts of a token.
        calls: Number of steps in a turn.
        turns: Number of turns for each one that is asked for: more where they are short, so that a pause of the machine
            spoils few of them.
    """

    ranks: int
    tokens: int
    hidden: int
    intermediate: int
    experts: int = 8
    top_k: int = 2
    calls: int = 1
    turns: int = 1


CASES = {
    "one process, 32 tokens, 64 x 64": Case(ranks=1, tokens=32, hidden=64, intermediate=64, calls=20, turns=6),
    "one process, 1024 tokens, 256 x 512": Case(ranks=1, tokens=1024, hidden=256, intermediate=512),
    "one process, 512 tokens, 64 experts of 256 x 64, top 8": Case(
        ranks=1, tokens=512, hidden=256, intermediate=64, experts=64, top_k=8
    ),
    "two ranks, 32 tokens, 64 x 64": Case(ranks=2, tokens=32, hidden=64, intermediate=64, calls=10, turns=6),
    "two ranks, 1024 tokens, 256 x 512": Case(ranks=2, tokens=1024, hidden=256, intermediate=512),
    "four ranks, 32 tokens, 64 x 64": Case(ranks=4, tokens=32, hidden=64, intermediate=64, calls=5, turns=4),
    "four ranks, 512 tokens, 256 x 512": Case(ranks=4, tokens=512, hidden=256, intermediate=512),
}

PRODUCTS = ((8, 256), (8, 32), (8, 8), (64, 32), (64, 8))
"""Experts, and rows of each, whose first product is timed in both ways."""


def main() -> None:
    """Measures, and writes medians, quartiles and ratios."""
    names = [*CASES, "products"]
    chosen = chosen_cases(__doc__, names, 25, bench="experts", contender="deepspeed")
    os.environ["DS_ACCELERATOR"] = "cpu"
    rows, both = ([], []) if not chosen.cases else earlier()
    for name in chosen.cases or CASES:
        if name in CASES:
            rows = [row for row in rows if row["case"] != name] + times(name, CASES[name], chosen.turns)
    rows.sort(key=lambda row: list(CASES).index(str(row["case"])))
    if "products" in (chosen.cases or names):
        both = spawned(1, timed_products, chosen.turns)
    of_layer = (
        "Forward and backward of a complete layer, fp32, SwiGLU: router, dispatch, experts and the sum of outputs, "
        "with gradients of the tokens and of every parameter. The experts are distributed over the ranks. Each rank "
        "has its own tokens and one thread. par-layers and transformers have the same router: a softmax over the "
        "experts, of which the largest weights are normalized. DeepSpeed has its own router, which also computes an "
        "auxiliary loss. The limit is the same arithmetic in one function with a handwritten backward "
        "(`tools/bench/_experts_limit.py`), without autograd, checks and options. Times are those of the slowest "
        f"rank, medians of at least {chosen.turns} turns. `CPU ms` is the mean CPU time of the ranks, without waits. "
        "Use it where the quartiles are wide, because the machine had other work then. `par-layers to it` is "
        "par-layers' time divided by the contender's time, as the median over the turns; below 1.00 par-layers is "
        "faster. A contender with a capacity is compared with par-layers with a capacity. transformers "
        f"{transformers.__version__}, DeepSpeed {version_of('deepspeed')}."
    )
    of_products = (
        "The first matmul of the experts, 256 to 1024 features, fp32, without autograd: one call of `grouped_mm`, and "
        "a loop with one matmul per expert. `ratio` is the loop's time divided by the time of `grouped_mm`; above 1, "
        "`grouped_mm` is faster."
    )
    sections = [
        Section(title="Complete layer", note=of_layer, rows=rows),
        Section(title="Expert matmuls", note=of_products, rows=both),
    ]
    write_sections("experts", "Mixture-of-experts layer", sections)


def earlier() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The rows of both tables that were measured before."""
    layer, both = json.loads((FOLDER / "experts.json").read_text())["sections"]
    return layer["rows"], both["rows"]


def version_of(package: str) -> str:
    """The version of an installed package."""
    return str(import_module("importlib.metadata").version(package))


def times(name: str, case: Case, turns: int) -> list[dict[str, object]]:
    """A row for each contender of a case."""
    passed: Mapping[str, list[float]]
    computed: Mapping[str, list[float]]
    passed, computed = spawned(case.ranks, timed, name, case, turns * case.turns)
    rows: list[dict[str, object]] = []
    for each, seconds in passed.items():
        ours = CAPACITY if each in (DROP, LIMIT_OF_CAPACITY) else OURS
        rows.append(
            {
                "case": name,
                "contender": each,
                "median ms": f"{1000 * statistics.median(seconds):.2f}",
                "quartiles ms": f"{1000 * quartile(seconds, 1):.2f} to {1000 * quartile(seconds, 3):.2f}",
                "par-layers to it": "" if each in (OURS, CAPACITY) else f"{ratio(passed[ours], seconds):.2f}",
                "CPU ms": f"{1000 * statistics.median(computed[each]):.2f}",
                "CPU to it": "" if each in (OURS, CAPACITY) else f"{ratio(computed[ours], computed[each]):.2f}",
            }
        )
    return rows


def timed(name: str, case: Case, turns: int) -> tuple[Mapping[str, list[float]], Mapping[str, list[float]]]:
    """Seconds of a step of every contender in every turn: of the slowest rank, and computed by a rank in the mean."""
    runs = contenders(case)
    passed: dict[str, list[float]] = {each: [] for each in runs}
    computed: dict[str, list[float]] = {each: [] for each in runs}
    progress = tqdm(total=turns, desc=name, unit="turn", disable=dist.get_rank() > 0)
    for turn in range(-WARM_UPS, turns):
        for each in shuffled(list(runs), turn):
            dist.barrier()
            begin, begin_of_cpu = time.perf_counter(), time.process_time()
            for _ in range(case.calls):
                runs[each]()
            taken = torch.tensor((time.perf_counter() - begin) / case.calls, dtype=torch.float64)
            of_cpu = torch.tensor((time.process_time() - begin_of_cpu) / case.calls / case.ranks, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            dist.all_reduce(of_cpu)
            if turn >= 0:
                passed[each].append(float(taken))
                computed[each].append(float(of_cpu))
        progress.update(turn >= 0)
    progress.close()
    return passed, computed


def contenders(case: Case) -> dict[str, Callable[[], object]]:
    """One step of each, over the same tokens, routers and weights of the same sizes."""
    torch.manual_seed(dist.get_rank())
    x, upstream = torch.randn(case.tokens, case.hidden), torch.randn(case.tokens, case.hidden)

    def step(layer: nn.Module) -> Callable[[], object]:
        def run() -> None:
            tokens = x.detach().requires_grad_()
            layer.zero_grad(set_to_none=True)
            layer(tokens).backward(upstream)

        return run

    topology = Topology({"expert_data": 1, "expert_parallel": case.ranks, "expert_tensor": 1}, case.ranks)
    groups = ProcessGroups(topology, declare=[Channels("expert_parallel", 1)])
    runs: dict[str, Callable[[], object]] = {}
    for name, bound, capacity in ((OURS, LIMIT, None), (CAPACITY, LIMIT_OF_CAPACITY, 1.25)):
        ours = Ours(case, groups, capacity)
        runs |= {name: step(ours), bound: limit(ours, x, upstream)}
    runs |= {each: step(Theirs(case, each.rsplit(" ", 1)[1])) for each in (GROUPED, EAGER)}
    if case.ranks == 1 or case.top_k > 2:
        return runs  # DeepSpeed is measured where it exchanges
    return runs | {NO_DROP: step(DeepSpeed(case, None)), DROP: step(DeepSpeed(case, 1.25))}


def limit(ours: "Ours", x: Tensor, upstream: Tensor) -> Callable[[], object]:
    """One step of the bare function, after a look that it computes the same."""
    experts: Any = ours.experts
    parameters = [ours.gate.weight, experts.gate_up_proj, experts.down_proj]
    router, up, down = (parameter.detach() for parameter in parameters)
    weights = Weights(router=router, up=up, down=down, top_k=ours.gate.top_k, capacity=ours.dispatch.capacity_factor)

    def run() -> object:
        return forward_and_backward(x, upstream, weights, world())

    tokens = x.detach().requires_grad_()
    y = ours(tokens)
    expected = [y, *torch.autograd.grad(y, [tokens, *parameters], upstream)]
    for found, wanted in zip(forward_and_backward(x, upstream, weights, world()), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    return run


class TopK(nn.Module):
    """The router that par-layers and transformers are measured with."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.top_k = case.top_k
        self.weight = nn.Parameter(torch.randn(case.experts, case.hidden) / case.hidden**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and gates of each token."""
        scores = functional.linear(x, self.weight).softmax(-1)
        gates, ids = scores.topk(self.top_k, dim=-1)
        return ids, gates / gates.sum(-1, keepdim=True)


class Ours(nn.Module):
    """par-layers' dispatch and experts."""

    def __init__(self, case: Case, groups: ProcessGroups, capacity: float | None = None) -> None:
        super().__init__()
        self.gate = TopK(case)
        self.dispatch = TokenDispatcher(
            case.experts, groups.channels("expert_parallel", 1)[0], capacity_factor=capacity
        )
        self.experts = Experts(case.experts, case.hidden, case.intermediate, grid=Grid(groups))
        initialize(self.experts, seed=1)

    def forward(self, x: Tensor) -> Tensor:
        """[M, h] to [M, h]."""
        ids, gates = self.gate(x)
        return self.dispatch.dispatch(x, ids, gates).apply(self.experts)


class Theirs(nn.Module):
    """Mixtral's experts, and transformers' expert parallelism where there are several ranks."""

    def __init__(self, case: Case, implementation: str) -> None:
        super().__init__()
        config = transformers.MixtralConfig(
            hidden_size=case.hidden,
            intermediate_size=case.intermediate,
            num_local_experts=case.experts,
            num_experts_per_tok=case.top_k,
            experts_implementation=implementation,
        )
        self.gate = TopK(case)
        self.experts = MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.05)
        if case.ranks > 1:
            experts, alone = (
                init_device_mesh("cpu", (case.ranks, 1), mesh_dim_names=("ep", "tp"))[each] for each in ("ep", "tp")
            )
            plan = {
                "experts.gate_up_proj": "grouped_gemm",
                "experts.down_proj": "grouped_gemm",
                "experts": "ep_dispatch_experts",
            }
            apply_expert_parallelism(self, experts, alone, plan, "all_to_all")

    def forward(self, x: Tensor) -> Tensor:
        """[M, h] to [M, h]."""
        ids, gates = self.gate(x)
        y: Tensor = self.experts(x, ids, gates)
        return y


class Expert(nn.Module):
    """One expert of DeepSpeed's, which are modules of their own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up = nn.Linear(case.hidden, 2 * case.intermediate, bias=False)
        self.down = nn.Linear(case.intermediate, case.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] to [..., h]."""
        gate, up = self.up(x).chunk(2, -1)
        y: Tensor = self.down(functional.silu(gate) * up)
        return y


class DeepSpeed(nn.Module):
    """DeepSpeed's layer."""

    def __init__(self, case: Case, capacity: float | None) -> None:
        super().__init__()
        deepspeed: Any = import_module("deepspeed")
        if not deepspeed.comm.is_initialized():
            deepspeed.comm.init_distributed("gloo", verbose=False)
        self.layer = import_module("deepspeed.moe.layer").MoE(
            case.hidden,
            Expert(case),
            num_experts=case.experts,
            ep_size=case.ranks,
            k=case.top_k,
            capacity_factor=capacity or 1.0,
            min_capacity=0,
            drop_tokens=capacity is not None,
            top2_2nd_expert_sampling=False,
        )
        self.layer.set_deepspeed_parallelism()

    def forward(self, x: Tensor) -> Tensor:
        """[M, h] to [M, h]."""
        y: Tensor = self.layer(x)[0]
        return y


def timed_products(turns: int) -> list[dict[str, object]]:
    """A row for each number of experts and rows."""
    rows: list[dict[str, object]] = []
    for experts, each in PRODUCTS:
        x, weight = torch.randn(experts * each, 256), torch.randn(experts, 1024, 256)
        counts = [each] * experts

        def loop(x: Tensor = x, weight: Tensor = weight, counts: list[int] = counts) -> None:
            y = x.new_empty(len(x), weight.shape[1])
            for out, part, matrix in zip(y.split(counts), x.split(counts), weight.unbind(), strict=True):
                products.linear_into(out, part, matrix)

        def grouped(x: Tensor = x, weight: Tensor = weight, counts: list[int] = counts) -> None:
            with torch.no_grad():
                grouped_linear(x, weight, counts)

        runs = {"loop": loop, "grouped_mm": grouped}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(-WARM_UPS, turns):
            for name in shuffled(list(runs), turn):
                begin = time.perf_counter()
                runs[name]()
                if turn >= 0:
                    found[name].append(time.perf_counter() - begin)
        rows.append(
            {
                "experts": experts,
                "rows of each": each,
                "loop ms": f"{1000 * statistics.median(found['loop']):.2f}",
                "grouped_mm ms": f"{1000 * statistics.median(found['grouped_mm']):.2f}",
                "ratio": f"{ratio(found['loop'], found['grouped_mm']):.2f}",
            }
        )
    return rows


if __name__ == "__main__":
    main()
