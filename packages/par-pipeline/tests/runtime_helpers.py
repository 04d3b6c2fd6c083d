"""What the tests of the runtime share: small stages, batches, and the same step on one device."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_pipeline import (
    Pipeline,
    Transport,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    make_lanes,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)

WHOLE = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "looped_bfs": looped_bfs}
SPLIT = {
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}
SCHEDULES = WHOLE | SPLIT
FEW = pytest.param(2, marks=pytest.mark.storm)
"""A world without a rank between the first and the last one, of a test that has a larger world beside it."""
TIMEOUT = 3600  # seconds, beyond any test's limit: what has waited for it does not pass
TYPICAL = ("1f1b", "interleaved", "zb_v")
"""One stage a rank, several in a loop, and two in a V with a split backward; all ten run in test_every_schedule."""


def block(width, seed, dtype=torch.float64):
    """A stage with a bias, a weight, and a norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.LayerNorm(width)).to(
        dtype
    )


def stages_of(schedule, make=lambda number: block(5, number)):
    """Every stage, alike on all ranks."""
    return [make(number) for number in range(schedule.stages)]


def mine(stages, schedule):
    return [stages[number] for number in schedule.stage_of(dist.get_rank())]


def pipeline(stages, schedule, **options):
    transport = replace(Transport(timeout=TIMEOUT, lanes=LANES[-1]), **options.pop("transport", {}))
    given = {"loss_fn": mse, "transport": transport, **options}
    return Pipeline(mine(stages, schedule), schedule, dist.group.WORLD, **given)


def lanes_of(group, device, timeout):
    """Lanes as a pipeline makes them, also on a strict device: the end of one pipeline must not end its world."""
    lanes = make_lanes(group, device, timeout)
    if device.type != "strict":
        return lanes
    return lanes._replace(up_second=Forgotten(lanes.up_second), down_second=Forgotten(lanes.down_second))


def apart(group, device, timeout):
    """Lanes on which tensors come in messages of their own, as on GPUs, though over gloo."""
    return lanes_of(group, device, timeout)._replace(are_apart=True)


def strict_apart(group, device, timeout):
    """Headers go over gloo, as ever, and tensors over strict communicators, as they do over NCCL on GPUs."""
    up, down = (dist.new_group(backend="strict", group_desc=name) for name in ("up", "down"))
    return apart(group, device, timeout)._replace(up_second=up, down_second=down)


class Forgotten:
    """A strict communicator that is forgotten where NCCL's is aborted, which would end all strict ones of the world."""

    def __init__(self, group):
        self.send, self.recv = group.send, group.recv

    def abort(self):
        pass


def strict_lanes_to_reset(group, device, timeout):
    """As `strict_apart`, for a pipeline that fails and goes on."""
    lanes = strict_apart(group, device, timeout)
    return lanes._replace(up_second=Forgotten(lanes.up_second), down_second=Forgotten(lanes.down_second))


LANES = [lanes_of]


def send_tensors_apart(are_apart=True):
    """From now on, in this process."""
    LANES[-1] = apart if are_apart else lanes_of


def mse(output, target):
    return (output - target).square().mean()


def data(rows, width=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator, dtype=dtype) for _ in range(2))


def serial(stages, inputs, targets, loss_fn=mse, order=None):
    """The same microbatches one after another on one device; the loss of all of them, weighted by rows."""
    rows = sum(len(each) for each in targets)
    total = 0.0
    for number in range(len(targets)) if order is None else order:
        x, y = inputs[number], targets[number]
        for stage in stages:
            x = stage(*x) if isinstance(x, tuple) else stage(x)
        loss = loss_fn(x, y)
        share = torch.tensor(len(y), dtype=torch.float64) / rows
        if loss.requires_grad:
            loss.backward(share.to(loss))
        total = total + (loss * share.to(loss)).detach()
    return total


def backward_order(schedule):
    """In which a stage's microbatches run backward."""
    return [action.microbatch for action in schedule.ranks[0] if action.stage == 0 and action.op in "BI"]


def clear(modules):
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def assert_gradients(stages, reference, schedule, exact):
    """Of this rank's stages. In fp64 an added product differs from the sum of products in the last digits."""
    for number in schedule.stage_of(dist.get_rank()):
        for (name, one), other in zip(stages[number].named_parameters(), reference[number].parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), (number, name)
            if exact and one.grad is not None:
                assert torch.equal(one.grad, other.grad), (number, name, (one.grad - other.grad).abs().max())
            elif one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


copied = copy.deepcopy


def check_steps(schedule, make, batches, loss_fn=mse, around=nullcontext, **options):
    """Steps of a pipeline, each compared with the serial one; `around()` is a context for a step alone."""
    stages = stages_of(schedule, make)
    reference = copied(stages)
    run = pipeline(stages, schedule, loss_fn=loss_fn, **options)
    exact = not any(action.op == "W" for actions in schedule.ranks for action in actions)
    for x, y in batches:
        args = x if isinstance(x, tuple) else (x,)
        with around():
            result = run.step(*args, target=y)
        parts = list(zip(*(arg.tensor_split(schedule.microbatches) for arg in args), strict=True))
        expected = serial(
            reference, parts, y.tensor_split(schedule.microbatches), loss_fn, order=backward_order(schedule)
        )
        assert_gradients(stages, reference, schedule, exact=exact)
        if run.is_last:
            torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=0)
        else:
            assert result.loss is None
    return stages, reference
