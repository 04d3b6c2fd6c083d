"""Mistakes end in one clear error on every rank, before any other collective; failures leave nobody waiting."""

import copy
import errno
import io
import os
import pickle
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from par_groups import gradients
from par_groups.live import backends
from par_testing import count_collectives, for_each
from par_zero import Overlap, _unit, no_sync, reset, shard, summon

from .helpers import (
    KINDS_OF_STAGES,
    STAGES,
    adamw,
    assert_near,
    batch,
    copies,
    for_each_stage,
    joint,
    loss_of,
    mlp,
    policies,
    sgd,
    sharded,
    train,
    whole,
)


def refused(expected, *words, module=None, optimizer=None, stage=2, **options):
    """That `shard` raises this, with words in its message, having exchanged nothing but objects."""
    with count_collectives() as counted, pytest.raises(expected) as raised:
        shard(module or mlp(), optimizer, stage=stage, group=dist.group.WORLD, **policies(**options))
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert {each.op for each in counted.events} <= {"all_gather"}
    dist.barrier()  # nobody is left behind


@pytest.mark.ranks(2, backend="gloo")
def test_a_backend_that_lacks_a_collective_is_refused_before_anything_is_changed(monkeypatch):
    def cannot(*arguments, **keywords):
        raise RuntimeError("Backend mpi does not support reduce_scatter")

    monkeypatch.setattr(backends, "_COMPLETE", ())
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # the names of torch 2.13 and before
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, cannot)
    module = mlp()
    optimizer = adamw(module.parameters())
    words = r"shard\(stage=2\) needs reduce_scatter, which the backend 'gloo' of ranks \[0, 1\] cannot do \(Backend mpi"
    with pytest.raises(ValueError, match=words):
        shard(module, optimizer, stage=2, group=dist.group.WORLD)
    monkeypatch.undo()
    shard(module, optimizer, stage=2, group=dist.group.WORLD)
    train(module, optimizer, [[batch(0, width=8)]])


def stepped():
    module = mlp()
    optimizer = adamw(module.parameters())
    loss_of(module, batch(0, width=8)).backward()
    optimizer.step()
    return {"module": module, "optimizer": optimizer}


def foreign():
    return {"optimizer": adamw(mlp().parameters())}


def nan_setting():
    module = mlp()
    optimizer = adamw(module.parameters())
    optimizer.param_groups[0]["weight_decay"] = float("nan")
    return {"module": module, "optimizer": optimizer}


def whole_number_parameter():
    module = mlp()
    module.counts = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    return {"module": module, "stage": 3}


def distributed_tensors():
    module = mlp()
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"module": module}


def twice():
    module, _ = sharded(mlp(), 1)
    return {"module": module}


def part_twice():
    module = mlp()
    sharded(module[1], 1)
    return {"module": module}


def whole_twice():
    module = mlp()
    sharded(module, 3)
    return {"module": module[1]}


def with_optimizer(make):
    module = nn.Linear(4, 4, bias=False)
    return {"module": module, "optimizer": make(module.parameters())}


class GroupNormScaled(torch.optim.Optimizer):
    """Steps of the same length for each tensor of some groups."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "scaled": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad / (each.grad.norm() if group["scaled"] else 1), alpha=group["lr"])


class JointlyScaled(torch.optim.Optimizer):
    """Steps of the same length for all tensors together."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            given = [each for each in group["params"] if each.grad is not None]
            norm = torch.nn.utils.get_total_norm([each.grad for each in given])
            for each in given:
                each.sub_(each.grad / norm, alpha=group["lr"])


class Around(torch.optim.Optimizer):
    """As a Lookahead that shares the param groups of the optimizer inside."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})


class Greedy(torch.optim.SGD):
    """Needs what a user puts into each parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.mul_(each.curvature)
        return super().step(closure)


def later_group():
    module = mlp()
    weights = [each for each in module.parameters() if each.ndim > 1]
    biases = [each for each in module.parameters() if each.ndim < 2]
    groups = [{"params": biases, "scaled": False}, {"params": weights, "scaled": True}]
    return {"module": module, "optimizer": GroupNormScaled(groups)}


