"""Writes to the module's parameters, outside of `summon`, reach the master weights that the optimizer steps."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import settle_
from par_testing import count_collectives, for_each
from par_zero import summon

from ..helpers import adamw, assert_same, batch, loss_of, mlp, sharded, whole


def clamp(module):
    with torch.no_grad():
        for each in module.parameters():
            each.clamp_(-0.1, 0.1)


def load_submodule(module):
    module[1].load_state_dict({name: value * 0.5 for name, value in module[1].state_dict().items()})


def write_kept_alias(module):
    """Write through an alias of the weights that a program made once."""
    aliases = module.__dict__.setdefault("aliases", [each.data for each in module.parameters()])
    torch._foreach_mul_(aliases, 0.5)


def fill_one(module):
    with torch.no_grad():
        module[0][0].bias[3] = 2.0


WRITES = {
    "clamp_": clamp,
    "data.mul_": lambda module: [each.data.mul_(0.5) for each in module.parameters()],
    "detach().copy_": lambda module: [each.detach().copy_(torch.ones_like(each)) for each in module[2].parameters()],
    "load_state_dict of a submodule": load_submodule,
    "kept alias": write_kept_alias,
    "one element": fill_one,
    "nn.init": lambda module: [nn.init.zeros_(each) for each in module[1].parameters()],
}


def trained(stage, write, *, within_summon, make=adamw, **options):
    """Full parameters after three steps; after two of them the program writes the module's parameters."""
    module, optimizer = sharded(mlp().bfloat16().float(), stage, make, param_dtype=torch.bfloat16, **options)
    for step in range(3):
        loss_of(module, batch(step, width=8).bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            with summon(module) if within_summon else nullcontext():
                write(module)
    return whole(module)


@functools.cache
def written_in_summon(write):
    return trained(0, WRITES[write], within_summon=True)


@for_each(write=WRITES, stage=(0, 1, 2))
@pytest.mark.ranks(2, backend="strict")
def test_module_write_reaches_master_weights(write, stage):
    """Also while all-gathers are in flight. A write within `summon` always did."""
    assert_same(trained(stage, WRITES[write], within_summon=False), written_in_summon(write))


@for_each(write=("clamp_", "kept alias"), stage=(0, 2))
@pytest.mark.ranks(2)
def test_module_write_with_state_on_disk_equals_memory(write, stage, tmp_path):
    expected = trained(stage, WRITES[write], within_summon=False)
    offload = {"optimizer": {"disk": 0.7}, "path": tmp_path, "piece": 256}
    assert_same(trained(stage, WRITES[write], within_summon=False, offload=offload), expected)


@pytest.mark.ranks(2)
def test_module_write_on_gloo_keeps_other_digits():
    """Elements that nobody wrote keep all digits of their master weights, and no rank sends anything for it."""
    module, optimizer = sharded(mlp(), 2, adamw, param_dtype=torch.bfloat16, bucket=10**6)
    with torch.no_grad():
        module[0][0].weight[0, 0] = 4.0
    masters = [each for group in optimizer.param_groups for each in group["params"]]
    before = [each.detach().clone() for each in masters]
    with count_collectives() as counted:
        settle_(masters)  # as a checkpoint does before it reads them
    assert not counted.events
    changed = sum(int((now.detach() != then).sum()) for now, then in zip(masters, before, strict=True))
    total = torch.tensor(changed)
    dist.all_reduce(total)
    assert total == 1


@pytest.mark.ranks(2)
def test_module_write_in_step_hook_precedes_optimizer_eval():
    """A schedule-free `eval()` reads master weights that have what a step post hook wrote to the module."""

    class Halving(torch.optim.SGD):
        @torch.no_grad()
        def eval(self):
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.5)

    def make(parameters):
        return Halving(parameters, lr=0.1)

    module, optimizer = sharded(mlp(), 1, make, param_dtype=torch.bfloat16, elementwise=True)
    optimizer.register_step_post_hook(lambda *_: [nn.init.ones_(each) for each in module[0].parameters()])
    loss_of(module, batch(0, width=8).bfloat16()).backward()
    optimizer.step()
    optimizer.eval()
    assert all(bool((value == 0.5).all()) for name, value in whole(module).items() if name.startswith("0."))


@for_each(then=("step", "forward", "summon"))
@pytest.mark.ranks(2)
def test_module_and_master_write_between_steps_raises(then):
    module, optimizer = sharded(mlp(), 1, adamw, param_dtype=torch.bfloat16)
    loss_of(module, batch(0, width=8).bfloat16()).backward()
    optimizer.step()
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.data.mul_(0.5)
    clamp(module)
    call = {
        "step": optimizer.step,
        "forward": lambda: module(batch(1, width=8).bfloat16()),
        "summon": lambda: summon(module).__enter__(),
    }[then]
    with pytest.raises(RuntimeError, match=r"'2\.2\.weight' was written in the module.*within par_zero.summon"):
        call()


@pytest.mark.storm
@pytest.mark.ranks(2)
def test_compiled_module_with_watched_weights_equals_eager():
    results = []
    for compiles in (False, True):
        module, optimizer = sharded(mlp(), 1, adamw, param_dtype=torch.bfloat16)
        called = torch.compile(module, backend="aot_eager") if compiles else module
        for step in range(2):
            loss_of(called, batch(step, width=8).bfloat16()).backward()
            optimizer.step()
            optimizer.zero_grad()
            clamp(module)
        results.append(whole(module))
    assert_same(*results)


FORWARD_WRITES = {
    "data.clamp_": lambda module, _: (module.weight.data.clamp_(-0.1, 0.1), None)[1],
    "no_grad mul_": lambda module, _: (torch.no_grad()(module.weight.mul_)(0.5), None)[1],
}


def trained_under_forward_writes(stage, write, **options):
    """Full parameters after three steps in which a module writes its own weight before each of its calls."""
    module, optimizer = sharded(mlp().bfloat16().float(), stage, adamw, **options)
    module[1][2].register_forward_pre_hook(FORWARD_WRITES[write])
    dtype = options.get("param_dtype", torch.float32)
    for step in range(3):
        loss_of(module, batch(step, width=8).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(module)


@for_each(write=FORWARD_WRITES, param_dtype=(torch.float32, torch.bfloat16))
@pytest.mark.ranks(2)
def test_write_in_forward_at_stage_3_equals_stage_1(write, param_dtype):
    expected = trained_under_forward_writes(1, write, param_dtype=param_dtype)
    assert_same(trained_under_forward_writes(3, write, param_dtype=param_dtype), expected)


@pytest.mark.cpu(reason="parameters on a disk")
@pytest.mark.ranks(2)
def test_write_in_forward_with_parameters_on_disk_is_kept(tmp_path):
    expected = trained_under_forward_writes(1, "data.clamp_")
    offload = {"parameters": "disk", "optimizer": "disk", "path": tmp_path, "piece": 256}
    assert_same(trained_under_forward_writes(3, "data.clamp_", offload=offload), expected)
