"""Stochastic rounding of fp32 to bf16 on the CPU, against a plain copy and against random numbers from a generator.

Run as `python tools/bench/rounding.py`; writes docs/benchmarks/rounding.md and .json.
"""

import statistics
import time
from collections.abc import Callable

import torch
from _table import write
from _turns import ratio, shuffled
from torch import Tensor

from par_precision import stochastic_round_

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
TURNS, WARM_UPS = 31, 2
COPY = "target.copy_(source)"


def main() -> None:
    """Times every contender on every size, in turn."""
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in SIZES:
            times = timed(size)
            for name, each in times.items():
                rows.append(
                    {
                        "threads": threads,
                        "elements": f"{size:,}",
                        "contender": name,
                        "ns an element": f"{1e9 * statistics.median(each) / size:.2f}",
                        "ratio": f"{ratio(each, times[COPY]):.1f} x copy",
                    }
                )
    note = (
        f"Medians of {TURNS} turns; each turn runs the contenders once, in another order. Ratios are medians over the "
        "turns (lower is better). The third contender draws its random numbers from torch's generator, so its result "
        "depends on the sharding of a tensor and on earlier draws. It does not preserve NaN."
    )
    write("rounding", "Stochastic rounding on the CPU", rows, note)


def contenders() -> dict[str, Callable[[Tensor, Tensor], object]]:
    """What rounds, by name."""
    return {
        COPY: lambda target, source: target.copy_(source),
        "stochastic_round_": lambda target, source: stochastic_round_(target, source, 0, 1, name="w"),
        "randint, add, mask": with_generator_,
    }


def with_generator_(target: Tensor, source: Tensor) -> None:
    """The shortest way to write it, over whole tensors."""
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32)
    target.copy_(((source.view(torch.int32) + noise) & -65536).view(torch.float32))


def timed(size: int) -> dict[str, list[float]]:
    """Seconds of each turn of each contender."""
    source, target = torch.randn(size), torch.empty(size, dtype=torch.bfloat16)
    calls = max(1, (1 << 20) // size)
    times: dict[str, list[float]] = {name: [] for name in contenders()}
    for turn in range(-WARM_UPS, TURNS):
        for name, run in shuffled(list(contenders().items()), turn):
            start = time.perf_counter()
            for _ in range(calls):
                run(target, source)
            if turn >= 0:
                times[name].append((time.perf_counter() - start) / calls)
    return times


if __name__ == "__main__":
    main()
