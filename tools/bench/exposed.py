"""Exposed communication of two decoders on 8 and 64 GPUs, in the virtual time of strict ranks.

Every case is a program as a user would write it, run on strict ranks (par-testing), whose clock adds what operators and
messages would take on the GPUs. Ranks that all do the same have one process. Run as `python tools/bench/exposed.py`;
takes some minutes on two cores, needs no GPU, and writes docs/benchmarks/exposed.md and .json, from which
`python docs/figures.py` draws a picture. With `--before CHECKOUT` the packages of an earlier commit are measured, too,
where its pipelines can be told which communicators to use.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from _decoder import Size
from _table import write
from tqdm import tqdm

from par_testing import Compute, Links, Times, on_strict_ranks

ROOT = Path(__file__).parent.parent.parent
SIZES = {
    "7B": Size(width=4_096, depth=32, heads=32, scale=64),
    "71B": Size(width=8_192, depth=88, heads=64, scale=64),
}
PLACES = (("7B", 8), ("7B", 64), ("71B", 64))  # models and numbers of GPUs
LINKS, COMPUTE = Links(), Compute()
HOST = LINKS.ranks_per_host
STAGES = 8
PIPELINES = (
    ("par-pipeline", "pipelined", ("1F1B", "interleaved", "ZB-H1")),
    ("torch", "torch_pipelined", ("1F1B", "interleaved", "interleaved ZB")),
)
OF_A_HOST = {"7B": "data", "71B": "tensor"}  # what the ranks of a host share where each stage has a host
BESIDE = {
    ("nothing", "par-pipeline"): "",
    ("nothing", "torch"): "",
    ("data", "par-pipeline"): " x 8 by par-zero 1",
    ("data", "torch"): " x 8 by DDP",
    ("tensor", "par-pipeline"): " of 1d tensor ranks",
    ("tensor", "torch"): " of 1d tensor ranks",
}
KEPT = ", parameters kept after forward"
MILLI = 1e3
PRELOAD = [  # by the process of which all ranks are forks; those that an earlier commit lacks are left out
    "par_layers.examples",
    "par_pipeline.runtime.pipeline",
    "par_testing.ranks.outside",
    "par_zero",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
]

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program on some GPUs.

    Args:
        size: The model's name.
        gpus: Number of ranks.
        name: The case's name in the table.
        program: Module and function.
        arguments: Arguments of the function after the model's size, by name.
        processes: Number of processes; each stands for as many neighbouring ranks.
        before: Whether an earlier commit is measured, too.
    """

    size: str
    gpus: int
    name: str
    program: tuple[str, str]
    arguments: dict[str, Any]
    processes: int = 1
    before: bool = False

    @property
    def title(self) -> str:
        """What it is called by."""
        return f"{self.size} {self.gpus} {self.name}"


def main() -> None:
    """Measures every case, and writes the table."""
    parser = argparse.ArgumentParser(description="Exposed communication in virtual time.")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an earlier commit, to be measured, too")
    parser.add_argument("--only", default="", metavar="PATTERN", help="print the cases with such a name, write nothing")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keeps figures, so that a second run goes on")
    parser.add_argument("--figures", action="store_true", help="print figures as JSON, of what an earlier commit has")
    given = parser.parse_args()
    torch.multiprocessing.set_forkserver_preload(PRELOAD)
    wanted = [case for case in cases() if re.search(given.only, case.title) and (case.before or not given.figures)]
    figures = all_measured(wanted, given.keep)
    if given.figures:
        print(json.dumps(figures))
        return
    before = figures_of(given.before, given.only, given.keep) if given.before is not None else {}
    rows = [row(case, figures[case.title], before.get(case.title)) for case in wanted]
    if given.only:
        for case, one in zip(wanted, rows, strict=True):
            print(one, figures[case.title]["by site"])
    else:
        write("exposed", "Exposed communication", rows, NOTE)


