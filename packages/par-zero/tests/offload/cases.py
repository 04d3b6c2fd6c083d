"""What the tests of a disk's state train: with it and without it, everything is to be the same."""

import errno
import os

import torch
import torch.distributed as dist
from torch import nn

from par_groups import SCALARS, gradients, segments_of, settle_
from par_zero import Offload, no_sync, shard, summon

from ..helpers import adamw, batch, loss_of, mlp, policies, sgd, sharded, whole

BF16 = {"param_dtype": torch.bfloat16}


def moments(optimizer):
    """Copies of all state: by param group and slot, put together; of counts, that of each parameter."""
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            state = optimizer.state.get(tensor, {})
            for slot, value in state.items():
                if slot != SCALARS and value.dim():
                    found.setdefault(f"{number}.{slot}", []).append(value.detach().cpu().clone().reshape(-1))
            alike = {slot: value for slot, value in state.items() if slot != SCALARS and not value.dim()}
            for name in segments_of(tensor).names if state else ():
                for slot, value in state.get(SCALARS, {name: alike}).get(name, {}).items():
                    found[f"{slot} of {name}"] = [value.detach().cpu().clone().reshape(1)]
    return {name: torch.cat(parts) for name, parts in found.items()}


def small(parameters):
    """AdamW on a disk in eight pieces or more."""
    return adamw(parameters, fused=True, foreach=None)


def on_disk(path, parts="disk", piece=256, **options):
    return Offload(optimizer=parts, path=path, piece=piece, ahead=3, **options)


def failing(monkeypatch, name, call):
    """Has a call of the kernel fail once, the one with that number from now on."""
    original, calls = getattr(os, name), []

    def fail(*args):
        calls.append(args)
        if len(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        return original(*args)

    monkeypatch.setattr(os, name, fail)


class Chosen(nn.Module):
    """A layer that data chooses, one that is frozen at first, and some that always run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.chosen, self.thawed = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x, *, choose=True):
        x = self.thawed(self.always(x).tanh())
        return self.chosen(x) if choose else x


def with_everything(stage, offload, make=torch.optim.AdamW):
    """Param groups, an lr schedule, norm clipping, no_sync, a parameter unused on a rank or on all, one that thaws."""
    module = Chosen()
    module.thawed.weight.requires_grad_(False)
    optimizer = make(
        [
            {"params": [each.weight for each in module.children()], "weight_decay": 0.1},
            {"params": [each.bias for each in module.children()], "lr": 3e-2},
        ],
        lr=1e-2,
        eps=1e-3,
    )
    own = type(optimizer).__module__ != torch.optim.AdamW.__module__  # a class of a test's own, which is unknown
    options = {"bucket": 1000, "offload": offload, "elementwise": own}
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(**options))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for step in range(6):
        if step == 3:
            module.thawed.weight.requires_grad_(True)
        with no_sync(module):
            module(batch(step, width=24), choose=step != 1).square().mean().backward()
        chosen = step != 1 and (dist.get_rank() == 0 or step % 2 == 0)
        module(batch(step, width=24, micro=1), choose=chosen or (stage == 3 and step != 1)).square().mean().backward()
        squares = sum(float(view.double().square().sum()) for _, _, view in gradients(optimizer))
        for _, _, view in gradients(optimizer):  # of this rank's share, as nothing else is asked here
            view.mul_(1 / max(1, squares**0.5 / 0.05))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return whole(module) | moments(optimizer)


def with_copies(stage, offload, steps=4):
    """Parameters in bf16 and fp32 copies of them, some of which are written or halved from outside between steps."""
    module, optimizer = sharded(mlp(), stage, small, offload=offload, **BF16)
    losses = []
    for step in range(steps):
        loss = loss_of(module, batch(step, width=8).bfloat16())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with summon(module), torch.no_grad():
                next(module.parameters()).mul_(0.5)
        if step == 1:
            module.load_state_dict(module.state_dict())  # rounds all copies
        if step == 2:
            with torch.no_grad():
                if offload is not None and offload.overlap is True:
                    settle_(optimizer.param_groups[0]["params"])
                for tensor in optimizer.param_groups[0]["params"]:
                    tensor.mul_(0.75)  # some of which are on their way to the disk
    found = {"loss": torch.stack(losses)} | whole(module) | moments(optimizer)
    return found | {"copies": torch.cat([tensor.detach() for tensor in optimizer.param_groups[0]["params"]])}


class Adapted(nn.Module):
    """A frozen layer, and an adapter of low rank beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(24, 24).requires_grad_(False)
        self.down, self.up = nn.Linear(24, 3, bias=False), nn.Linear(3, 24, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def two_models(stage, offload):
    """One model with an adapter, and one that two optimizers share, in turns."""
    adapted, plain = Adapted(), mlp(width=24)
    of_adapter = small([each for each in adapted.parameters() if each.requires_grad])
    matrices, rest = ([each for each in plain.parameters() if (each.ndim == 2) is wanted] for wanted in (True, False))
    of_plain = [sgd(matrices), small(rest)]
    shard(adapted, of_adapter, stage=stage, group=dist.group.WORLD, offload=offload, overlap={"bucket": 300})
    shard(plain, of_plain, stage=stage, group=dist.group.WORLD, offload=offload, overlap={"bucket": 300})
    for step in range(3):
        for module, optimizers in ((adapted, [of_adapter]), (plain, of_plain)):
            loss_of(module, batch(step, width=24)).backward()
            for optimizer in optimizers:
                optimizer.step()
            module.zero_grad()
    parts = [whole(adapted), whole(plain), *map(moments, (of_adapter, *of_plain))]
    return {f"{n}.{name}": value for n, part in enumerate(parts) for name, value in part.items()}


class Counting(torch.optim.Optimizer):
    """Counts its steps in a param group, in an attribute and in its state as a whole, and steps by all of them.

    Two counts more, one of them a tensor, go up only where there is a gradient.
    """

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr, "steps": 0, "busy": 0, "added": torch.zeros(())})
        self.rounds = 0

    @torch.no_grad()
    def step(self):  # takes no closure
        self.rounds += 1
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            group["steps"] += 1
            if any(parameter.grad is not None for parameter in group["params"]):
                group["busy"] += 1
                group["added"].add_(1)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                    rate = group["lr"] / (
                        group["steps"] + group["busy"] + group["added"] + self.rounds + self.state["calls"]
                    )
                    parameter.sub_(state["sum"], alpha=rate)


def counted(patch):
    """Bytes that the kernel moves from now on, by name of the call."""
    moved = {"preadv": [], "pwritev": []}  # lists, as threads count

    def count(name):
        original = getattr(os, name)

        def call(*args):
            size = original(*args)
            moved[name].append(size)
            return size

        return call

    for name in moved:
        patch.setattr(os, name, count(name))
    return moved
