"""What it costs to be able to say why a job hangs: a tiny step of two gloo ranks with and without.

Turns of steps in one process, in a drawn order that both ranks have alike: bare, beside a `Watchdog`, and beside what
samples the waiting for lines of metrics. And the flight recorder of torch itself, which reads a variable when a process
makes its first group: an operation of one rank in fresh processes in turn. Times are those of the processor, all
threads of a rank together: other work of the machine would hide a hundredth. Run as `python tools/bench/recorder.py`;
writes docs/benchmarks/recorder.md and .json.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from _ranks import spawned
from _table import Section, write_sections
from _turns import quartile, ratio, shuffled
from torch import nn

from par_diagnosis import CollectiveWaits, Watchdog
from par_groups import FlightRecorder, ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_layers.examples.gpt import Block

RANKS, BLOCKS, WIDTH, HEADS, BATCH, LENGTH = 2, 8, 64, 8, 4, 16
TURNS, STEPS, PROCESSES, DEPTH, IDLE = 16, 20, 4, 20, 8.0
BARE, WATCHED, SAMPLED = "bare", "with Watchdog", "beside the sampling of waits"
ON, OFF = "torch's recorder on (its default)", "torch's recorder off"


def main() -> None:
    """Measures both and writes the page."""
    taken, idle, collectives, (first, again) = spawned(RANKS, measure)
    watching = [
        {**row(name, seconds, taken[BARE]), "its own thread, % of a core": f"{100 * (idle[name] - idle[BARE]):.3f}"}
        for name, seconds in taken.items()
    ]
    recording: dict[str, list[float]] = {ON: [], OFF: []}
    for turn in range(PROCESSES):
        for name in shuffled([ON, OFF], turn):
            os.environ["TORCH_FR_BUFFER_SIZE"] = "2000" if name == ON else "0"
            recording[name].append(statistics.median(spawned(1, measure_operation)))
    sizes = f"{BLOCKS} blocks of width {WIDTH} over {RANKS} tensor ranks of gloo, batch {BATCH} x {LENGTH}, one thread"
    sections = [
        Section(
            title="Watchdog",
            note=(
                f"{sizes}. A step has a forward, a backward and {collectives} collectives. Each value is the CPU time "
                f"of a step: the mean of {STEPS} steps in each of {TURNS} turns, in one process. The ratio is the "
                "median over the turns (lower is better). The watchdog adds no work to a collective, so its only "
                f"cost is its thread. The thread's cost is also measured separately, during {IDLE} s in which the "
                f"rank sleeps. A read of the last 2,000 collectives with their call sites takes {first:.2f} s the "
                f"first time and {again:.3f} s afterwards."
            ),
            rows=watching,
        ),
        Section(
            title="Flight recorder",
            note=(
                f"CPU time of an all-reduce of ten numbers on one rank of gloo, called from a stack of {DEPTH} "
                f"frames. Each contender runs in {PROCESSES} fresh processes, alternately. torch writes this record "
                "with or without par-diagnosis."
            ),
            rows=[row(name, seconds, recording[OFF], "us an operation", 1e6) for name, seconds in recording.items()],
        ),
    ]
    write_sections("recorder", "Cost of the watchdog and the flight recorder", sections)


def row(
    name: str, seconds: list[float], reference: list[float], unit: str = "ms a step", scale: float = 1e3
) -> dict[str, object]:
    """A line of the table."""
    return {
        "contender": name,
        f"median {unit}": f"{scale * statistics.median(seconds):.3f}",
        "quartiles": f"{scale * quartile(seconds, 1):.3f} to {scale * quartile(seconds, 3):.3f}",
        "to the reference": f"{ratio(seconds, reference):.4f}",
    }


def measure() -> tuple[dict[str, list[float]], dict[str, float], int, tuple[float, float]]:
    """What main() shows of a rank.

    Returns:
        Seconds of a step in each turn, and of each second in which the rank sleeps, by contender; the collectives of a
        step; and the seconds of the first and of the second reading.
    """
    groups, step = made()
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, Callable[[], AbstractContextManager[object]]] = {
            BARE: nullcontext,
            WATCHED: partial(Watchdog, folder, groups, timeout=300.0),
            SAMPLED: lambda: CollectiveWaits(groups).sampled(),
        }
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(TURNS + 2):
            for name in shuffled(list(contenders), turn):
                with contenders[name]():
                    seconds = timed(step)
                if turn >= 2:
                    taken[name].append(seconds)
        idle: dict[str, float] = {}
        for name, beside in contenders.items():
            with beside():
                began = time.process_time()
                time.sleep(IDLE)
                idle[name] = (time.process_time() - began) / IDLE
    recorder = FlightRecorder(groups)
    before = sum(recorder.begun())
    step()
    collectives = sum(recorder.begun()) - before
    began = time.perf_counter()
    recorder.communicators()
    first, began = time.perf_counter() - began, time.perf_counter()
    recorder.communicators()
    return taken, idle, collectives, (first, time.perf_counter() - began)


def measure_operation() -> list[float]:
    """Seconds of an operation. On a rank."""
    tensor = torch.ones(10)

    def call(depth: int) -> None:
        if depth:
            call(depth - 1)
        else:
            torch.distributed.all_reduce(tensor)

    return [timed(lambda: call(DEPTH), 1000) for _ in range(8)][2:]


def made() -> tuple[ProcessGroups, Callable[[], None]]:
    """The groups, and a step of a model over them."""
    groups = ProcessGroups(Topology.from_config({"tensor": {"size": RANKS, "mode": "1d"}}, RANKS))
    layers = layer_set("1d", groups)
    model = nn.Sequential(*(Block(layers, WIDTH, HEADS, HEADS) for _ in range(BLOCKS)))
    initialize(model, seed=0)
    x = torch.randn(BATCH, LENGTH, WIDTH)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return groups, step


def timed(step: Callable[[], None], steps: int = STEPS) -> float:
    """Seconds of the processor, all threads together, for one of some steps."""
    began = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - began) / steps


if __name__ == "__main__":
    main()