def cases() -> Iterator[Case]:
    """All cases in the order of the table; a model is left out where 16 bytes for each parameter do not fit."""
    for size, gpus in PLACES:
        arguments: dict[str, Any]
        data: dict[str, Any] = {"size": size, "gpus": gpus}
        stages, keeps = ((1, 2, 3), (True, False)) if size == "7B" else ((3,), (False,))
        for stage in stages:
            program, arguments = ("_exposed_data", "sharded"), {"stage": stage}
            yield Case(**data, name=f"par-zero {stage}", program=program, arguments=arguments, before=size == "7B")
        for keep in keeps:
            program, arguments = ("_exposed_data", "fully_sharded"), {"reshard": not keep}
            yield Case(**data, name=f"FSDP2{KEPT if keep else ''}", program=program, arguments=arguments)
        beside = "" if gpus == HOST else f" x {gpus // HOST} by par-zero 1"
        program, arguments = ("_exposed_data", "tensor_parallel"), {"ranks": HOST}
        yield Case(**data, name=f"par-layers 1d{beside}", program=program, arguments=arguments, before=not beside)
        others = "nothing" if gpus == STAGES else OF_A_HOST[size]
        for whose, function, names in PIPELINES:
            for name in names:
                if others != "nothing" and name.startswith("interleaved"):
                    continue  # they take longest, and torch's zero bubble leaves out DDP's reduction
                program, arguments = ("_exposed_pipeline", function), {"name": name, "stages": STAGES, "beside": others}
                title = f"{whose} {name}{BESIDE[others, whose]}"
                yield Case(**data, name=title, program=program, arguments=arguments, processes=STAGES)


def all_measured(wanted: Sequence[Case], keep: Path | None) -> dict[str, Figures]:
    """The figures of cases by their titles; those that the file has are not measured again."""
    kept: dict[str, Figures] = {}
    if keep is not None and keep.exists():
        kept = dict(json.loads(line) for line in keep.read_text().splitlines())
    for case in tqdm([case for case in wanted if case.title not in kept], unit="case"):
        kept[case.title] = measured(case)
        if keep is not None:
            with keep.open("a") as file:
                file.write(json.dumps([case.title, kept[case.title]]) + "\n")
    return {case.title: kept[case.title] for case in wanted}


