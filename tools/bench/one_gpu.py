"""Precision, rounding, float8, sharding, checkpoints and pipelines on one GPU, against torch's own, in a world of one.

Nothing is communicated, so what is left is what a package costs by itself. The contenders of a case live in one process
and run once in every turn, in another order each time; ratios are medians over the turns. One that fails is a line of
the table, and the others go on. Run as `python tools/bench/one_gpu.py`; writes docs/benchmarks/one_gpu.md and .json.
Without a GPU there is nothing to measure; `--smoke` tries everything once, tiny, and writes nothing.
"""

import argparse
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _contenders import LEAST, SECONDS, TURNS, WARM_UPS, Act, Case, Contender, Made, measure, row
from _ranks import world
from _table import write
from _transformer import Block
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import par_checkpoint
from par_groups import launch
from par_pipeline import Pipeline, Schedule, one_f_one_b, zb_v
from par_precision import convert_to_float8_, mixed, stochastic_round_
from par_zero import shard

SCALE, LIMIT, MICROBATCHES = 2.0**10, 1.0, 8


class Size(NamedTuple):
    """Sizes of a model and of a microbatch; a step without microbatches has twice the rows."""

    name: str
    width: int
    depth: int
    heads: int
    vocabulary: int
    rows: int
    length: int
    calls: int = 1


BIG = Size("150 M", width=768, depth=14, heads=12, vocabulary=32768, rows=8, length=1024)
WIDE = Size("109 M", width=512, depth=24, heads=8, vocabulary=32768, rows=8, length=1024)
TINY = Size("tiny", width=64, depth=8, heads=4, vocabulary=256, rows=2, length=32, calls=3)
SMOKE = Size("smoke", width=32, depth=2, heads=2, vocabulary=64, rows=1, length=8)


class Bench(NamedTuple):
    """Where, and whether everything is tiny."""

    device: torch.device
    smoke: bool

    def sized(self, size: Size) -> Size:
        """This size, or the one to try everything with."""
        return SMOKE if self.smoke else size


def main() -> None:
    """Measures the cases, and writes one table of them all."""
    parser = argparse.ArgumentParser(description="The packages on one GPU, against torch's own.")
    parser.add_argument("--smoke", action="store_true", help="everything once, tiny, on any device; writes nothing")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these alone; then nothing is written"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke:
        print("needs a GPU; --smoke tries it on the CPU")
        return
    warnings.simplefilter("ignore")
    rows: list[dict[str, object]] = []
    note = (
        "One rank on one GPU, with gloo and NCCL. Each case runs all its contenders once per turn, in another order "
        f"each time. A case has {TURNS} turns after {WARM_UPS} warm-up turns; checkpoints have 4 turns after 1 "
        f"warm-up. A case ends earlier if it has {LEAST} turns and has taken {SECONDS:.0f} s. A time ends when the GPU "
        "is done; in cases with `blocked` it ends when the call returns. `returns` is the time until the call returns "
        "and the host can continue. `ratio` is the median, over the turns, of the time relative to the first "
        "contender of the case (lower is better). `peak MB` is the memory that a contender holds between calls, plus "
        "the most that one call adds. It includes weights and optimizer state if the contender has its own. AdamW is "
        "fused in all cases. *precision*: the part of a step after backward, for 109 M parameters. *fp8*: 8 linear "
        "layers of 4096 x 4096 without bias, 8192 rows, forward and backward. *zero*: a step of a GPT under bf16 "
        "autocast. *offload*: the same step with optimizer state on the host. *checkpoint*: "
        "fp32 weights and Adam moments of the GPT with 150 M parameters. *pipeline*: "
        f"{MICROBATCHES} microbatches in bf16, compared with a plain loop over them."
    )
    with launch() as place:
        bench = Bench(device=place.device, smoke=arguments.smoke)
        for name in arguments.only:
            for case in PARTS[name](bench):
                measure(case, smoke=bench.smoke)
                for each in case.contenders:
                    rows.append(row(case, each))
                    print("  ".join(str(value) for value in rows[-1].values() if value != ""), flush=True)
        if not bench.smoke and arguments.only == list(PARTS):
            write("one_gpu", "On one GPU", rows, note)


