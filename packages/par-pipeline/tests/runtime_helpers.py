"""What the tests of the runtime share: small stages, batches, and the same step on one device."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from par_pipeline import (
    Pipeline,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from par_pipeline.wire import message as messages

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
SOME = ("1f1b", "interleaved", "zb_h1", "zb_v")


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
    return Pipeline(mine(stages, schedule), schedule, dist.group.WORLD, **{"loss_fn": mse, "timeout": 20, **options})


def send_tensors_apart(apart=True):
    """From now on, in this process: in messages of their own, as on GPUs, though over gloo."""
    messages.are_apart = lambda device: apart


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


def gradients(module):
    return [None if each.grad is None else each.grad.clone() for each in module.parameters()]


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
