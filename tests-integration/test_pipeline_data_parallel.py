"""Pipelines side by side that share the data: stages under DDP, par-zero and FSDP2."""

import copy
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from par_pipeline import Pipeline, interleaved, one_f_one_b, zb_h1, zb_v
from par_testing import count_collectives
from par_zero import shard, summon

SCHEDULES = {"1f1b": one_f_one_b, "interleaved": interleaved, "zb_h1": zb_h1, "zb_v": zb_v}
MICROBATCHES = 5


def block(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5), nn.LayerNorm(5)).double()


def mse(output, target):
    return (output - target).square().mean()


def data(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(24, 5, generator=generator, dtype=torch.float64) for _ in range(2)]


def groups_of_four():
    """This rank's pipeline, 0 1 or 2 3, and its replicas, 0 2 or 1 3; and which pipeline it is."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which, rank = divmod(dist.get_rank(), 2)
    return pipelines[which], replicas[rank], which, rank


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_device(stages, steps):
    """Of all data at once."""
    stages = copy.deepcopy(stages)
    model = nn.Sequential(*stages)
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        x, y = data(step)
        mse(model(x), y).backward()
        optimizer.step()
    return stages


def train(modules, optimizers, schedule, group, which, steps=3, **options):
    pipeline = Pipeline(modules, schedule, group, loss_fn=mse, **options)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = (each.chunk(2)[which] for each in data(step))
        pipeline.step(x, target=y)
        for optimizer in optimizers:
            optimizer.step()
    return pipeline


def assert_trained(modules, reference, numbers, replicas):
    """Replicas agree bitwise; both are as on one device, but for sums in another order."""
    for module, number in zip(modules, numbers, strict=True):
        for (name, one), other in zip(module.named_parameters(), reference[number].parameters(), strict=True):
            value = one.detach().clone()
            dist.broadcast(value, group=replicas, group_src=0)
            assert torch.equal(value, one), (number, name)
            torch.testing.assert_close(value, other.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "name", [*(pytest.param(each, marks=pytest.mark.storm) for each in ("1f1b", "interleaved")), "zb_v"]
)
@pytest.mark.ranks(4, timeout=90)
def test_replicas_under_ddp_and_par_zero_agree_and_train_as_on_one_device(name):
    group, replicas, which, rank = groups_of_four()
    schedule = SCHEDULES[name](2, MICROBATCHES)
    numbers = schedule.stage_of(rank)
    stages = [block(number) for number in range(schedule.stages)]
    reference = one_device(stages, 3)
    for kind in ("ddp", 0, 1, 2):
        modules = [copy.deepcopy(stages[number]) for number in numbers]
        optimizers = [sgd(module.parameters()) for module in modules]
        if kind == "ddp":
            wrapped = [DistributedDataParallel(module, process_group=replicas) for module in modules]
        else:
            wrapped = modules
            for module, optimizer in zip(modules, optimizers, strict=True):
                shard(module, optimizer, stage=kind, group=replicas, overlap={"bucket": 300})
        train(wrapped, optimizers, schedule, group, which)
        for module in modules if kind != "ddp" else ():
            with summon(module):
                assert_trained([module], reference, [numbers[modules.index(module)]], replicas)
        if kind == "ddp":
            assert_trained(modules, reference, numbers, replicas)


@pytest.mark.parametrize(
    "name", ["zb_v", *(pytest.param(each, marks=pytest.mark.storm) for each in ("1f1b", "interleaved", "zb_h1"))]
)
@pytest.mark.ranks(4, timeout=90)
def test_stages_under_fsdp2_train_as_on_one_device(name):
    group, replicas, which, rank = groups_of_four()
    mesh = DeviceMesh.from_group(replicas, "cpu")
    schedule = SCHEDULES[name](2, MICROBATCHES)
    numbers = schedule.stage_of(rank)
    stages = [block(number) for number in range(schedule.stages)]
    reference = one_device(stages, 3)
    modules = [copy.deepcopy(stages[number]) for number in numbers]
    for module in modules:
        fully_shard(module, mesh=mesh)
    optimizers = [sgd(module.parameters()) for module in modules]
    is_split = name.startswith("zb")
    warned = pytest.warns(UserWarning, match="it is under fully_shard") if is_split else nullcontext()
    with warned:
        train(modules, optimizers, schedule, group, which, split_backward="where possible")
    for module, number in zip(modules, numbers, strict=True):
        for one, other in zip(module.parameters(), reference[number].parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor(), other.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
@pytest.mark.ranks(4)
def test_gradients_are_reduced_once_a_step(name):
    group, replicas, which, rank = groups_of_four()
    module = block(rank)
    wrapped = DistributedDataParallel(module, process_group=replicas)
    pipeline = train([wrapped], [], SCHEDULES[name](2, MICROBATCHES), group, which, steps=2)
    x, y = (each.chunk(2)[which] for each in data(0))
    with count_collectives() as counted:
        pipeline.step(x, target=y)
    assert counted.elements("all_reduce") == sum(each.numel() for each in module.parameters())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("1f1b", "ddp"), ("zb_h1", 0)),
        *(pytest.param(*each, marks=pytest.mark.storm) for each in (("1f1b", 0), ("1f1b", 2), ("zb_h1", "ddp"))),
        pytest.param("zb_h1", 2, marks=pytest.mark.storm),
    ],
)
@pytest.mark.ranks(4)
def test_the_last_stage_is_reduced_before_the_first_one_runs_its_last_backward(name, kind, tmp_path):
    """The first stage's last backward waits until the last stage is complete, its reduction included."""
    group, replicas, which, rank = groups_of_four()
    schedule = SCHEDULES[name](2, MICROBATCHES)
    module = block(rank)
    optimizer = sgd(module.parameters())
    if kind == "ddp":
        stage = DistributedDataParallel(module, process_group=replicas)
    else:
        stage, _ = shard(module, optimizer, stage=kind, group=replicas, overlap={"bucket": 300})
    backwards, completed = [], []

    def wait_for_the_last_stage(*_):
        backwards.append(1)
        while len(backwards) == MICROBATCHES and not (tmp_path / f"{which}-{step}").exists():
            time.sleep(0.01)

    def complete(_):
        completed.append(1)
        if rank == 1:
            (tmp_path / f"{which}-{step}").touch()

    if rank == 0:
        module.register_full_backward_pre_hook(wait_for_the_last_stage)
    pipeline = Pipeline(stage, schedule, group, loss_fn=mse, complete=complete)
    for step in range(2):
        x, y = (each.chunk(2)[which] for each in data(step))
        backwards.clear()
        pipeline.step(x.requires_grad_(), target=y)  # so that the hook, which waits for gradients of inputs, is called
        assert len(completed) == step + 1
        assert len(backwards) == (MICROBATCHES if rank == 0 else 0)


@pytest.mark.ranks(4)
def test_ddp_s_buffers_and_unused_parameters_are_as_in_a_plain_loop():
    class Partly(nn.Module):
        """The second branch is used for the first microbatch alone."""

        def __init__(self, number):
            super().__init__()
            torch.manual_seed(number)
            self.first, self.second, self.never = (nn.Linear(5, 5).double() for _ in range(3))
            self.norm = nn.BatchNorm1d(5).double()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.norm(self.first(x) + (self.second(x) if self.calls % MICROBATCHES == 1 else 0))

    group, replicas, which, rank = groups_of_four()
    for make in (one_f_one_b, zb_h1):
        module = Partly(rank)
        plain = copy.deepcopy(module)
        wrapped = DistributedDataParallel(module, process_group=replicas, find_unused_parameters=True)
        train([wrapped], [], make(2, MICROBATCHES), group, which, steps=1)
        other = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
        dist.all_gather(other, sum(each.grad.sum() for each in module.first.parameters()), group=replicas)
        assert other[0] == other[1]
        assert module.second.weight.grad.abs().sum() > 0
        assert plain.calls == 0
