"""Bytes that autograd keeps between forward and backward, a layer and a mode, on one rank.

Shapes alone matter, so one rank of any world is simulated on the fake backend. Run as
`python tools/bench/layer_memory.py`; writes docs/benchmarks/layer_memory.md and .json.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _table import write
from torch import Tensor, nn

from par_groups import ProcessGroups, Topology
from par_layers import LayerSet, initialize, layer_set
from par_layers.examples.gpt import Block
from par_testing import saved_bytes

BATCH, LENGTH, WIDTH, HEADS = 64, 64, 64, 16

WORLDS: list[tuple[int, dict[str, Any] | None]] = [
    (1, None),
    (4, {"mode": "1d"}),
    (4, {"mode": "1d", "sequence_parallel": True}),
    (4, {"mode": "2d"}),
    (8, {"mode": "1d"}),
    (8, {"mode": "1d", "sequence_parallel": True}),
    (8, {"mode": "2.5d", "depth": 2}),
    (8, {"mode": "3d"}),
    (64, {"mode": "2d"}),
    (64, {"mode": "2.5d", "depth": 4}),
    (64, {"mode": "3d"}),
]

LAYERS: dict[str, Callable[[LayerSet], nn.Module]] = {
    "LayerNorm": lambda layers: layers.LayerNorm(WIDTH),
    "ColumnLinear h to 4h": lambda layers: layers.ColumnLinear(WIDTH, 4 * WIDTH),
    "RowLinear 4h to h": lambda layers: layers.RowLinear(4 * WIDTH, WIDTH),
    "block": lambda layers: Block(layers, WIDTH, HEADS, HEADS),
}


def main() -> None:
    """Measures every world in a process of its own."""
    rows = []
    for world, tensor in WORLDS:
        command = [sys.executable, __file__, str(world), json.dumps(tensor)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    note = (
        "This page lists the activations that autograd saves on one rank, in KiB, for each tensor-parallel mode\n"
        "(lower is better). Parameters are not counted. `h` is the width of the model, and a block is a transformer\n"
        f"block.\n\nThe batch has {BATCH} sequences of {LENGTH} tokens, with width {WIDTH} and {HEADS} heads, in\n"
        "fp32. 64 ranks form a grid of 8 x 8 in mode 2d, and of 4 x 4 x 4 in modes 2.5d and 3d."
    )
    write("layer_memory", "Memory of activations by mode", rows, note)


def measure(world: int, tensor: dict[str, Any] | None) -> dict[str, object]:
    """One row: the layers' KiB as rank 0 of that world."""
    dist.init_process_group("fake", rank=0, world_size=world)
    parallel = {} if tensor is None else {"tensor": {"size": world, **tensor}}
    layers = layer_set("auto", ProcessGroups(Topology.from_config(parallel, world)))
    label = (
        "one device" if tensor is None else tensor["mode"] + (" + sequence" if "sequence_parallel" in tensor else "")
    )
    row: dict[str, object] = {"ranks": world, "mode": label}
    for name, make in LAYERS.items():
        module = make(layers)
        initialize(module, seed=0)
        inner = name.startswith("Row")
        x = torch.randn(BATCH, LENGTH, 4 * WIDTH if inner else WIDTH)
        row[name] = kept(module, local_part(layers, x, inner=inner)) // 1024
    return row


def kept(module: nn.Module, x: Tensor) -> int:
    """Bytes that one forward saves, parameters left out."""
    return saved_bytes(lambda: module(x), module.parameters())


def local_part(layers: LayerSet, x: Tensor, *, inner: bool) -> Tensor:
    """A tensor of the shape that rank 0 has of an activation."""
    layout = layers.rules.inner if inner else layers.rules.residual
    sizes = [layers.grid.size(layout.batch), layers.grid.size(layout.sequence), layers.grid.size(layout.features)]
    return x[tuple(slice(length // size) for length, size in zip(x.shape, sizes, strict=True))].clone().requires_grad_()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        print(json.dumps(measure(int(sys.argv[1]), json.loads(sys.argv[2]))))
