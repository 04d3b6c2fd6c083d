"""Each wait of the offload code is needed: without it, the strict accelerator names a race, or a number changes."""

import gc
import inspect
import re
import sys
import time
from itertools import product
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import settle_
from par_testing import Accelerator
from par_zero import Offload, _unit, shard, summon
from par_zero.offload import host_gradients, link, swapper, tier
from par_zero.watch import freed

WAITS = {
    link: r"\.(wait_event|wait_stream|synchronize|arrive|begin_step)\(",
    host_gradients: r"\.(wait_event|synchronize)\(",
    swapper: r"\.arrive\(",
    tier: r"link\.(begin_step|finish_copies_in|wait_for|settle)\(|runner\.wait_for\(",
    _unit: r"link\.wait_for\(",
    freed: r"freed\.settle\(",
}
"""Statements that order two accesses, by module."""


class RawSGD(torch.optim.SGD):
    """An optimizer whose kernels read memory without torch's functions, as extensions in C++ do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.is_cpu and tensor.grad is not None:
                    assert torch.from_dlpack(torch._C._to_dlpack(tensor.grad)).isfinite().all()
        return super().step(closure)


class Blocks(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )

    def forward(self, x):
        x = x.to(self.blocks[0][0].weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        return x


def trained(
    *,
    stage=2,
    precision=None,
    microbatches=1,
    between=lambda _module, _optimizer: None,
    parameters="device",
    overlap="auto",
    make=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
):
    """Losses and parameters after three steps with the optimizer on the host."""
    torch.accelerator.synchronize()  # copies of a run that has failed
    torch.manual_seed(0)
    module = Blocks().to("strict")
    optimizer = make(module.parameters())
    offload = Offload(optimizer="host", parameters=parameters, piece="4KiB", ahead=1, overlap=overlap)
    group = dist.group.WORLD
    update = {"elementwise": True}
    how = {"overlap": {"bucket": 9000}, "precision": precision, "update": update}
    shard(module, optimizer, stage=stage, group=group, offload=offload, **how)
    # Copied before the first step: a copy that blocks would tell the host of earlier copies that have ended.
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 32, generator=draw).to("strict") for _ in range(3)]
    losses = []
    for batch in batches:
        for _ in range(microbatches):
            losses.append(module(batch).square().mean())
            losses[-1].backward()
        between(module, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    found = [loss.item() for loss in losses]
    with summon(module):
        return found, [parameter.tolist() for parameter in module.parameters()]


def read_parameters(module, _):
    torch._foreach_norm([parameter.detach() for parameter in module.parameters()])


def read_gradients(_, optimizer):
    for group in optimizer.param_groups:
        assert all(torch.stack([tensor.grad.norm() for tensor in group["params"]]).isfinite())


def write_a_shard(module, _):
    weight = module.blocks[-1][0].weight  # a gradient of it has come, so its last copy to the device may still run
    with torch.no_grad():
        weight.copy_(torch.full(weight.shape, 0.01, dtype=weight.dtype))


def step_once_more(_, optimizer):
    optimizer.step()


def write_after_a_step(module, optimizer):
    optimizer.step()
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    settle_(tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(1.01)


def divide_gradients(_, optimizer):
    optimizer.grad_scale = optimizer.param_groups[0]["lr"] * torch.ones((), device="strict") + 1


RUNS = {
    "stage 2": {},
    "stage 3": {"stage": 3},
    "stage 0": {"stage": 0},
    "microbatches": {"microbatches": 2},
    "masters": {"precision": {"param_dtype": torch.bfloat16}},
    "not late": {"overlap": False},
    "parameters on the host": {"stage": 3, "parameters": "host"},
    "masters and parameters on the host": {
        "stage": 3,
        "parameters": "host",
        "precision": {"param_dtype": torch.bfloat16},
        "overlap": False,
    },
    "writes of a shard": {"stage": 3, "parameters": "host", "between": write_a_shard},
    "reads of parameters": {"between": read_parameters},
    "reads of gradients": {"between": read_gradients},
    "two steps by one gradient": {"between": step_once_more},
    "a scale on the device": {"between": divide_gradients},
    "writes": {"between": write_after_a_step},
    "reads of memory": {"make": lambda parameters: RawSGD(parameters, lr=1e-2)},
    "steps in backward": {"overlap": "backward"},
    "steps in backward of masters": {"overlap": "backward", "precision": {"param_dtype": torch.bfloat16}},
}
"""Programs that between them need every wait. Each ends without an error if all waits are there."""


def functions(names, module):
    """Functions and methods that a module defines, by qualified name."""
    for value in list(names.values()):
        found = vars(value).values() if isinstance(value, type) else [value]
        for each in found if getattr(value, "__module__", "") == module else ():
            function = inspect.unwrap(each.fget if isinstance(each, property) else getattr(each, "__func__", each))
            if isinstance(function, FunctionType):
                yield function.__qualname__, function


def replace_line_(module: ModuleType, number: int, statement: str):
    """Replace one statement in the functions of a module, in this process."""
    lines = Path(module.__file__).read_text().splitlines()
    lines[number] = lines[number].replace(lines[number].strip(), statement)
    names = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile("\n".join(lines), module.__file__, "exec"), names)
    changed = dict(functions(names, module.__name__))
    for name, function in functions(vars(module), module.__name__):
        function.__code__ = changed[name].__code__


def dropped():
    """A model that is dropped while its last step still copies, and tensors that take its memory."""
    for stage, overlap in [*product((0, 2, 3), ("auto", False))] * 2:
        module = Blocks().to("strict")
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        offload = Offload(optimizer="host", piece="4KiB", overlap=overlap)
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, overlap={"bucket": 9_000})
        module(torch.ones(4, 32, device="strict")).sum().backward()
        optimizer.step()
        del module, optimizer
        gc.collect()
        time.sleep(0.2)  # the thread of the step holds the model
        for size in (32, 64, 4096, 9000 // 4, 16000):
            torch.zeros(size, device="strict").add_(1)


def waits():
    """Each statement that waits: its module, the number of its line from 0, and its text."""
    for module, pattern in WAITS.items():
        for number, line in enumerate(Path(module.__file__).read_text().splitlines()):
            if re.search(pattern, line) and re.fullmatch(r" +[\w.]+\(.*\)", line):
                name = module.__name__
                yield pytest.param(name, number, line.strip(), id=f"{name.removeprefix('par_zero.')}:{number + 1}")


def test_offload_has_waits():
    assert len(list(waits())) >= 12


@pytest.mark.storm
@pytest.mark.ranks(1, timeout=120, backend="strict", accelerator=Accelerator())
def test_offload_with_all_its_waits_repeats_its_numbers():
    """Also with each replaced by itself, so that the next test fails for the missing wait alone."""
    expected = {name: trained(**run) for name, run in RUNS.items()}
    for module, number, statement in (each.values for each in waits()):
        replace_line_(sys.modules[module], number, statement)
    assert expected == {name: trained(**run) for name, run in RUNS.items()}
    dropped()


# A world for each wait: a thread's fault may be raised at any line, and so long after what it belongs to.
@pytest.mark.storm
@pytest.mark.xfail(strict=True, reason="a wait is missing")
@pytest.mark.ranks(1, timeout=120, backend="strict", accelerator=Accelerator())
@pytest.mark.parametrize(("module", "number", "statement"), list(waits()))
def test_offload_without_a_wait_fails(module, number, statement):
    expected = {name: trained(**run) for name, run in RUNS.items()}
    replace_line_(sys.modules[module], number, f"pass  # {statement}")
    for name, run in RUNS.items():
        assert trained(**run) == expected[name], name
    dropped()
    time.sleep(0.4)  # for faults of threads that still run
