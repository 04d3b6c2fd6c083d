"""Optimizers that strangers write or bring: whole tensors without an option, plain signatures, own ways to write."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import shard

from ..helpers import WHOLE, assert_near, assert_same, batch, copies, joint, loss_of, mlp, sharded, whole

pytestmark = pytest.mark.filterwarnings("ignore:optimizer=.*does not know what this class looks at:UserWarning")


class Own(torch.optim.Optimizer):
    """A small optimizer as people write them: no closure, and a zero_grad without arguments."""

    def __init__(self, parameters, lr=0.1, scale=1.0):
        super().__init__(parameters, {"lr": lr, "scale": scale})

    def zero_grad(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * each.grad)


class Replacing(Own):
    """Makes new tensors instead of writing in place."""

    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data = each.data - group["lr"] * each.grad.data


class Scaled(Own):
    """Takes a number where others take a closure."""

    @torch.no_grad()
    def step(self, scale):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(scale * group["lr"] * each.grad)


class Lone(torch.optim.SGD):
    """Has no learning rate until its first step, as Adafactor of transformers has none."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1
        return super().step(closure)


class InConstructor(Own):
    """Makes its state before the first step, some of it a copy of the parameters."""

    def __init__(self, parameters):
        super().__init__(parameters)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = {"sum": torch.zeros_like(each), "start": each.detach().clone()}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.state[each]["sum"] += each.grad
                    each.copy_(self.state[each]["start"] - group["lr"] * self.state[each]["sum"])