def lacks_one():
    module = mlp()
    return {"module": module, "optimizer": adamw(list(module.parameters())[:-1])}


MISTAKES = {
    "an optimizer that lacks a parameter": (lacks_one, ["'2.2.bias'", "AdamW", "requires_grad_(False)"]),
    "an optimizer that has stepped": (stepped, ["AdamW", "stepped already"]),
    "parameters of another module": (foreign, ["param_groups[0].params[0]", "AdamW"]),
    "a device without memory": (lambda: {"device": torch.device("meta")}, ["device='meta'"]),
    "a setting that is NaN": (nan_setting, ["param_groups[0]['weight_decay']", "NaN"]),
    "whole numbers": (whole_number_parameter, ["'counts'", "int64", "stage 3 shards it"]),
    "nothing in it": (lambda: {"module": nn.ReLU()}, ["no parameters"]),
    "a stage that is none": (lambda: {"stage": 4}, ["stage is 4"]),
    "a stage in words": (lambda: {"stage": "three"}, ["stage is 'three'"]),
    "sharded twice": (twice, ["sharded already"]),
    "a part that is sharded": (part_twice, ["sharded already", "parts of it that have no parameter in common"]),
    "a part of what is sharded": (whole_twice, ["'0.weight' is sharded already", "another module"]),
    "no bucket": (lambda: {"bucket": 0}, ["bucket=0"]),
    "no reduction in flight": (lambda: {"inflight": 0}, ["inflight=0", "None"]),
    "a reduction that is none": (lambda: {"reduce_op": "max"}, ["'max'"]),
    "a dtype for whole numbers": (lambda: {"param_dtype": torch.int8}, ["param_dtype=torch.int8"]),
    "a word for units": (lambda: {"units": "all", "stage": 3}, ["units is 'all'"]),
    "units of others": (lambda: {"units": [nn.Linear(1, 1)], "stage": 3}, ["Linear", "not in the module"]),
    "Adafactor by element": (
        lambda: {**with_optimizer(torch.optim.Adafactor), "elementwise": True},
        ["elementwise=True", "param_groups[0] of the Adafactor", "remove"],
    ),
    "whole tensors in a later group": (
        lambda: {**later_group(), "elementwise": True},
        ["elementwise=True", "param_groups[1] of the GroupNormScaled", "atomic=True"],
    ),
    "both declarations": (
        lambda: {**later_group(), "elementwise": True, "atomic": True},
        ["atomic=True and elementwise=True", "set one"],
    ),
    "a wrapper": (lambda: with_optimizer(Around), ["optimizer=Around", "wraps a SGD", "wrap it afterwards"]),
    "a step that needs more": (lambda: with_optimizer(Greedy), ["optimizer=Greedy", "a trial raises AttributeError"]),
    "LBFGS": (lambda: with_optimizer(torch.optim.LBFGS), ["LBFGS", "'_params'", "param_groups alone"]),
    "LBFGS with atomic": (lambda: {**with_optimizer(torch.optim.LBFGS), "atomic": True}, ["LBFGS", "'_params'"]),
    "one norm of all": (lambda: with_optimizer(JointlyScaled), ["JointlyScaled", "no rank sees all", "stage=0"]),
    "one norm of all, atomic": (lambda: {**with_optimizer(JointlyScaled), "atomic": True}, ["no rank sees all"]),
}


@for_each(mistake=MISTAKES)
@pytest.mark.ranks(2)
def test_a_mistake_is_an_error_on_all_ranks(mistake):
    make, words = MISTAKES[mistake]
    refused(ValueError, *words, **make())


@pytest.mark.ranks(2)
def test_frozen_integers_stay_as_they_are_below_stage_3():
    """As quantized weights below adapters."""
    for stage in (0, 1, 2):
        module = mlp()
        module.codes = nn.Parameter(torch.arange(3, dtype=torch.uint8), requires_grad=False)
        optimizer = sgd([each for each in module.parameters() if each.requires_grad])
        shard(module, optimizer, stage=stage, group=dist.group.WORLD)
        loss_of(module, batch(1, width=8)).backward()
        optimizer.step()
        assert module.codes.equal(torch.arange(3, dtype=torch.uint8))


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_dtensor_parameters_are_refused():
    refused(ValueError, "'0.0.weight'", "DTensor", **distributed_tensors())


