"""Float8 layers in a pipeline: under a split backward, their weight gradients are computed in its second half."""

from time import perf_counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_pipeline import Pipeline, Schedule, Shared, zb_h1, zb_v
from par_precision import convert_to_float8_, mixed

WIDTH, ROWS, MICROBATCHES = 32, 51, 3


def mse(output, target):
    return (output - target).square().mean()


def mlp(layers, stage):
    """Two float8 layers, whose rows are a microbatch's 17."""
    module = nn.Sequential(layers.ColumnLinear(WIDTH, 2 * WIDTH), nn.GELU(), layers.RowLinear(2 * WIDTH, WIDTH))
    initialize(module, seed=3, prefix=f"{stage}.")
    return convert_to_float8_(module)


def plain(_, stage):
    """The same of torch's layers."""
    torch.manual_seed(stage)
    return convert_to_float8_(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)))


def data(step):
    """[rows, 1, width]; of a sequence that is cut, a rank's part."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, 1, WIDTH, generator=generator) for _ in range(2)]


def unsplit(schedule):
    """The same order of microbatches, with whole backwards."""
    whole = {"I": "B"}
    return Schedule(
        [[each._replace(op=whole.get(each.op, each.op)) for each in rank if each.op != "W"] for rank in schedule.ranks]
    )


def counted(monkeypatch):
    """The moments of float8 products."""
    moments, product = [], torch._scaled_mm

    def recorded(*args, **kwargs):
        moments.append(perf_counter())
        return product(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    return moments


def assert_split_equals_unsplit(make, layers, group, moments, wrap=lambda module: module):
    schedule = make(2, MICROBATCHES)
    numbers = schedule.stage_of(dist.get_rank(group))
    modules, fired = [], []
    for each in (schedule, unsplit(schedule)):
        stages = [wrap(layers(number)) for number in numbers]
        names = []
        for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, names=names: names.append(name))
        run = Pipeline(stages, each, group, loss_fn=mse)
        for step in range(2):
            x, y = data(step)
            moments.clear()
            names.clear()
            for stage in stages:
                stage.zero_grad()
            run.step(x, target=y)
        for action, start, end in run._recorded:
            products = sum(start <= moment <= end for moment in moments)
            of_inputs = 1 if action.stage == 0 else 2  # the batch itself wants no gradient
            assert products == {"F": 2, "I": of_inputs, "B": of_inputs + 2, "W": 2}[action.op], action
        modules.append(nn.ModuleList(stages))
        fired.append(sorted(names))
    for one, other in zip(*(each.parameters() for each in modules), strict=True):
        assert torch.equal(one.grad, other.grad)  # the same products, added in the same order
    assert sorted(fired[0] * MICROBATCHES) == fired[1]  # once in a step, and once in each microbatch


@pytest.mark.parametrize("make", [pytest.param(zb_h1, marks=pytest.mark.storm), zb_v])
@pytest.mark.ranks(2)
def test_float8_weight_gradients_are_computed_in_the_second_half_and_are_the_same(make, monkeypatch):
    moments = counted(monkeypatch)
    for build in (plain, mlp):
        assert_split_equals_unsplit(make, lambda n, build=build: build(layer_set(None), n), dist.group.WORLD, moments)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=90)
def test_float8_weight_gradients_of_tensor_parallel_layers_are_so_too(monkeypatch):
    moments = counted(monkeypatch)
    for tensor in ({"size": 2, "mode": "1d"}, {"size": 2, "mode": "1d", "sequence_parallel": True}):
        with ProcessGroups(Topology.from_config({"pipeline": 2, "tensor": tensor}, 4)) as groups:
            layers = layer_set("auto", groups)
            assert_split_equals_unsplit(zb_h1, lambda n: mlp(layers, n), groups["pipeline"], moments)  # noqa: B023


@pytest.mark.ranks(4, timeout=90)
def test_float8_weight_gradients_under_ddp_are_reduced_once(monkeypatch):
    moments = counted(monkeypatch)
    with ProcessGroups(Topology.from_config({"pipeline": 2}, 4)) as groups:  # and two data ranks

        def wrap(module):
            return DistributedDataParallel(module, process_group=groups["data"])

        assert_split_equals_unsplit(zb_h1, lambda n: plain(None, n), groups["pipeline"], moments, wrap)


@pytest.mark.ranks(2)
def test_shared_weights_of_other_names_are_counted_once_by_the_norm():
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    name, layer = ("embedding", nn.Embedding(5, 4)) if rank == 0 else ("head", nn.Linear(4, 5, bias=False))
    module = nn.ModuleDict({name: layer})
    Shared({f"{name}.weight": layer.weight}, group)
    _, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=0.1), "fp32", group=group, clip_norm=1.0)
    layer.weight.grad = torch.full_like(layer.weight, 2.0)
    assert optimizer.step().grad_norm.item() == pytest.approx(2 * 20**0.5)
