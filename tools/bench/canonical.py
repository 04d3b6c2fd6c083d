"""A step with canonical numerics on one rank, against plain torch and an ordinary strategy with the same microbatches.

It uses one thread. All contenders are in one process, and each turn runs each of them once, in a new order. Times are
CPU seconds of the process, so that other work on the machine matters less. Ratios are medians over the turns. Run it
as `python tools/bench/canonical.py`; it writes docs/benchmarks/canonical.md and .json.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _table import Section, write_sections
from _turns import quartile, ratio, shuffled
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from par_groups import LaneCounts
from par_layers import LayerSet, initialize, layer_set
from par_layers.examples import GPT
from par_train import Strategy

WIDTHS, BLOCKS, VOCABULARY, TOKENS, LANES = (128, 512), 2, 256, 256, 8
TURNS, WARM_UPS, CLIP_NORM = 5, 1, 1.0
IN_TENSORS, IN_LAYERS = LaneCounts(data=LANES, tensor=2), LaneCounts(data=LANES, tensor=2, sequence=4)
PLAIN, ORDINARY, CANONICAL = "plain torch", "Strategy", "Strategy, canonical"
WITH_TENSORS = f"Strategy, canonical, {IN_TENSORS.tensor} tensor lanes"
WITH_LAYERS = f"Strategy, canonical, {IN_LAYERS.tensor} tensor and {IN_LAYERS.sequence} sequence lanes"


def main() -> None:
    """Measure each width, and write medians, quartiles and ratios. A number on the command line sets the turns."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    torch.set_num_threads(1)
    sections = [
        Section(
            title=f"Width {width}, {precision}",
            note=f"{BLOCKS} blocks, {LANES} microbatches of {TOKENS} tokens, AdamW (fused), clipped; {turns} turns.",
            rows=measured(width, precision, turns),
        )
        for width in WIDTHS
        for precision in ("fp32", "bf16")
    ]
    write_sections("canonical", "Canonical numerics on one rank", sections)


def measured(width: int, precision: str, turns: int) -> list[dict[str, object]]:
    """Return the rows of a table: each contender's CPU time of a step, and its ratio to the first in the same turn."""
    options: dict[str, Any] = {"precision": precision, "clip_norm": CLIP_NORM}
    with (
        Strategy(pipeline={"microbatches": LANES}, **options) as ordinary,
        Strategy(numerics="canonical", lanes=LANES, **options) as canonical,
        Strategy(numerics="canonical", lanes=IN_TENSORS, **options) as in_tensors,
        Strategy(numerics="canonical", lanes=IN_LAYERS, **options) as in_layers,
    ):
        steps: dict[str, Callable[[], object]] = {
            ORDINARY: step_of_strategy(ordinary, width),
            CANONICAL: step_of_strategy(canonical, width),
            WITH_TENSORS: step_of_strategy(in_tensors, width),
            WITH_LAYERS: step_of_strategy(in_layers, width),
        }
        if precision == "fp32":
            steps = {PLAIN: step_of_torch(width), **steps}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(-WARM_UPS, turns):
            for name in shuffled(list(steps), turn):
                gc.collect()
                begin = time.process_time()
                steps[name]()
                if turn >= 0:
                    times[name].append(time.process_time() - begin)
    first = next(iter(times.values()))
    return [
        {
            "contender": name,
            "least ms": f"{1e3 * min(each):.1f}",
            "quartiles ms": f"{1e3 * quartile(each, 1):.1f} to {1e3 * quartile(each, 3):.1f}",
            "ratio (lower is better)": f"{ratio(each, first):.2f}",
            "ratio of least": f"{min(each) / min(first):.2f}",
        }
        for name, each in times.items()
    ]


def batch() -> tuple[Tensor, Tensor]:
    """Return the rows of a step, of which each lane has one."""
    ids = torch.randint(0, VOCABULARY, (LANES, TOKENS), generator=torch.Generator().manual_seed(0))
    return ids, ids.roll(-1, 1)


def model_of(width: int, layers: LayerSet) -> nn.Sequential:
    """Return a GPT with the same weights for every contender."""
    parts = GPT(layers, VOCABULARY, width, width // 64, BLOCKS, TOKENS)
    model = nn.Sequential(parts.tokens, parts.positions, *parts.blocks, parts.norm, parts.head)
    initialize(model, 0)
    return model


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def step_of_torch(width: int) -> Callable[[], object]:
    """Return a step in plain torch: one backward pass for each microbatch, clipping and the update."""
    model = model_of(width, layer_set(None))
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = batch()

    def step() -> None:
        for lane in range(LANES):
            loss = criterion(model(inputs[lane : lane + 1]), targets[lane : lane + 1])
            (loss / LANES).backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_of_strategy(strategy: Strategy, width: int) -> Callable[[], object]:
    """Return the same step under a strategy."""
    model: Any = model_of(width, strategy.layers)
    model, optimizer = strategy.initialize(model, AdamW(model.parameters(), lr=1e-4, fused=True))

    def step() -> None:
        strategy.execute_pipeline(iter([batch()]), model, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
