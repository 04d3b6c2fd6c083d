"""Bytes that units of stage 3 move within a budget, under each policy: as simulated, and as counted on two gloo ranks.

32 blocks of one size, room for 12 of them, in loops that differ in what comes after what. Every policy trains the same
model on the same data, so its losses are compared bit by bit. Run as `python tools/bench/placement.py`; writes
docs/benchmarks/placement.md and .json, in half a minute.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _ranks import spawned, world
from _table import Section, write_sections
from torch import Tensor, nn

from par_testing import count_collectives
from par_zero import Offload, Placement, Trace, no_sync, place, register_policy, shard, simulate, trace

BLOCKS, WIDTH, ROOM, STEPS = 32, 64, 12, 3
UNIT = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
POLICIES = ("behind", "static", "least recently used", "next_use")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a step does.

    Args:
        evaluations: Number of forwards without gradients before it.
        microbatches: Number of forwards and backwards.
        active: Bytes of activations, in units, from the ninth block to the last but eight.
    """

    evaluations: int = 0
    microbatches: int = 1
    active: int = 0


LOOPS = {
    "training": Loop(),
    "four microbatches": Loop(microbatches=4),
    "two evaluations, then training": Loop(evaluations=2),
    "two microbatches, activations that vary": Loop(microbatches=2, active=8),
}


@register_policy("least recently used")
def least_recently_used(trace: Trace, sizes: Mapping[str, int], budget: Mapping[str, int]) -> Placement:
    """What a cache does that does not know what comes."""
    there: list[str] = []  # what was needed last comes last
    moves: list[tuple[tuple[str, str], ...]] = []
    for moment in trace.moments:
        fetched = [unit for unit in moment.needs if unit not in there]
        there = [*(unit for unit in there if unit not in moment.needs), *moment.needs]
        dropped = []
        while (moment.kind == "step" and there) or moment.other + sum(map(sizes.__getitem__, there)) > budget["device"]:
            dropped.append(there.pop(0))
        moves.append((*((unit, "host") for unit in dropped), *((unit, "device") for unit in fetched)))
    return Placement(home=dict.fromkeys(sizes, "host"), moves=tuple(moves))


class Model(nn.Module):
    """The blocks.

    Attributes:
        active: What it says of its activations: bytes that are there of them.
    """

    def __init__(self, active: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.active, self.most = 0, active * UNIT

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width]."""
        for number, block in enumerate(self.blocks):
            x = x + block(x).tanh()
            if number in (7, BLOCKS - 9):
                self.active = self.most if number == 7 else 0
                if x.requires_grad:
                    x.register_hook(lambda _, after=self.most - self.active: setattr(self, "active", after))
        return x


def main() -> None:
    """Measures every loop under every policy, and writes what was moved."""
    sections = []
    for name, loop in LOOPS.items():
        rows = spawned(2, measure, loop)
        note = f"A step without a budget fetches {rows[0].pop('without')} units. {note_of(loop)}"
        sections.append(Section(title=name[0].upper() + name[1:], note=note, rows=rows))
    write_sections("placement", "Parameter prefetch within a budget", sections)


def note_of(loop: Loop) -> str:
    """How a loop was measured."""
    text = (
        f"The model has {BLOCKS} units of {UNIT:,} bytes, and the budget is {ROOM} units. The table counts all-gathers "
        "of the third step on 2 gloo ranks; `of behind` is relative to the policy `behind` (lower is better)."
    )
    if loop.active:
        text += f" From the ninth block to the ninth-last, activations use the memory of {loop.active} units."
    return text + " The losses of all policies are bitwise equal."


def measure(loop: Loop) -> list[dict[str, Any]]:
    """A row for each policy."""
    without, losses = trained(loop, None)
    rows: list[dict[str, Any]] = []
    for policy in POLICIES:
        found, its = trained(loop, policy)
        recorded = found["trace"]
        if its != losses:
            raise RuntimeError(f"the losses under {policy!r} are others than without a budget; a bug of par-zero")
        sizes = {f"blocks.{number}": UNIT for number in range(BLOCKS)}
        ledger = simulate(recorded, sizes, place(recorded, sizes, ROOM * UNIT, policy))
        rows.append(
            {
                "policy": policy,
                "fetches, simulated": sum(ledger.fetched.values()),
                "fetches, counted": found["fetches"],
                "MB moved": f"{sum(ledger.moved.values()) / 1e6:.2f}",
                "of behind": "",
            }
        )
    for row in rows:
        row["of behind"] = f"{row['fetches, simulated'] / rows[0]['fetches, simulated']:.2f}"
    rows[0]["without"] = without["fetches"]
    return rows


def trained(loop: Loop, policy: str | None) -> tuple[dict[str, Any], list[list[float]]]:
    """Trains for some steps: what the last has fetched, and all losses."""
    module = Model(loop.active)
    parameters = sum(parameter.numel() * 4 for parameter in module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    offload = None
    if policy is not None:
        budget = 3 * parameters // dist.get_world_size() + ROOM * UNIT  # shares, gradients, momentum; and units
        offload = Offload(budget=budget, policy=policy, other=lambda: module.active)
    shard(module, optimizer, stage=3, group=world(), offload=offload, overlap={"bucket": 1})
    losses = []
    for step in range(STEPS):
        with count_collectives() as counted:
            losses.append(passes(module, loop, step))
        optimizer.step()
        optimizer.zero_grad()
    fetched = sum(event.bytes for event in counted.events if event.op == "broadcast") / UNIT
    return {"fetches": round(fetched), "trace": trace(module)}, losses


def passes(module: Model, loop: Loop, step: int) -> list[float]:
    """The passes of a step; their losses."""
    generator = torch.Generator().manual_seed(step)
    losses = []
    for _ in range(loop.evaluations):
        with torch.no_grad():
            losses.append(module(torch.randn(4, WIDTH, generator=generator)).square().mean().item())
    for number in range(loop.microbatches):
        with nullcontext() if number == loop.microbatches - 1 else no_sync(module, keep=False):
            loss = module(torch.randn(4, WIDTH, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