def by_the_norm(*, known):
    module = mlp()
    kind = (
        type("Prodigy", (ByTheNorm,), {"__module__": "prodigyopt", "__qualname__": "Prodigy"}) if known else ByTheNorm
    )
    return {"module": module, "optimizer": kind(module.parameters(), lr=1.0), "stage": 0, "offload": ON_DISK}


class ByTheNorm(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.01)
        return super().step(closure)


ON_DISK = {"optimizer": "disk", "path": "/var/tmp"}
OFFLOADS = {
    "a tier that is none": ({"optimizer": "nvme"}, ["optimizer is 'nvme'; it can be 'device', 'host', 'disk'"]),
    "no path": ({"optimizer": "disk"}, ["the disk needs a path; give a folder on a local disk"]),
    "a path in memory": (
        {"optimizer": "disk", "path": "/dev/shm"},
        ["path '/dev/shm' is in memory (tmpfs), so nothing would be saved; give a folder on a disk"],
    ),
    "parts above 1": ({"optimizer": {"host": 0.9, "disk": 0.2}, "path": "/var/tmp"}, ["parts whose sum is 1.1"]),
}


@pytest.mark.ranks(2)
def test_an_offload_that_cannot_be_is_refused_on_all_ranks_before_anything_is_changed():
    for offload, words in OFFLOADS.values():
        module = mlp()
        optimizer = adamw(module.parameters())
        before = list(optimizer.param_groups[0]["params"])
        refused(ValueError, *words, module=module, optimizer=optimizer, offload=offload)
        assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], before, strict=True))
        train(module, optimizer, [[batch(0, width=8)]])
    module = mlp()
    words = ["param_groups[0] of the AdamW: their optimizer needs full tensors", "remove offload, or remove atomic"]
    refused(ValueError, *words, module=module, optimizer=adamw(module.parameters()), atomic=True, offload=ON_DISK)
    words = ["param_groups[0] of the Prodigy: their optimizer needs full tensors, and offload would split them"]
    refused(ValueError, *words, **by_the_norm(known=True))
    words = ["of the ByTheNorm: their optimizer needs full tensors", "pass update=dict(elementwise=True) if it updates"]
    refused(ValueError, *words, **by_the_norm(known=False))
    words = [
        "elementwise=True for param_groups[0] of the ByTheNorm",
        "what is in other tensors",
        "pass update=dict(atomic=True)",
    ]
    refused(ValueError, *words, **by_the_norm(known=False), elementwise=True)
    refused(ValueError, "there is no optimizer", "leave offload out", offload={"optimizer": 0.5})
    refused(TypeError, "offload['nvme']: Offload has no such argument; use one of optimizer", offload={"nvme": "host"})
    refused(TypeError, "offload='disk': pass a par_zero.Offload", offload="disk")


@pytest.mark.cpu(reason="bytes of offload from a CPU")
@pytest.mark.ranks(2)
def test_a_full_disk_of_one_rank_is_refused_on_all_before_anything_is_changed(tmp_path, monkeypatch):
    if dist.get_rank() == 1:
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_bfree=1, f_blocks=9, f_frsize=4096))
    module = mlp()
    optimizer = adamw(module.parameters())
    words = [f"the disk at {str(tmp_path)!r} has 4.1 kB free and 8.2 kB are needed; free some, or offload less"]
    offload = {"optimizer": "disk", "path": str(tmp_path)}
    refused(ValueError, *words, module=module, optimizer=optimizer, stage=0, offload=offload)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    shard(module, optimizer, stage=0, group=dist.group.WORLD, offload=offload)
    train(module, optimizer, [[batch(0, width=8)]])