def figures_of(checkout: Path, only: str, keep: Path | None) -> dict[str, Figures]:
    """Cases measured with the packages of another checkout, and the tools of this one."""
    paths = [*sorted(checkout.glob("packages/*/src")), ROOT / "tools/par-testing/src"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, __file__, "--figures", "--only", only]
    command += [] if keep is None else ["--keep", str(keep.with_name(f"{keep.name}-before"))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Figures] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measured(case: Case) -> Figures:
    """Milliseconds of a step: until the last process is done, what a process computes on average, what it waits for."""
    size = SIZES[case.size]
    machine = size.machine(LINKS, COMPUTE, case.gpus // case.processes)
    arguments = (called, case.program, size, case.arguments)
    times: list[Times] = on_strict_ranks(case.processes, *arguments, strict=machine, start_method="forkserver")
    step, computed = max(each.total for each in times), sum(each.computing for each in times) / len(times)
    by_site: dict[str, float] = {}
    for each in times:
        for site, seconds in each.by_site.items():
            by_site[site] = by_site.get(site, 0.0) + MILLI * seconds / len(times)
    most = sorted(by_site.items(), key=lambda entry: -entry[1])[:5]
    return {"step": MILLI * step, "computed": MILLI * computed, "by site": dict(most)}


def called(program: tuple[str, str], size: Size, arguments: dict[str, Any]) -> Times:
    """The program's times, on one process."""
    module, function = program
    times: Times = getattr(import_module(module), function)(size, **arguments)
    return times


def row(case: Case, now: Figures, before: Figures | None) -> dict[str, object]:
    """A line of the table."""
    waits = now["step"] - now["computed"]
    return {
        "model": case.size,
        "GPUs": case.gpus,
        "program": case.name,
        "step, ms": f"{now['step']:.0f}",
        "computes, ms": f"{now['computed']:.0f}",
        "waits, ms": f"{waits:.1f}",
        "waits": f"{waits / now['step']:.1%}",
        "before, ms": f"{before['step'] - before['computed']:.1f}" if before else "",
    }


NOTE = """\
This page predicts how long a training step waits for communication on 8 and 64 H100s. Read it to compare par with
FSDP2, DDP and torch's pipelines. All times are simulated; no figure was measured on a GPU.

![The share of a step in which ranks wait: programs of these packages blue, torch's grey](../images/exposed.svg)

**Programs.** Decoders of GPT-3's shape: 7B is 32 blocks of width 4,096 with 32 heads (6.9e9 parameters), 71B is 88
blocks of width 8,192 with 64 heads (71.7e9); vocabulary 51,200. A microbatch is one sequence of 4,096 tokens, and
nothing is recomputed. par-zero and FSDP2 have one microbatch on each GPU, compute in bf16 and keep fp32 in the
optimizer; a bucket of par-zero has 100 MB. par-layers has one for eight GPUs, mode 1d with sequence parallelism, and
pipelines have 16 in eight stages, or in sixteen where they are interleaved; both are in bf16 throughout. "x 8 by
par-zero 1" and "x 8 by DDP": on 64 GPUs, par-layers' tensor ranks have a host each, and eight hosts share data by stage
1; a stage of a pipeline has a host, whose eight ranks share data, or have a part of each layer where it says "of 1d
tensor ranks". 71B stands where 16 bytes for each parameter fit into 80 GB.

**Machine.** These are assumptions (`Links()` and `Compute()` of par-testing):

- 8 GPUs per host; each GPU computes 400e12 operations per second and reads 2.5e12 bytes per second;
- inside a host: 370e9 bytes per second, 3 us per hop;
- between hosts: 45e9 bytes per second and GPU, 8 us per hop;
- collectives use rings, and a ring that joins full hosts uses all links between them.

**Method.** Every program runs as its user would write it, on strict ranks (par-testing), whose clock adds what
operators and messages would take: a step depends on the order in which ranks issue and wait, and on nothing else.
Width, features of a head, vocabulary and tokens are 1/64 of what they stand for and the machine is as much slower, so
that every operator and message takes as long as at full size; an earlier par-zero 1, for 7B on 8 GPUs, took 570 ms at
1/64 and at 1/32, of which it waited 33.1 and 32.8. Ranks that do the same have one process, which a test compares
with one process each; so a pipeline on 64 GPUs has eight processes, each for the eight ranks of a host. The last of
four steps is read, of pipelines the second, or the third where they share data. "Computes" is the mean over the
processes, "waits" the rest of a step, with a pipeline's bubble, which is 30 % of a step of 16 microbatches, less where
stages are interleaved or weight gradients fill it, and more as the last stage has the logits, too.

**The others' order.** FSDP2 orders its work by streams and events. On a CPU torch has them, too, but they do nothing,
and FSDP2 waits at once; here they have times (`virtual_streams`), so this is the order that FSDP2 itself gives. Its
streams do not slow each other down. torch.distributed.pipelining runs as it is: it issues and waits alike on every
device. On 64 GPUs interleaved stages are left out, which take long to reckon; under torch's zero bubble DDP would not
reduce. par-pipeline's headers go over gloo, as ever, and take no time. It hides nearly all transfers, as torch does:
they take 0.1 ms inside a host and 0.8 between hosts, beside a forward of 19. Where they take up to half a forward,
par-pipeline stays within 1 % of its simulator, which has each begin when its sender is done; a test says so. par-zero
takes its way for a CPU; on GPUs it has no more than two reductions under way at stages 2 and 3, and its computation
waits for the older of them before a third: made to do so here, stage 2 of 7B waits 2.3 ms on 8 GPUs and 3.3 on 64.

**Limits.** Hosts are infinitely fast: no kernel launches, no Python, no allocator. Operators run at a perfect
roofline of operations or memory. No congestion, no kernels of communication that take processors from those of
computation, no slow rank. All this takes time on GPUs, and some of it would hide more of what is exposed here.
Attention counts the masked half, as torch's counter does. Compare programs, not milliseconds with those of your
machine.

"Before" is what commit 748ae1f waits, through the same clock. Its pipelines make their communicators themselves, so
no clock sees them, and they have no figure."""


if __name__ == "__main__":
    main()
