"""Parameters that are not used in every step: an optimizer counts the steps of each, as on one device."""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import settle_
from par_testing import for_each, storm
from par_zero import Offload, shard

from ..helpers import STAGES, Stumbling, assert_near, assert_same, copies, whole

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
        losses = [module(rows(step, rank).to(parameter.dtype), USES[step][rank]).square().mean() for rank in ranks]
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


KERNELS = {
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, foreach=True),
}


@for_each(kernels=("fused SGD", *map(storm, ("fused AdamW", "foreach AdamW"))))
@pytest.mark.ranks(2)
def test_parameters_that_have_parted_have_the_same_bits_at_every_stage(kernels):
    """A parameter begins anywhere within the blocks that vector kernels go through, and a rank's share ends in it."""
    results = []
    for stage in STAGES:
        module = Parted()
        optimizer = KERNELS[kernels](module.parameters())
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, units=lambda _: False)
        train(module, optimizer, range(6), [dist.get_rank()])
        results.append(whole(module))
    for result in results[1:]:
        assert_same(results[0], result)


def in_groups(make):
    """An optimizer of a model with other hyperparameters for biases."""

    def made(module):
        optimizer = make([each for each in module.parameters() if each.ndim == 2])
        optimizer.add_param_group({"params": [each for each in module.parameters() if each.ndim == 1], "lr": 0.05})
        return optimizer

    return made


@for_each(tier=("host", "disk", storm("late")), name=("NAdam", storm("SGD"), storm("AdamW")))
@pytest.mark.ranks(2)
def test_parameters_that_have_parted_lie_in_any_tier(tier, name, tmp_path):
    make = in_groups(OPTIMIZERS[name])
    reference = Parted().double()
    train(reference, make(reference), range(6), range(2))
    for stage in (1, 3):
        module = Parted().double()
        optimizer = make(module)
        where = 0.5 if tier == "host" else {"disk": 0.7}
        offload = Offload(optimizer=where, path=tmp_path, piece=256, overlap=tier == "late")
        if tier == "late" and stage < 3:
            continue  # refused
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, units=lambda _: False, offload=offload)
        train(module, optimizer, range(6), [dist.get_rank()])
        assert_near(whole(module), copies(reference), rtol=1e-9, atol=1e-11)


@for_each(how=("state dict", "pickled", "closure"))
@pytest.mark.ranks(1)
def test_torch_s_own_state_dict_has_all_counts(how):
    results = []
    for stops in (False, True):
        module = Parted()
        optimizer = OPTIMIZERS["NAdam"](module.parameters())
        shard(module, optimizer, stage=2, group=dist.group.WORLD)
        train(module, optimizer, range(4), [0])
        if stops:
            state, weights = optimizer.state_dict(), whole(module)
            if how == "pickled":
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                state = torch.load(file)
            module = Parted()
            optimizer = OPTIMIZERS["NAdam"](module.parameters())
            shard(module, optimizer, stage=2, group=dist.group.WORLD)
            module.load_state_dict(weights)
            optimizer.load_state_dict(state)
        for step in range(4, 6):

            def closure(module=module, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                module(rows(step, 0).float(), USES[step][0]).square().mean().backward()

            if how == "closure" and stops:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        results.append(whole(module))
    assert_same(*results)


@for_each(then=("again", "look", "save", "zero_grad"))
@pytest.mark.ranks(1)
def test_an_optimizer_holds_slices_between_steps_though_one_has_failed(then):
    results = []
    for fails in (False, True):
        module = Parted()
        optimizer = Stumbling(module.parameters(), lr=0.02)
        shard(module, optimizer, stage=1, group=dist.group.WORLD, update={"elementwise": True})
        slices = optimizer.param_groups[0]["params"]
        seen = []
        optimizer.register_step_post_hook(
            lambda optimizer, *_, seen=seen: seen.append(optimizer.param_groups[0]["params"])
        )
        for step in range(6):
            module(rows(step, 0).float(), USES[step][0]).square().mean().backward()
            if step == 3 and fails:
                Stumbling.fails = True
                with pytest.raises(ArithmeticError, match="stumbles"):
                    optimizer.step()
                if then == "look":
                    settle_(tensor for group in optimizer.param_groups for tensor in group["params"])
                elif then == "save":
                    optimizer.state_dict()
                elif then == "zero_grad":
                    optimizer.zero_grad()
                    module(rows(step, 0).float(), USES[step][0]).square().mean().backward()
                assert (optimizer.param_groups[0]["params"] is slices) == (then != "again")
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["params"] is slices
            assert set(optimizer.state) <= set(slices)
        assert all(params is slices for params in seen)
        results.append(whole(module))
    assert_same(*results)


@for_each(dampening=(0.0, 0.5))
@pytest.mark.ranks(1)
def test_fused_sgd_begins_momentum_late_or_says_why_it_cannot(dampening):
    """Torch's own stumbles over it, with a TypeError."""

    def make(parameters, *, fused):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=dampening, fused=fused)

    reference, module = Parted().double(), Parted().double()
    its, optimizer = make(reference.parameters(), fused=False), make(module.parameters(), fused=True)
    shard(module, optimizer, stage=1, group=dist.group.WORLD)
    steps = 6 if dampening == 0 else 4  # in the next one the last layer is used for the first time
    train(reference, its, range(steps), [0])
    train(module, optimizer, range(steps), [0])
    if dampening:
        with pytest.raises(ValueError, match=r"'layers\.3\..*first gradient after others.*give SGD fused=False"):
            train(module, optimizer, range(4, 5), [0])
    assert_near(whole(module), copies(reference), rtol=1e-12, atol=1e-13)  # kernels that round otherwise
