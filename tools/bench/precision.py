"""Norm, clip, and what follows backward in an fp16 step, against torch's own, on plain tensors, DTensors and FSDP2.

Two gloo ranks on one machine, one thread each. Every contender lives in the same processes and runs once in every turn,
in another order each time; gradients are put back before. Ratios are medians over the turns. Run as
`python tools/bench/precision.py`; writes docs/benchmarks/precision.md and .json.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from _ranks import spawned
from _table import write
from _turns import quartile, ratio, shuffled
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

from par_precision import clip_grad_norm_, mixed
from par_zero import shard

RANKS, TURNS, WARM_UPS = 2, 150, 5
SCALE = 2.0**10
LIMIT = 1.0


@dataclass(kw_only=True)
class Contender:
    """Something to time.

    Args:
        case: The comparison that it takes part in.
        name: The contender's name in the table.
        run: The function that is timed.
        holders: The tensors whose gradients are put back before.
        reference: Whether the others' ratios are to this one.
        loss: Whether the loss is handed in first, as a trainer does.
    """

    case: str
    name: str
    run: Callable[[], object]
    holders: Sequence[Tensor]
    reference: bool = False
    loss: Callable[[Tensor], object] = float

    def __post_init__(self) -> None:
        self._gradients = [(each, local(given).clone()) for each in self.holders if (given := each.grad) is not None]

    def prepare(self) -> None:
        """Puts the gradients back."""
        self.loss(torch.zeros(()))
        for each, saved in self._gradients:
            if each.grad is not None:
                local(each.grad).copy_(saved)


def main() -> None:
    """Measures, and writes medians, quartiles and ratios."""
    times: dict[tuple[str, str, bool], list[float]] = spawned(RANKS, timed)
    references = {case: each for (case, _, flag), each in times.items() if flag}
    rows = [
        {
            "case": case,
            "contender": name,
            "median ms": f"{statistics.median(each):.2f}",
            "quartiles ms": f"{quartile(each, 1):.2f} to {quartile(each, 3):.2f}",
            "ratio": "1" if flag else f"{ratio(each, references[case]):.2f}",
        }
        for (case, name, flag), each in times.items()
    ]
    note = (
        "The case *small* has 300 fp32 tensors: 150 of 32 x 32 and 150 of 32. The case *large* has 24 of 1024 x 1024. "
        "*Flat* is *small* under par-zero at stage 0. An fp16 step covers the work after backward: unscale, norm, "
        "clip to 1, fused AdamW and the scale update, for the small tensors. The precision `fp16` has fp32 master "
        "weights, so its step also casts gradients and weights; the others cast in forward. Two rows show only the "
        f"operations that every clipping of DTensors needs. {RANKS} gloo ranks with one thread each; times are those "
        f"of the slowest rank. Each of {TURNS} turns runs every contender once, in another order. `ratio` is the "
        "median over the turns (lower is better)."
    )
    write("precision", "Gradient norm, clipping and an fp16 step", rows, note)


def contenders() -> list[Contender]:
    """All of them."""
    return [*clipping(), *after_backward()]


def clipping() -> list[Contender]:
    """Norm and clip."""
    found = []
    world = dist.group.WORLD
    for case, made in (("clip, small", small()), ("clip, large", large()), ("clip, DTensors", placed(small()))):
        tensors = with_gradients(made)
        found.append(
            Contender(case=case, name="torch.nn.utils", run=torch_clip(tensors), holders=tensors, reference=True)
        )
        own = None if case != "clip, DTensors" else world
        found.append(Contender(case=case, name="par-precision", run=our_clip(tensors, own), holders=tensors))
    found.append(Contender(case="clip, DTensors", name="its all-reduce alone", run=one_number(), holders=()))
    bare = with_gradients(placed(small()))
    name = "reads, all-reduce and product alone"
    found.append(Contender(case="clip, DTensors", name=name, run=without_norm(bare), holders=bare))
    module = small()
    optimizer = AdamW(module.parameters(), fused=True)
    shard(module, optimizer, stage=0, group=group())
    sum((p.square().sum() for p in module.parameters()), torch.zeros(())).backward()
    flat = [tensor for part in optimizer.param_groups for tensor in part["params"]]
    return [*found, Contender(case="clip, small", name="par-precision, flat", run=our_clip(flat, None), holders=flat)]


def after_backward() -> list[Contender]:
    """What follows backward in a step."""
    found = []
    for how, make in (("plain", small), ("DTensors", lambda: placed(small())), ("FSDP2", sharded)):
        case = f"fp16 step, {how}"
        module = make()
        tensors = with_gradients(module, SCALE)
        run = torch_step(tensors, AdamW(module.parameters(), fused=True))
        found.append(Contender(case=case, name="GradScaler, clip, AdamW", run=run, holders=tensors, reference=True))
        for precision in ("fp16-amp", "fp16"):
            module = make()
            among = None if how == "plain" else group()  # torch's plain contender does not communicate either
            optimizer = AdamW(module.parameters(), fused=True)
            _, ours = mixed(module, optimizer, precision, group=among, clip_norm=LIMIT, scale=SCALE)
            tensors = with_gradients(module, SCALE)
            found.append(Contender(case=case, name=precision, run=ours.step, holders=tensors, loss=ours.scale))
    return found


def small() -> nn.Module:
    """300 tensors."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(150)))


