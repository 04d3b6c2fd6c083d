"""A step of an optimizer of whole matrices that par-zero shares out, beside the arithmetic that it must do.

The matrices are those of a small decoder. Under par-zero each rank steps some of them: whole ones of its share of the
data ranks, and such as are cut over tensor ranks put together. The arithmetic is the same optimizer in plain torch, on
every rank at the same time, each for all matrices, and the time divided by the number of ranks: what a step would take
that were shared out evenly and sent nothing. Run as `python tools/bench/matrices.py`; writes
docs/benchmarks/matrices.md and .json.
"""

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from _ranks import spawned
from _table import write
from _turns import quartile, shuffled
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import Box, ProcessGroups, Sharding, Topology, set_sharding
from par_zero import shard

WIDTH, BLOCKS = 512, 2
SHAPES = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
"""The matrices of a block: queries, keys, values, output, and the two of the MLP."""

TURNS = 5
LAYOUTS = {2: ((2, 1), (1, 2)), 4: ((4, 1), (1, 4), (2, 2))}
"""For each number of ranks, the numbers of data ranks and of tensor ranks."""

PLAIN = "plain"


class NewtonSchulz(Optimizer):
    """Muon in fp32: a matrix moves by its momentum, made orthogonal by five steps of Newton and Schulz."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody here gives one
        """Steps every matrix that has a gradient."""
        del closure
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    state = self.state[matrix]
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(matrix))
                    momentum.mul_(group["momentum"]).add_(matrix.grad)
                    matrix.sub_(orthogonal(momentum), alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with singular values near one."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=-4.775, alpha=2.0315), wide, beta=3.4445)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class Matrices(nn.Module):
    """Matrices of which a tensor rank has some rows; each gets the same gradient in every step.

    Args:
        rank: Number of the tensor rank.
        ranks: Number of tensor ranks; 0: the matrices have no record.
        copies: The ranks of the world that have the same rows.
    """

    def __init__(self, rank: int = 0, ranks: int = 0, copies: tuple[int, ...] = ()) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.given = []
        for number, (rows, columns) in enumerate(SHAPES * BLOCKS):
            count = rows // max(ranks, 1)
            here = slice(rank * count, (rank + 1) * count)
            value, gradient = (torch.randn(rows, columns, generator=generator)[here].clone() for _ in range(2))
            self.register_parameter(f"matrix{number}", nn.Parameter(value))
            self.given.append(gradient)
            if ranks > 1:
                box = Box((rank * count, 0), (count, columns), 0, (columns, 1), copies)
                set_sharding(self.get_parameter(f"matrix{number}"), Sharding((rows, columns), (box,)))

    def backward(self) -> None:
        """What autograd does at the end of a backward pass: each matrix gets its gradient."""
        torch.autograd.backward(list(self.parameters()), self.given)


Measured = tuple[list[float], int]
"""Milliseconds of CPU time of a step, turn by turn, of the busiest rank; bytes of state on the rank that has most."""


def main() -> None:
    """Measures every layout, and writes medians and ratios."""
    rows = []
    for ranks, layouts in LAYOUTS.items():
        measured = spawned(ranks, timed, layouts)
        alone, all_state = measured[PLAIN]
        for data, tensor in layouts:
            own, state = measured[data, tensor]
            ratios = [step * ranks / plain for step, plain in zip(own, alone, strict=True)]
            spread = f"{quartile(ratios, 1):.2f} to {quartile(ratios, 3):.2f}"
            rows.append(
                {
                    "ranks": ranks,
                    "data x tensor": f"{data} x {tensor}",
                    "arithmetic, CPU ms": f"{statistics.median(alone) / ranks:.1f}",
                    "step, CPU ms": f"{statistics.median(own):.1f}",
                    "ratio": f"{statistics.median(ratios):.2f} ({spread})",
                    "state, MB": f"{state / 1e6:.1f} of {all_state / 1e6:.1f}",
                }
            )
    elements = BLOCKS * sum(rows * columns for rows, columns in SHAPES)
    note = (
        f"The model has {BLOCKS} decoder blocks of width {WIDTH}, with {len(SHAPES) * BLOCKS} matrices of "
        f"{elements / 1e6:.1f}e6 elements in total. ZeRO stage 1, gloo, one thread per rank. The optimizer is Muon in "
        "fp32. torch.optim.Muon iterates in bf16, in which CPUs are slow, and slow arithmetic would hide the "
        "communication. A step begins with local gradients. It reduces them over the data ranks, exchanges them over "
        "the tensor ranks, which shard each matrix by rows, runs the optimizer, and returns the results to all ranks. "
        "`arithmetic` is the same optimizer in plain torch: all matrices on all ranks at once, divided by the number "
        "of ranks. Times are the CPU time of all threads on the rank that computes most, so they include neither "
        "waits nor other work of the machine. The contenders run alternately in the same processes. `ratio` is the "
        "median over the turns of step to arithmetic, with quartiles (lower is better). `state` is the memory of the "
        "rank with the most state, out of the memory of an unsharded state. Four ranks share two cores."
    )
    write("matrices", "Optimizers that need full matrices", rows, note)


def timed(layouts: tuple[tuple[int, int], ...]) -> dict[Any, Measured]:
    """Times plain torch, under `PLAIN`, and par-zero in several layouts, by numbers of data and tensor ranks."""
    plain = Matrices()
    made: dict[Any, tuple[Matrices, Optimizer]] = {PLAIN: (plain, NewtonSchulz(plain.parameters()))}
    for data, tensor in layouts:
        topology = Topology({"data": data, "tensor": tensor})
        groups = ProcessGroups(topology)
        module = Matrices(groups.rank("tensor"), tensor, tuple(topology.group("data", dist.get_rank())))
        optimizer = NewtonSchulz(module.parameters())
        cut = groups["tensor"] if tensor > 1 else None
        shard(module, optimizer, stage=1, group=groups["data"], update={"atomic": True, "tensor_group": cut})
        made[data, tensor] = module, optimizer
    orders = [shuffled(list(made), turn) for turn in range(TURNS + 1)]
    turns = [{name: taken(*made[name], plain=name == PLAIN) for name in order} for order in orders]
    return {name: ([turn[name] for turn in turns[1:]], state_of(made[name][1])) for name in made}


def taken(module: Matrices, optimizer: Optimizer, *, plain: bool) -> float:
    """Milliseconds of CPU time of a step on the rank that computes most; of plain torch the optimizer's part alone."""
    if plain:
        module.backward()
    dist.barrier()
    start = time.process_time()
    if not plain:
        module.backward()
    optimizer.step()
    most = torch.tensor(1e3 * (time.process_time() - start))
    optimizer.zero_grad()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def state_of(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state on the rank that has most."""
    own = sum(slot.nbytes for state in optimizer.state.values() for slot in state.values() if isinstance(slot, Tensor))
    most = torch.tensor(own)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most.item())


if __name__ == "__main__":
    main()