def precision(bench: Bench) -> Iterator[Case]:
    """What follows backward in a step."""
    ours = partial(mixed_step, bench)
    scaled = [
        Contender("GradScaler, clip, AdamW", lambda: torch_step(bench, scaled=True, clipped=True)),
        Contender("fp16-amp", lambda: ours("fp16-amp", clip_norm=LIMIT, scale=SCALE)),
        Contender("fp16", lambda: ours("fp16", clip_norm=LIMIT, scale=SCALE)),
    ]
    yield Case(name="precision: scale, clip, step", contenders=scaled)
    clipped = [
        Contender("clip, AdamW", lambda: torch_step(bench, scaled=False, clipped=True)),
        Contender("fp32", lambda: ours("fp32", clip_norm=LIMIT)),
        Contender("bf16", lambda: ours("bf16", clip_norm=LIMIT)),
    ]
    yield Case(name="precision: clip, step", contenders=clipped)
    alone = [
        Contender("AdamW", lambda: torch_step(bench, scaled=False, clipped=False)),
        *[Contender(name, partial(ours, name)) for name in ("fp32", "bf16", "bf16-sr")],
    ]
    yield Case(name="precision: step", contenders=alone)


def torch_step(bench: Bench, *, scaled: bool, clipped: bool) -> Made:
    """What a trainer writes with torch alone."""
    model = gpt(bench.sized(WIDE), bench.device)
    optimizer = adam(model)
    parameters = list(model.parameters())
    scaler = GradScaler(bench.device.type, init_scale=SCALE, growth_interval=10**9, enabled=scaled)
    scaler.scale(torch.zeros((), device=bench.device))

    def step() -> None:
        scaler.unscale_(optimizer)
        if clipped:
            nn.utils.clip_grad_norm_(parameters, LIMIT)
        scaler.step(optimizer)
        scaler.update()

    return Made(step, before=lambda: fill_gradients(parameters, SCALE if scaled else 1.0))


def mixed_step(bench: Bench, name: str, **options: Any) -> Made:
    """Ours."""
    model = gpt(bench.sized(WIDE), bench.device)
    module, optimizer = mixed(model, adam(model), name, **options)
    parameters = list(module.parameters())
    nothing = torch.zeros((), device=bench.device)

    def before() -> None:
        fill_gradients(parameters, options.get("scale", 1.0))
        optimizer.scale(nothing)  # takes in the loss, as a trainer does

    return Made(optimizer.step, before=before)


def fill_gradients(parameters: Sequence[Tensor], factor: float) -> None:
    """As backward leaves them."""
    for each in parameters:
        each.grad = torch.empty_like(each) if each.grad is None else each.grad
        each.grad.normal_(std=0.01 * factor)


def rounding(bench: Bench) -> Iterator[Case]:
    """Stochastic rounding of fp32 to bf16."""
    count = 1 << (10 if bench.smoke else 27)
    source = torch.randn(count, device=bench.device)
    target = torch.empty(count, dtype=torch.bfloat16, device=bench.device)
    contenders = [
        Contender("target.copy_(source)", lambda: Made(lambda: target.copy_(source))),
        Contender("stochastic_round_", lambda: Made(lambda: stochastic_round_(target, source, 0, 1, name="w"))),
    ]
    yield Case(name=f"rounding: 2^{count.bit_length() - 1}", contenders=contenders, calls=10, gigabytes=6e-9 * count)


def float8(bench: Bench) -> Iterator[Case]:
    """Forward and backward of linear layers."""
    contenders = [Contender(name, partial(linears, bench, eights=name == "float8")) for name in ("bf16", "float8")]
    yield Case(name="fp8: eager", contenders=contenders, calls=2)
    if not bench.smoke:  # compiling takes its time
        contenders = [
            Contender(name, partial(linears, bench, eights=name == "float8", compiled=True))
            for name in ("bf16", "float8")
        ]
        yield Case(name="fp8: torch.compile", contenders=contenders, calls=2)


def linears(bench: Bench, *, eights: bool, compiled: bool = False) -> Made:
    """A stack of them, and a training step without the optimizer's."""
    width, rows = (64, 32) if bench.smoke else (4096, 8192)
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": bench.device, "dtype": torch.bfloat16}
    model: Any = nn.Sequential(*[nn.Linear(width, width, bias=False, **options) for _ in range(8)])
    if eights:
        convert_to_float8_(model)
    if compiled:
        model = torch.compile(model)
    x = torch.randn(rows, width, requires_grad=True, **options)
    gradient = torch.randn(rows, width, **options)

    def step() -> None:
        model(x).backward(gradient)
        model.zero_grad()
        x.grad = None

    return Made(step)