class Blocks(Own):
    """Momentum in 8-bit codes with a scale for each block of 256, of tensors with 4,096 elements or more."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if each.numel() < 4096:
                    momentum = state.setdefault("momentum", torch.zeros_like(each)).mul_(0.9).add_(each.grad)
                else:
                    momentum = each.grad
                    if state:
                        momentum = momentum + 0.9 * (state["codes"] * state["scale"]).view_as(each)
                    blocks = momentum.reshape(-1, 256)
                    state["scale"] = blocks.abs().amax(1, keepdim=True) / 127
                    state["codes"] = (blocks / state["scale"]).round().to(torch.int8)
                each.sub_(momentum, alpha=group["lr"])


def steps(module, optimizer, rows, width=8, arguments=()):
    for step in range(3):
        loss_of(module, rows(step, width=width)).backward()
        optimizer.step(*arguments)
        optimizer.zero_grad()


PLAIN = {
    "Own": (Own, ()),
    "Replacing": (Replacing, ()),
    "Scaled": (Scaled, (0.5,)),
    "Lone": (Lone, ()),
    "InConstructor": (InConstructor, ()),
    **{name: (kind, ()) for name, kind in WHOLE.items() if name != "Muon"},
}


@for_each(name=PLAIN, stage=(0, 1, 2, 3))
@pytest.mark.ranks(2)
def test_unknown_optimizers_step_as_on_one_device(name, stage):
    """Without an option, but for a class whose step needs an argument, so that no trial can be made of it."""
    make, arguments = PLAIN[name]
    reference, module = mlp().double(), mlp().double()
    optimizer = make(module.parameters())
    shard(
        module,
        optimizer,
        stage=stage,
        group=dist.group.WORLD,
        overlap={"bucket": 300},
        update={"atomic": name == "Scaled"},
    )
    steps(module, optimizer, batch_of, arguments=arguments)
    steps(reference, make(reference.parameters()), joint_of, arguments=arguments)
    assert_near(whole(module), copies(reference), rtol=1e-9, atol=1e-9)  # fp64 sums in another order


def batch_of(step, width):
    return batch(step, width=width).double()


def joint_of(step, width):
    return joint(step, width=width).double()


@for_each(name=["Own", "Replacing"], stage=(0, 1, 2, 3))
@pytest.mark.ranks(2)
def test_declared_elementwise_steps_flat_slices(name, stage):
    make, _ = PLAIN[name]
    reference, module = mlp().double(), mlp().double()
    optimizer = make(module.parameters())
    shard(
        module,
        optimizer,
        stage=stage,
        group=dist.group.WORLD,
        update={"elementwise": lambda group: group["scale"] == 1},
    )
    assert all(each.ndim == 1 for each in optimizer.param_groups[0]["params"])
    steps(module, optimizer, batch_of)
    steps(reference, make(reference.parameters()), joint_of)
    assert_near(whole(module), copies(reference), rtol=1e-9, atol=1e-9)


@for_each(stage=(1, 3))
@pytest.mark.ranks(2)
def test_blocks_of_state_are_those_of_whole_tensors(stage):
    """Some layers are unused at first, and the largest matrix has 8,192 elements."""

    def net():
        torch.manual_seed(0)
        return nn.ModuleDict({"first": nn.Linear(16, 32), "second": nn.Linear(32, 256)}).double()

    def run(module, optimizer, rows):
        for step in range(5):
            hidden = module["first"](rows(step, width=16))
            (hidden if step < 2 else module["second"](hidden.tanh())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    reference, module = net(), net()
    optimizer = Blocks(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD)
    run(module, optimizer, batch_of)
    run(reference, Blocks(reference.parameters()), joint_of)
    # fp64 sums in another order; one that crosses the middle between two codes would differ by a code, 1e-5 here.
    assert_near(whole(module), copies(reference), rtol=1e-6, atol=1e-5)
    with pytest.raises(ValueError, match="elementwise=True for param_groups"):
        sharded(net(), stage, Blocks, elementwise=True)


@pytest.mark.ranks(2)
def test_an_unknown_class_at_stage_1_is_named_once():
    module = mlp()
    optimizer = Own(module.parameters())
    if dist.get_rank():
        shard(module, optimizer, stage=1, group=dist.group.WORLD)
        return
    with pytest.warns(
        UserWarning, match=r"optimizer=Own: par-zero does not know .* pass update=dict\(elementwise=True\)"
    ):
        shard(module, optimizer, stage=1, group=dist.group.WORLD)


@for_each(stage=(0, 1, 3))
@pytest.mark.ranks(1)
def test_one_rank_needs_no_option(stage):
    """Whatever the optimizer looks at: order of tensors, one norm of all, numbers that it draws."""

    class Anything(Own):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                given = [each for each in group["params"] if each.grad is not None]
                norm = torch.nn.utils.get_total_norm([each.grad for each in given])
                for number, each in enumerate(given):
                    each.sub_(number * each.grad / norm + 0.01 * torch.randn_like(each))

    torch.manual_seed(1)
    reference = mlp()
    steps(reference, Anything(reference.parameters()), lambda step, width: batch(step, width=width))
    torch.manual_seed(1)
    module = mlp()
    optimizer = Anything(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD)
    steps(module, optimizer, lambda step, width: batch(step, width=width))
    assert_near(whole(module), copies(reference))


@pytest.mark.ranks(2)
def test_a_small_learning_rate_changes_nothing_about_adafactor():
    reference, module = mlp(), mlp()
    optimizers = [torch.optim.Adafactor(each.parameters(), lr=1e-2) for each in (module, reference)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(each, 1e-3, total_iters=3) for each in optimizers]
    shard(module, optimizers[0], stage=2, group=dist.group.WORLD)
    for model, optimizer, scheduler, rows in zip(
        (module, reference), optimizers, schedulers, (batch, joint), strict=True
    ):
        for step in range(6):
            loss_of(model, rows(step, width=8)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_near(whole(module), copies(reference), atol=1e-5)  # fp32 sums in another order, in a matrix's roots


@pytest.mark.ranks(2)
def test_unknown_and_atomic_agree_bit_by_bit():
    results = []
    for options in ({}, {"atomic": True}):
        module, optimizer = sharded(mlp(), 2, Own, **options)
        steps(module, optimizer, batch)
        results.append(whole(module))
    assert_same(*results)


@pytest.mark.storm
@for_each(stage=(1, 3))
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # Dynamo's own
def test_a_compiled_step_exchanges_as_any_other(stage):
    reference, module = mlp(), mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    steps(module, optimizer, batch)
    steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), joint)
    assert_near(whole(module), copies(reference))
