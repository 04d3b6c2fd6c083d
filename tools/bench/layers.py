"""CPU overhead of 1D layers: eight small transformer blocks on the fake backend, forward and backward.

The fake backend moves nothing, so what is left is Python and dispatch. Contenders in one process, in turn: torch.nn at
full size, torch.nn at the size of a shard, our 1d layers, and torch's parallelize_module. Run as
`python tools/bench/layers.py`; writes docs/benchmarks/layers.md and .json.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _table import write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_layers.examples.gpt import Block

RANKS, BLOCKS, WIDTH, HEADS, BATCH, LENGTH, RUNS = 8, 8, 64, 8, 4, 16, 60


class PlainBlock(nn.Module):
    """The example's block from torch.nn, with `shards`-th of the heads and of the MLP."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.head, inner = WIDTH // HEADS, WIDTH // shards
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, inner) for _ in range(3))
        self.output = nn.Linear(inner, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * inner), nn.Linear(4 * inner, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        normed = self.attention_norm(hidden)
        q, k, v = (
            each(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        hidden = hidden + self.output(mixed)
        contracted: Tensor = self.contract(functional.gelu(self.expand(self.mlp_norm(hidden))))
        return hidden + contracted


class FusedBlock(PlainBlock):
    """The plain block with q, k and v in one product, as ours has them."""

    def __init__(self, shards: int) -> None:
        super().__init__(shards)
        del self.query, self.key, self.value
        self.inner = WIDTH // shards
        self.query_key_value = nn.Linear(WIDTH, 3 * self.inner)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        parts = self.query_key_value(self.attention_norm(hidden)).split(self.inner, dim=-1)
        q, k, v = (each.unflatten(-1, (-1, self.head)).transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        hidden = hidden + self.output(mixed)
        contracted: Tensor = self.contract(functional.gelu(self.expand(self.mlp_norm(hidden))))
        return hidden + contracted


def main() -> None:
    """Measures the contenders in turn and writes medians and ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    contenders = {
        "torch.nn, full size": stack(lambda: FusedBlock(1)),
        "torch.nn, the shard's size": stack(lambda: FusedBlock(RANKS)),
        "par-layers 1d": ours(),
        "parallelize_module": dtensors(),
    }
    x = torch.randn(BATCH, LENGTH, WIDTH)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for run in range(RUNS + 10):
        for name, model in contenders.items():
            seconds = measured(model, x)
            if run >= 10:
                samples[name].append(seconds)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    rows = [
        {
            "contender": name,
            "median ms": round(1e3 * medians[name], 2),
            "range ms": f"{1e3 * min(times):.2f} to {1e3 * max(times):.2f}",
            "ours / it": round(medians["par-layers 1d"] / medians[name], 3),
        }
        for name, times in samples.items()
    ]
    sizes = f"width {WIDTH}, {HEADS} heads, batch {BATCH} x {LENGTH}"
    note = (
        "This page compares the CPU time of 1D tensor-parallel layers with plain torch.nn and with torch's\n"
        "`parallelize_module`. The fake backend sends nothing, so the times show Python and dispatch. Times are\n"
        "milliseconds of a forward and a backward (lower is better). `ours / it` is the median of par-layers 1d\n"
        "divided by the median of the row; below 1, par-layers is faster.\n\n"
        f"The model has {BLOCKS} transformer blocks ({sizes}, which is sequences x tokens). One process runs one\n"
        f"of {RANKS} ranks with one thread. Each of {RUNS} rounds runs every program once. The row `the shard's size`\n"
        f"is a model with 1/{RANKS} of the heads and of the MLP, without communication."
    )
    write("layers", "CPU time of forward and backward, 1D tensor parallelism", rows, note)


def stack(make: Callable[[], nn.Module]) -> nn.Module:
    """Blocks in a row."""
    return nn.Sequential(*(make() for _ in range(BLOCKS)))


def ours() -> nn.Module:
    """The example's blocks, cut over the tensor group."""
    groups = ProcessGroups(Topology.from_config({"tensor": {"size": RANKS, "mode": "1d"}}, RANKS))
    layers = layer_set("1d", groups)
    model = stack(lambda: Block(layers, WIDTH, HEADS, HEADS))
    initialize(model, seed=0)
    return model


def dtensors() -> nn.Module:
    """Plain blocks under torch's own tensor parallelism."""
    mesh = init_device_mesh("cpu", (RANKS,))
    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "expand")}
    rows = {name: RowwiseParallel() for name in ("output", "contract")}
    model = stack(lambda: PlainBlock(1))
    for block in model.children():
        parallelize_module(block, mesh, {**plan, **rows})
    return model


def measured(model: nn.Module, x: Tensor) -> float:
    """Seconds of one forward and backward."""
    for parameter in model.parameters():
        parameter.grad = None
    start = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
