"""par-pipeline on a GPU: the gradients of one device; the host does not wait, and times are the GPU's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import launch
from par_pipeline import ActivationOffload, Pipeline, Shared, Transport, one_f_one_b, simulate, zb_h1, zb_v
from par_pipeline._structure import flatten
from par_pipeline.wire.lanes import APART, FIRST, REST
from par_pipeline.wire.message import HEADER, Header, encode_apart
from par_testing import accelerator_type, for_each

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]


def stage(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(15, 123), nn.GELU(), nn.Linear(123, 15)).double().to(DEVICE)


def data():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(17, 15, generator=generator, dtype=torch.float64).to(DEVICE) for _ in range(2))


def mse(output, target):
    return (output - target).square().mean()


def check(schedule, **options):
    stages = [stage(number) for number in range(schedule.stages)]
    reference = copy.deepcopy(stages)
    x, y = data()
    mine = [stages[number] for number in schedule.stage_of(dist.get_rank())]
    run = Pipeline(mine, schedule, dist.group.WORLD, loss_fn=mse, transport=Transport(timeout=60), **options)
    for _ in range(2):
        run.step(x, target=y)
        mse(nn.Sequential(*reference)(x), y).backward()
    for number in schedule.stage_of(dist.get_rank()):
        for one, other in zip(stages[number].parameters(), reference[number].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)
    return run


@pytest.mark.parametrize("resident", [None, 0])
def test_one_gpu_runs_all_stages_of_a_v(resident):
    with launch(timeout=60):
        offload = None if resident is None else ActivationOffload(resident=resident)
        timeline = check(zb_v(1, 4), offload=offload).timeline()
        assert timeline.makespan >= timeline.busy(0) > 0
        assert [timeline.peak(0)] == [simulate(zb_v(1, 4)).peak(0)]


def test_messages_keep_what_hosts_read_on_the_cpu_and_their_tensors_on_the_gpu():
    value = (torch.arange(15.0, device=DEVICE), None, torch.ones(3, 5, dtype=torch.bfloat16, device=DEVICE))
    tensors, signature = flatten(value)
    device = torch.device(DEVICE)
    for expected in (None, signature):
        ahead = None if expected is None else expected.size
        parts = dict(encode_apart(signature, tensors, expected, ahead, device))
        first, rest, apart = parts[FIRST], parts.get(REST), parts[APART]
        assert (first.device.type, len(first)) == ("cpu", HEADER)
        assert (apart.device.type, len(apart)) == (DEVICE, signature.size)
        assert rest is None if expected is not None else rest.device.type == "cpu"
        found, arrived = Header(first, first[0].item()).decode(expected, rest, apart)
        assert found == signature
        assert all(torch.equal(one, other) for one, other in zip(arrived, tensors, strict=True))


@for_each(make=[one_f_one_b, zb_h1, zb_v])
@pytest.mark.ranks(2, timeout=120)
def test_two_ranks_may_share_a_gpu_over_gloo(make):
    check(make(2, 4))


@pytest.mark.ranks(2, timeout=120)
def test_shared_parameters_of_a_gpu_have_the_sum_of_their_gradients_over_gloo():
    rank, group = dist.get_rank(), dist.group.WORLD
    module = nn.Linear(15, 15, bias=False).to(DEVICE)
    shared = Shared({"weight": module.weight}, group)
    module.weight.grad = torch.full_like(module.weight, rank + 1.0)
    shared.handle_gradient()
    assert module.weight.grad.unique().tolist() == [3.0]