@pytest.mark.ranks(2)
def test_a_folder_that_one_rank_may_not_write_to_is_refused_on_all(tmp_path, monkeypatch):
    original = os.open

    def refuse(path, flags, *mode):
        if str(path) == str(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, flags, *mode)

    if dist.get_rank() == 1:
        monkeypatch.setattr(os, "open", refuse)
    module = mlp()
    optimizer = adamw(module.parameters())
    parameters = list(module.parameters())
    offload = {"optimizer": "disk", "path": tmp_path}
    with pytest.raises((ValueError, PermissionError), match="Permission denied"):
        shard(module, optimizer, stage=1, group=dist.group.WORLD, offload=offload)
    assert optimizer.param_groups[0]["params"] == parameters
    monkeypatch.undo()
    shard(module, optimizer, stage=1, group=dist.group.WORLD, offload=offload)
    train(module, optimizer, [[batch(0, width=8)]])


TYPES = {
    "buckets": 3,
    "bucket": "25MB",
    "inflight": 2.0,
    "param_dtype": "bfloat16",
    "reduce_dtype": 16,
    "atomic": "no",
    "units": None,
    "module": "mlp",
    "optimizer": "adamw",
}


@pytest.mark.ranks(2)
def test_an_unknown_option_or_another_type_is_an_error():
    for name, value in TYPES.items():
        refused(TypeError, name, **{"stage": 3, name: value})
    for dtype in (torch.int8, torch.float8_e4m3fn):
        refused(ValueError, "reduce_dtype", str(dtype), reduce_dtype=dtype)


@pytest.mark.ranks(2)
def test_what_a_function_for_units_raises_on_one_rank_is_told_to_the_other():
    def units(_):
        if dist.get_rank() == 1:
            raise KeyError("mine")
        return True

    refused(KeyError if dist.get_rank() == 1 else ValueError, "mine", units=units, stage=3)


@pytest.mark.ranks(2)
def test_replicas_that_share_are_refused():
    refused(ValueError, "replicas", "[0, 1]", replicas=dist.group.WORLD)


@pytest.mark.ranks(2)
def test_a_param_group_that_comes_later_is_refused():
    module, optimizer = sharded(mlp(), 1)
    with pytest.raises(ValueError, match=r"\['lr', 'params'\] came after shard"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0})
    assert len(optimizer.param_groups) == 1
    train(module, optimizer, [[batch(0, width=8)]])


@for_each_stage
@pytest.mark.ranks(2)
def test_a_sharded_module_is_not_copied(stage):
    module, _ = sharded(mlp(), stage)
    for how in (copy.deepcopy, pickle.dumps, lambda each: torch.save(nn.Sequential(each), io.BytesIO())):
        with pytest.raises(TypeError, match=r"neither copied nor pickled; .* before shard"):
            how(module)


@for_each_stage
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_with_a_graph_is_named(stage):
    module, optimizer = sharded(mlp(), stage)
    loss = loss_of(module, batch(0, width=8))
    with pytest.raises(RuntimeError, match=r"'2\.2\.\w+' has a graph itself, .* leave out create_graph=True"):
        loss.backward(create_graph=True)
    reset(module)
    train(module, optimizer, [[batch(0, width=8)]])


@for_each_stage
@pytest.mark.ranks(2)
def test_who_asks_the_module_for_gradients_is_told_where_they_are(stage):
    module, optimizer = sharded(mlp(), stage)
    loss_of(module, batch(0, width=8)).backward()
    with pytest.raises(RuntimeError, match=r"'0\.0\.weight' lives in its optimizer's flat tensors"):
        list(gradients(module))
    assert list(gradients(optimizer))


@for_each(mistake=("an optimizer that has stepped", "nothing in it", "units of others"))
@pytest.mark.ranks(2)
def test_a_mistake_on_one_rank_is_told_to_the_other(mistake):
    make, words = MISTAKES[mistake]
    mine = make()
    stage = mine.pop("stage", 2)
    if dist.get_rank() == 0:
        module = mlp()
        refused(ValueError, "rank 1", *words, module=module, optimizer=adamw(module.parameters()), stage=stage)
    else:
        refused(ValueError, *words, stage=stage, **mine)


