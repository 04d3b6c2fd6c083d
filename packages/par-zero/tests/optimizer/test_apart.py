"""Parameters that are not used in every step: an optimizer counts the steps of each, as on one device."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each, storm
from par_zero import shard

from ..helpers import STAGES, assert_near, copies, whole

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02, eps=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, lambd=0.1, t0=2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, lr_decay=0.1, eps=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, eps=1e-3, momentum=0.5, centered=True),
}


class Parted(nn.Module):
    """Layers of sizes that no block of 16 fits, of which some are left out of a step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, x, use=(0, 1, 2, 3)):
        for number in use:
            x = torch.tanh(self.layers[number](x)) + x
        return x


USES = ([(0, 1, 2)] * 2, [(0, 2), (0, 1, 2)], [(0, 2)] * 2, [(1, 2), (2,)], [(0, 1, 2, 3)] * 2, [(0, 2, 3)] * 2)
FROZEN = ({}, {"layers.2.weight"}, {"layers.2.weight"}, {}, {"layers.2.weight", "layers.0.bias"}, {})


def rows(step, rank):
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def train(module, optimizer, steps, ranks, reference=False):
    for step in steps:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in FROZEN[step])
        losses = [module(rows(step, rank), USES[step][rank]).square().mean() for rank in ranks]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()


TYPICAL = {("AdamW", 0), ("AdamW", 3), ("NAdam", 2), ("SGD", 1)}


@for_each(
    case=tuple(case if case in TYPICAL else storm(case) for case in itertools.product(OPTIMIZERS, STAGES)),
)
@pytest.mark.ranks(2)
def test_counts_of_parameters_are_those_of_one_device(case):
    name, stage = case
    reference = Parted().double()
    module = copy.deepcopy(reference)
    its, optimizer = OPTIMIZERS[name](reference.parameters()), OPTIMIZERS[name](module.parameters())
    train(reference, its, range(6), range(2))
    # One unit at stage 3, as ranks that use other units must have run them before.
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, units=lambda _: False)
    train(module, optimizer, range(6), [dist.get_rank()])
    assert_near(whole(module), copies(reference), rtol=1e-9, atol=1e-11)