def large() -> nn.Module:
    """24 tensors."""
    return nn.ParameterList([nn.Parameter(torch.zeros(1024, 1024)) for _ in range(24)])


def placed(module: nn.Module) -> nn.Module:
    """The module's parameters as DTensors, cut by rows."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return nn.ParameterList(
        [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in module.parameters()]
    )


def sharded() -> nn.Module:
    """The small model under FSDP2."""
    module = small()
    fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))
    return module


def with_gradients(module: nn.Module, factor: float = 1.0) -> list[Tensor]:
    """A module's parameters, each with a gradient of its kind."""
    tensors: list[Tensor] = list(module.parameters())
    for each in tensors:
        here = torch.randn(local(each).shape, dtype=each.dtype) * factor * 0.01
        each.grad = DTensor.from_local(here, each.device_mesh, each.placements) if isinstance(each, DTensor) else here
    return tensors


def torch_clip(tensors: list[Tensor]) -> Callable[[], object]:
    """Without us."""
    return lambda: nn.utils.clip_grad_norm_(tensors, LIMIT)


def our_clip(tensors: list[Tensor], among: dist.ProcessGroup | None) -> Callable[[], object]:
    """Ours."""
    return lambda: clip_grad_norm_(tensors, LIMIT, among)


def one_number() -> Callable[[], object]:
    """What ours communicates."""
    number = torch.zeros((), dtype=torch.float64)
    return lambda: dist.all_reduce(number)


def without_norm(tensors: list[Tensor]) -> Callable[[], object]:
    """What nobody can leave out: each gradient read, one number communicated, each gradient multiplied."""
    number, one = torch.zeros((), dtype=torch.float64), torch.ones(())

    def run() -> None:
        gradients = [each.grad._local_tensor for each in tensors]  # type: ignore[union-attr]  # DTensors' own
        dist.all_reduce(number)
        torch._foreach_mul_(gradients, one)

    return run


def torch_step(tensors: list[Tensor], optimizer: Optimizer) -> Callable[[], object]:
    """What a trainer writes with torch alone."""
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=10**9)
    scaler.scale(torch.zeros(()))

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(tensors, LIMIT)
        scaler.step(optimizer)
        scaler.update()

    return step


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def group() -> dist.ProcessGroup:
    """All ranks."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed is not initialised")
    return world


def timed() -> dict[tuple[str, str, bool], list[float]]:
    """Milliseconds of each contender, turn by turn."""
    every = contenders()
    times: dict[tuple[str, str, bool], list[float]] = {(c.case, c.name, c.reference): [] for c in every}
    for turn in range(-WARM_UPS, TURNS):
        for each in shuffled(every, turn):
            each.prepare()
            dist.barrier()
            start = time.perf_counter()
            each.run()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn >= 0:
                times[each.case, each.name, each.reference].append(1e3 * seconds.item())
    return times


if __name__ == "__main__":
    main()