@for_each(differ=("sizes", "stage", "bucket", "inflight", "dtype", "groups", "units", "offload"))
@pytest.mark.ranks(4)
def test_ranks_that_differ_are_named(differ):
    odd = dist.get_rank() == 2
    module = mlp(width=9 if odd and differ == "sizes" else 8)
    if odd and differ == "dtype":
        module[1].bfloat16()
    parameters = list(module.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = adamw(groups if odd and differ == "groups" else parameters)
    refused(
        ValueError,
        "rank 2 has other",
        "rank 0",
        module=module,
        optimizer=optimizer,
        stage=1 if odd and differ == "stage" else 3,
        bucket=1 if odd and differ == "bucket" else 500,
        inflight=1 if odd and differ == "inflight" else None,
        units=[] if odd and differ == "units" else "auto",
        offload={"optimizer": 0.5} if odd and differ == "offload" else None,
    )


@pytest.mark.ranks(4)
def test_a_mistake_in_one_group_is_told_to_its_replicas():
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    with pytest.raises(ValueError, match=r"stage is 7|rank 3"):
        shard(mlp(), stage=7 if rank == 3 else 1, group=shards, replicas=replicas)
    dist.barrier()


def test_options_are_checked_where_they_are_made():
    with pytest.raises(ValueError, match="bucket=-1"):
        Overlap(bucket=-1)


@pytest.mark.parametrize("call", [no_sync, summon, reset])
def test_a_module_that_is_not_sharded_is_named(call):
    with pytest.raises(ValueError, match="this Linear is not sharded"):
        call(nn.Linear(1, 1))


class Stumbling(nn.Module):
    """Fails once on demand, forward or backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.fails = ""

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == 1 and self.fails == "forward":
                raise ArithmeticError("forward stumbles")
            if number == 1 and self.fails == "backward":
                x.register_hook(self.stumble)
        return x

    def stumble(self, _):
        raise ArithmeticError("backward stumbles")


@for_each(stage=KINDS_OF_STAGES, where=("forward", "backward"))
@pytest.mark.ranks(2)
def test_after_an_exception_and_reset_the_next_step_is_right(stage, where):
    module, optimizer = sharded(Stumbling(), stage, sgd)
    reference = Stumbling()
    its = sgd(reference.parameters())
    for step in range(3):
        module.fails = where
        with pytest.raises(ArithmeticError, match=where):
            loss_of(module, batch(7, width=8)).backward()
        module.fails = ""
        reset(module)
        optimizer.zero_grad()
        loss_of(module, batch(step, width=8)).backward()
        optimizer.step()
        its.zero_grad()
        loss_of(reference, joint(step, width=8)).backward()
        its.step()
    assert_near(whole(module), copies(reference))


class LostGather:
    """An all-gather that ends in an error."""

    def __init__(self, handle):
        self.handle = handle

    def wait(self):
        self.handle.wait()
        raise RuntimeError("connection lost")


@pytest.mark.ranks(2)
def test_state_dict_has_the_shards_after_all_gathers_in_flight_are_lost(monkeypatch):
    module, optimizer = sharded(Stumbling(), 3, sgd, bucket=1)
    train(module, optimizer, [[batch(0, width=8)]])
    with monkeypatch.context() as lost:
        whole_gather = _unit.all_gather
        lost.setattr(_unit, "all_gather", lambda *given: LostGather(whole_gather(*given)))
        with pytest.raises(RuntimeError, match="connection lost"):
            module(batch(1, width=8))
        assert list(module.state_dict()) == list(dict(module.named_parameters()))
    reset(module)
    train(module, optimizer, [[batch(1, width=8)]])
    reference = Stumbling()
    its = sgd(reference.parameters())
    for step in range(2):
        its.zero_grad()
        loss_of(reference, joint(step, width=8)).backward()
        its.step()
    assert_near(whole(module), copies(reference))


@for_each(where=("forward", "backward"), before=(0, 2), inflight=(None, 1))
@pytest.mark.ranks(3)
def test_pass_that_fails_on_one_rank_raises_on_all(where, before, inflight):
    """At stage 3, in the first pass, which follows no program, and in a later pass."""
    module, optimizer = sharded(Stumbling(), 3, sgd, inflight=inflight, bucket=1)
    train(module, optimizer, [[batch(step, width=8)] for step in range(before)])
    stumbles = dist.get_rank() == 1
    module.fails = where if stumbles else ""
    error = RuntimeError, r"rank 1 calls par_zero\.reset where rank 0 .* its pass has failed; call par_zero\.reset"
    error, match = (ArithmeticError, where) if stumbles else error
    with pytest.raises(error, match=match):
        loss_of(module, batch(7, width=8)).backward()
    reset(module)  # on the rank that stumbles, while the other ranks are in their pass
    module.fails = ""
    train(module, optimizer, [[batch(step, width=8)] for step in range(2)])
    reference = Stumbling()
    its = sgd(reference.parameters())
    for step in (*range(before), *range(2)):
        its.zero_grad()
        loss_of(reference, joint(step, width=8)).backward()
        its.step()
    assert_near(whole(module), copies(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_after_a_failed_backward_the_next_forward_asks_for_reset(stage):
    module, optimizer = sharded(Stumbling(), stage, sgd)
    module.fails = "backward"
    with pytest.raises(ArithmeticError, match="backward"):
        loss_of(module, batch(0, width=8)).backward()
    module.fails = ""
    with torch.no_grad():
        module(batch(0, width=8))
    with pytest.raises(RuntimeError, match=r"failed half-way.* call par_zero\.reset"):
        module(batch(0, width=8))
    reset(module)
    train(module, optimizer, [[batch(0, width=8)]])


def assigned(module):
    module.load_state_dict({name: each.clone() for name, each in module.state_dict().items()}, assign=True)


def from_vector(module):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(module.parameters()).detach() * 2, module.parameters())


REPLACED = {"assign": assigned, "vector": from_vector, "to": lambda module: module.to(torch.float64)}
ALL_REPLACED = r"'\d\.\d\.\w+' was replaced after shard\(\), .*copy_\(\)"


@for_each(stage=KINDS_OF_STAGES, how=REPLACED)
@pytest.mark.ranks(2)
def test_parameters_that_are_replaced_inside_summon_are_named_at_its_end(stage, how):
    module, _ = sharded(mlp(), stage)
    with pytest.raises(RuntimeError, match=ALL_REPLACED), summon(module):
        REPLACED[how](module)


@for_each(stage=(0, 1, 2), how=REPLACED)
@pytest.mark.ranks(2)
def test_parameters_that_are_replaced_are_named_at_the_next_step(stage, how):
    module, optimizer = sharded(mlp(), stage)
    train(module, optimizer, [[batch(0, width=8)]])
    REPLACED[how](module)
    loss_of(module, batch(1, width=8).to(module[0][0].weight.dtype)).backward()
    with pytest.raises(RuntimeError, match=ALL_REPLACED):
        optimizer.step()


@for_each_stage
@pytest.mark.ranks(2)
def test_a_parameter_that_another_takes_the_place_of_is_named_at_the_next_step(stage):
    module, optimizer = sharded(mlp(), stage)
    loss_of(module, batch(0, width=8)).backward()
    module[1][0].bias = nn.Parameter(torch.zeros(16))
    with pytest.raises(RuntimeError, match=r"'1\.0\.bias' was replaced after shard"):
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2, dies=(1,))
def test_a_rank_that_dies_in_backward_ends_the_others_with_an_error(stage):
    module, optimizer = sharded(mlp(), stage)
    loss_of(module, batch(0, width=8)).backward()
    optimizer.step()
    optimizer.zero_grad()
    output = module[1](module[0](batch(0, width=8)))

    def die(gradient):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    output.register_hook(die)
    loss = module[2](output).square().mean()
    with pytest.raises(RuntimeError):  # gloo says that the connection is closed
        loss.backward()


@for_each(stage=(0, 1, 2))
@pytest.mark.ranks(2)
def test_layer_in_two_reentrant_checkpoints_is_named(stage):
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, x):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
            return checkpoint(self.blocks[0], x, use_reentrant=True)

    module, _ = sharded(Twice(), stage, bucket=1)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.\w+' got another gradient .* use_reentrant=False"):
        module(batch(0, width=8).requires_grad_(True)).sum().backward()
    dist.barrier()