def zero(bench: Bench) -> Iterator[Case]:
    """A training step, with all that sharding does around it but communication."""
    for size in sizes(bench):
        wrappers: dict[str, Callable[[nn.Module], tuple[nn.Module, Optimizer]]] = {
            "torch": lambda model: (model, adam(model)),
            "DDP": lambda model: (DistributedDataParallel(model), adam(model)),
            "FSDP2": partial(fully_sharded, bench),
            **{f"par-zero, stage {stage}": partial(ours_at, stage) for stage in range(4)},
        }
        contenders = [Contender(name, partial(training, bench, size, wrap)) for name, wrap in wrappers.items()]
        yield Case(name=f"zero: {size.name}", contenders=contenders, calls=size.calls)


def fully_sharded(bench: Bench, model: nn.Module, policy: OffloadPolicy | None = None) -> tuple[nn.Module, Optimizer]:
    """FSDP2, a unit for each block."""
    mesh, policy = init_device_mesh(bench.device.type, (1,)), policy or OffloadPolicy()
    for each in model.children():
        if isinstance(each, Block):
            fully_shard(each, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model, adam(model)


def ours_at(stage: int, model: nn.Module, offload: Mapping[str, Any] | None = None) -> tuple[nn.Module, Optimizer]:
    """par-zero with its defaults; at stage 3, which takes no weights that autocast casts, they are gathered in bf16."""
    optimizer = adam(model)
    precision = {"param_dtype": torch.bfloat16 if stage == 3 else None}
    shard(model, optimizer, stage=stage, group=world(), precision=precision, offload=offload)
    return model, optimizer


def training(bench: Bench, size: Size, wrap: Callable[[nn.Module], tuple[nn.Module, Optimizer]]) -> Made:
    """A whole step."""
    module, optimizer = wrap(gpt(size, bench.device))
    ids = tokens(size, 2 * size.rows, bench.device)

    def step() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = loss_of(module(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Made(step)


def offload(bench: Bench) -> Iterator[Case]:
    """A step whose optimizer, and at stage 3 also parameters, are on the host."""
    size = bench.sized(BIG)
    wrappers: dict[str, Callable[[nn.Module], tuple[nn.Module, Optimizer]]] = {
        "FSDP2, CPUOffloadPolicy": partial(fully_sharded, bench, policy=CPUOffloadPolicy()),
        "all on the device": partial(ours_at, 2),
        "optimizer='host'": partial(ours_at, 2, offload={"optimizer": "host"}),
        "optimizer='host', overlap='backward'": partial(
            ours_at, 2, offload={"optimizer": "host", "overlap": "backward"}
        ),
        "optimizer='host', parameters='host'": partial(ours_at, 3, offload={"optimizer": "host", "parameters": "host"}),
    }
    contenders = [Contender(name, partial(training, bench, size, wrap)) for name, wrap in wrappers.items()]
    yield Case(name=f"offload: {size.name}", contenders=contenders, calls=size.calls)


def checkpoint(bench: Bench) -> Iterator[Case]:
    """Saving and loading of a model with its optimizer, in the folder for temporary files."""
    model = gpt(bench.sized(BIG), bench.device)
    optimizer = adam(model)
    fill_gradients(list(model.parameters()), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    gigabytes = 12e-9 * sum(each.numel() for each in model.parameters())
    with tempfile.TemporaryDirectory(prefix="par-bench-") as name:
        folder = Path(name)
        save = partial(
            par_checkpoint.save, model=model, optimizer=optimizer, transfer=par_checkpoint.Transfer(progress=False)
        )
        load = partial(
            par_checkpoint.load, model=model, optimizer=optimizer, transfer=par_checkpoint.Transfer(progress=False)
        )

        def saved(name: str, act: Callable[[Path], object]) -> Contender:
            return Contender(name, lambda: into(folder / name, act))

        def loaded(name: str, act: Callable[[Path], object], save: Callable[[Path], object]) -> Contender:
            return Contender(name, lambda: out_of(folder / name, act, save))

        def torch_save(path: Path) -> None:
            dcp_save(state_of(model, optimizer), checkpoint_id=path)

        def torch_load(path: Path) -> None:
            dcp_load(state_of(model, optimizer), checkpoint_id=path)

        def torch_async(options: StagingOptions | None, path: Path) -> object:
            stager = None if options is None else DefaultStager(options)
            return dcp_async_save(state_of(model, optimizer), checkpoint_id=path, async_stager=stager)

        ours, cases = "par-checkpoint", partial(Case, gigabytes=gigabytes, turns=4)
        yield cases(name="checkpoint: save", contenders=[saved("DCP", torch_save), saved(ours, save)])
        staged: dict[str, StagingOptions | None] = {"DCP": None}
        if bench.device.type == "cuda":  # the CPU has no pinned memory
            staged["DCP, pinned"] = StagingOptions(use_shared_memory=False, use_async_staging=False)
            staged["DCP, pinned, background copy"] = StagingOptions(use_shared_memory=False)
        blocked = [saved(name, partial(torch_async, options)) for name, options in staged.items()]
        blocked += [saved(ours, partial(save, async_=True))]
        blocked += [
            saved(
                f"{ours}, background copy",
                partial(save, async_=True, transfer=par_checkpoint.Transfer(copy="background")),
            )
        ]
        yield cases(name="checkpoint: async save, blocked", contenders=blocked, until_return=True)
        loads = [loaded("DCP", torch_load, torch_save), loaded(ours, load, save)]
        yield cases(name="checkpoint: load", contenders=loads)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves, and loads into."""
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def into(path: Path, save: Callable[[Path], object]) -> Made:
    """Saves into an empty place, with nothing left to write back; what goes on in the background then ends untimed."""
    pending: list[object] = []

    def before() -> None:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()

    return Made(lambda: pending.append(save(path)), before=before, after=lambda: finish(pending.pop()))


def finish(handle: object) -> None:
    """Waits for a save."""
    if isinstance(handle, par_checkpoint.Save):
        handle.wait()
    handle = getattr(handle, "upload_completion", handle)  # where torch stages in the background, too
    if isinstance(handle, Future):
        handle.result()


def out_of(path: Path, load: Callable[[Path], object], save: Callable[[Path], object]) -> Made:
    """Loads what was just saved."""
    shutil.rmtree(path, ignore_errors=True)
    save(path)
    return Made(lambda: load(path))


def pipeline(bench: Bench) -> Iterator[Case]:
    """A training step of microbatches: one loop over them, and schedules that one rank runs alone."""
    for size in sizes(bench):
        contenders = [
            Contender("loop", partial(looped, bench, size)),
            Contender("1F1B", partial(piped, bench, size, one_f_one_b(1, MICROBATCHES))),
            Contender("ZB-V", partial(piped, bench, size, zb_v(1, MICROBATCHES))),
        ]
        yield Case(name=f"pipeline: {size.name}", contenders=contenders, calls=size.calls)


def looped(bench: Bench, size: Size) -> Made:
    """Without a pipeline."""
    model = gpt(size, bench.device).bfloat16()
    ids = tokens(size, MICROBATCHES * size.rows, bench.device)

    def accumulate() -> None:
        for part in ids.chunk(MICROBATCHES):
            (loss_of(model(part), part) / MICROBATCHES).backward()

    return stepped(accumulate, adam(model))


def piped(bench: Bench, size: Size, schedule: Schedule) -> Made:
    """With one, of as many stages as the schedule has."""
    model = gpt(size, bench.device).bfloat16()
    layers = list(model)
    cuts = [len(layers) * number // schedule.stages for number in range(schedule.stages + 1)]
    stages = [nn.Sequential(*layers[cuts[i] : cuts[i + 1]]) for i in range(schedule.stages)]
    run = Pipeline(stages, schedule, world(), loss_fn=loss_of)
    ids = tokens(size, MICROBATCHES * size.rows, bench.device)
    return stepped(lambda: run.step(ids, target=ids), adam(model))


def stepped(accumulate: Act, optimizer: Optimizer) -> Made:
    """Gradients, and the optimizer's step."""

    def step() -> None:
        accumulate()
        optimizer.step()
        optimizer.zero_grad()

    return Made(step)


def sizes(bench: Bench) -> list[Size]:
    """The models that are trained."""
    return [SMOKE] if bench.smoke else [BIG, TINY]


def gpt(size: Size, device: torch.device) -> nn.Sequential:
    """A decoder without positions."""
    torch.manual_seed(0)
    blocks = [Block(size.width, size.heads) for _ in range(size.depth)]
    ends = nn.Embedding(size.vocabulary, size.width), nn.Linear(size.width, size.vocabulary)
    return nn.Sequential(ends[0], *blocks, nn.LayerNorm(size.width), ends[1]).to(device)


def tokens(size: Size, rows: int, device: torch.device) -> Tensor:
    """A batch; what is predicted is the same token, which costs as much."""
    return torch.randint(size.vocabulary, (rows, size.length), device=device)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def adam(model: nn.Module) -> Optimizer:
    """The optimizer of all contenders."""
    return AdamW(model.parameters(), lr=1e-4, fused=True)


PARTS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "precision": precision,
    "rounding": rounding,
    "fp8": float8,
    "zero": zero,
    "offload": offload,
    "checkpoint": checkpoint,
    "pipeline": pipeline,
}


if __name__ == "__main__":
    main()
