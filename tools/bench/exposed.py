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

![The fraction of a step in which ranks wait: programs of par in blue, programs of torch in grey](../images/exposed.svg)

**Models.** The models are decoders of GPT-3's shape with a vocabulary of 51,200. A microbatch is one sequence of 4,096
tokens, and nothing is recomputed.

- 7B has 32 blocks of width 4,096 with 32 heads (6.9e9 parameters).
- 71B has 88 blocks of width 8,192 with 64 heads (71.7e9 parameters). It has no rows on 8 GPUs, because 16 bytes per
  parameter do not fit into 8 x 80 GB.

**Programs.**

- par-zero and FSDP2 have one microbatch per GPU. They compute in bf16, and the optimizer stores fp32. A bucket of
  par-zero has 100 MB.
- par-layers has one microbatch per eight GPUs, in mode 1d with sequence parallelism, and uses bf16 only.
- Pipelines have 16 microbatches in 8 stages, or in 16 stages if the stages are interleaved, and use bf16 only.

On 64 GPUs two kinds of parallelism are combined:

- par-layers: the eight tensor-parallel ranks of a group are on one host. The eight hosts are data-parallel, with
  par-zero at stage 1 ("x 8 by par-zero 1").
- Pipelines: each host runs one stage of the pipeline. Its eight ranks are data-parallel ("x 8 by par-zero 1", "x 8 by
  DDP") or tensor-parallel ("of 1d tensor ranks").

**Machine.** These are assumptions (`Links()` and `Compute()` of par-testing):

- 8 GPUs per host; each GPU computes 400e12 operations per second and reads 2.5e12 bytes per second;
- inside a host: 370e9 bytes per second, 3 us per hop;
- between hosts: 45e9 bytes per second and GPU, 8 us per hop;
- collectives use rings, and a ring that joins full hosts uses all links between them.

**Method.** Every program is written as its user would write it. It runs on the strict ranks of par-testing. Their clock
adds the time that each operator and each message would take on this machine. So the time of a step depends only on the
order in which the ranks issue operations and wait for them.

- **Scale:** width, features per head, vocabulary and tokens are 1/64 of the full size. The simulated machine is slower
  to match, so every operator and every message takes as long as at full size. As a check, an earlier version of
  par-zero 1 ran for 7B on 8 GPUs at 1/64 and at 1/32. Both steps took 570 ms, and waited 33.1 ms and 32.8 ms.
- **Processes:** ranks that do identical work share one process. A test compares this with one process per rank. A
  pipeline on 64 GPUs has eight processes, one for each host.
- **Steps:** the table shows the last of four steps. For pipelines it shows the second step, or the third step if ranks
  are data-parallel.
- **Columns:** "computes" is the mean over the processes. "waits" is the rest of the step, including the bubble of a
  pipeline. The bubble is 30 % of a step with 16 microbatches and eight equal stages. Interleaved stages or weight
  gradients make the bubble smaller. The logits make the bubble larger, because only the last stage computes them.

**Order of operations.**

- FSDP2 orders its work by streams and events. On a CPU torch's streams and events do nothing, and FSDP2 waits at once.
  Here `virtual_streams` gives them times, so FSDP2 keeps its own order. Its streams do not slow each other down.
- torch.distributed.pipelining runs unchanged, because it issues and waits identically on every device.
- On 64 GPUs the interleaved schedules are left out. Their simulation takes long, and DDP would not reduce gradients
  under torch's interleaved zero bubble schedule.
- par-pipeline sends the headers of its messages over gloo, also on GPUs. Headers take no time here.
- par-pipeline and torch hide nearly all transfers. A transfer takes 0.1 ms inside a host and 0.8 ms between hosts; a
  forward takes 19 ms. A test uses transfers that take up to half a forward. With these transfers, a step stays within
  1 % of par-pipeline's simulator, in which each transfer begins when its sender has finished.
- par-zero has at most two reductions in flight at stages 2 and 3, as on GPUs: computation waits for the older reduction
  before a third one begins. Without this limit, stage 2 of 7B waited 1.2 ms on 8 GPUs and 3.2 ms on 64 GPUs, and a step
  took as long.

**Limits.** The simulation leaves out these effects. All of them take time on GPUs, and some of them would hide more of
the communication that is exposed here:

- Hosts are infinitely fast: kernel launches, Python and the allocator take no time.
- Operators run at a perfect roofline, which is limited by operations or by memory bandwidth.
- The network has no congestion, and no rank is slow.
- Communication kernels take no processors from computation.

Attention counts the masked half, as torch's FLOP counter does. Compare the programs with each other. Do not compare the
milliseconds with a measurement on your machine.

"before" is the time that commit 748ae1f waits, by the same clock. Pipelines have no value, because that commit's
pipelines make their own communicators, which the clock does not see."""


if __name__ == "__main__":
    main()
