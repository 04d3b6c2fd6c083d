"""Drawn scripts: steps, looks, writes and faults in any order leave the same bits as in memory."""

import random

import pytest
import torch
import torch.distributed as dist

from par_groups import settle_
from par_zero import Offload, no_sync, shard, summon

from ..helpers import assert_same, batch, loss_of, mlp, policies, sgd, whole
from .cases import failing, moments, small

ACTIONS = (
    "step",
    "step",
    "step",
    "one",
    "other",
    "skip",
    "twice",
    "settle",
    "state",
    "copies",
    "summon",
    "save",
    "load",
)


def write_(action, factor, module, both):
    """Changes what others may be at work on, once they have settled."""
    tensors = [tensor for optimizer in both for tensor in optimizer.param_groups[0]["params"]]
    if action in ("settle", "state", "copies"):
        settle_(tensors)
    if action == "state":
        for optimizer in both:
            for state in optimizer.state.values():
                for slot in {"exp_avg", "momentum_buffer"} & state.keys():
                    state[slot].mul_(factor)
    if action == "copies":
        for tensor in tensors:
            tensor.mul_(factor)
    if action == "summon":
        with summon(module):
            next(module.parameters()).mul_(factor)


def look(action, optimizer):
    if action == "load":
        optimizer.load_state_dict(optimizer.state_dict())
    if action == "save":
        optimizer.state_dict()  # waits
        assert all(torch.isfinite(each).all() for each in moments(optimizer).values())


def despite_faults(call, *arguments, again):
    """Calls once more what has told of an earlier write that failed, and has done nothing else yet."""
    try:
        call(*arguments)
    except OSError:
        if again:
            despite_faults(call, *arguments, again=True)


def run(script, stage, offload, patch=None, **options):
    """A model that two optimizers share, after a script of actions."""
    module = mlp()
    matrices, rest = ([each for each in module.parameters() if (each.ndim == 2) is wanted] for wanted in (True, False))
    both = [small(matrices), sgd(rest)]
    shard(module, both, stage=stage, group=dist.group.WORLD, offload=offload, **policies(bucket=300, **options))
    dtype = options.get("param_dtype", torch.float32)
    late = offload is not None and offload.overlap is True
    for number, (action, factor, fault) in enumerate(script):
        if patch is not None and fault:
            failing(patch, "pwritev", fault)
        if action == "twice":
            with no_sync(module):
                loss_of(module, batch(number, width=8, micro=1).to(dtype)).backward()
        loss = loss_of(module, batch(number, width=8).to(dtype))
        despite_faults(loss.backward, again=False)
        with torch.no_grad():
            despite_faults(write_, action, factor, module, both, again=late)
        for optimizer in {"one": both[:1], "other": both[1:], "skip": []}.get(action, both):
            despite_faults(optimizer.step, again=late)  # else it tells of it after the step
        for optimizer in both:
            optimizer.zero_grad()
            look(action, optimizer)
    despite_faults(whole, module, again=late)
    found = whole(module)
    for n, optimizer in enumerate(both):
        found |= {f"{n}.{name}": value for name, value in moments(optimizer).items()}
    return found


@pytest.mark.storm
@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.ranks(1, timeout=400)
def test_drawn_scripts_leave_the_same_bits(overlap, faults, tmp_path):
    for seed in range(40):
        draw = random.Random(seed)
        script = [
            (draw.choice(ACTIONS), draw.uniform(0.5, 1), draw.randint(1, 6) if faults and draw.random() < 0.2 else 0)
            for _ in range(8)
        ]
        options = {"param_dtype": torch.bfloat16} if draw.random() < 0.5 else {}
        stage = 3 if overlap else draw.choice((0, 1, 2, 3, 3))
        parts = draw.choice(["disk", {"host": 0.3, "disk": 0.4}])
        budget = draw.choice([None, "1MB"]) if stage == 3 else None  # of units, which stay whole where there is room
        pieces = {"piece": draw.choice([256, 1024]), "ahead": draw.randint(1, 5)}
        away = [
            draw.choice(["device", "disk", {"host": 0.3, "disk": 0.4}]) if stage == 3 else "device" for _ in range(2)
        ]
        pieces |= {"parameters": away[0], "gradients": away[1]}
        offload = Offload(optimizer=parts, path=tmp_path, overlap=overlap, budget=budget, **pieces)
        expected = run(script, stage, None, **options)
        with pytest.MonkeyPatch.context() as patch:
            found = run(script, stage, offload, patch if faults else None, **options)
        try:
            assert_same(found, expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {script}, stage {stage}, {offload}, {options}") from error
