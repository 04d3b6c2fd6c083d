"""Norms: the same on every rank as on one device, with one all-reduce."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from par_groups import set_gradient_elsewhere
from par_precision import clip_grad_norm_, grad_norm
from par_testing import count_collectives

from ..helpers import expected_norm, gradient, parameter, rows_of, stage_parameters, zero_parameters

ORDERS = (1.0, 2.0, 3.5, math.inf)
TOLERANCE = 1e-12  # fp64 sums in another order


def near(norm, expected):
    return norm.dtype == torch.float64 and abs(norm.item() / expected.item() - 1) < TOLERANCE


@pytest.mark.ranks(8)
def test_norms_over_tensor_pipeline_and_zero_are_those_of_one_device():
    """With tied embeddings, copies, padding, and gradients of 1e30."""
    for huge in (False, True):
        parameters = stage_parameters(huge=huge)
        for held in (parameters.values(), zero_parameters(parameters)):
            for order in ORDERS if not huge else (1.0, 2.0, math.inf):
                assert near(grad_norm(held, dist.group.WORLD, norm_type=order), expected_norm(order, huge=huge)), order
    # A group of the model alone counts each element once: of two data-parallel replicas, each sums over its own ranks.
    groups = [dist.new_group([2 * d + t + 4 * p for p in range(2) for t in range(2)]) for d in range(2)]
    mine = groups[dist.get_rank() // 2 % 2]
    assert near(grad_norm(stage_parameters().values(), mine), expected_norm(2.0))


@pytest.mark.ranks(2)
def test_one_number_is_reduced_however_many_gradients_there_are():
    parameters = [rows_of(gradient("column"), dist.get_rank(), 2, (dist.get_rank(),)) for _ in range(17)]
    for order in (2.0, 1.0, math.inf):
        with count_collectives() as counted:
            grad_norm(parameters, dist.group.WORLD, norm_type=order)
        assert counted.calls() == counted.calls("all_reduce") == 1
        assert (counted.elements(), counted.bytes()) == (1, 8)


@pytest.mark.ranks(2)
def test_a_rank_without_gradients_or_parameters_takes_part():
    mine = [[], [parameter(torch.tensor([3.0, 4.0]))]][dist.get_rank()]
    assert grad_norm(mine, dist.group.WORLD) == 5
    frozen = [nn.Parameter(torch.ones(3))] if dist.get_rank() == 0 else mine
    assert grad_norm(frozen, dist.group.WORLD, norm_type=math.inf) == 4


@pytest.mark.ranks(2)
def test_plain_tensors_are_each_ranks_own_unless_replicas_says_that_they_are_copies():
    one = parameter(torch.tensor([3.0]))
    assert grad_norm(one, dist.group.WORLD) == math.sqrt(18)
    assert grad_norm(one, dist.group.WORLD, replicas=dist.group.WORLD) == 3
    assert grad_norm(one, None) == 3


@pytest.mark.ranks(2)
def test_what_is_not_finite_on_one_rank_is_seen_on_all():
    for bad, place in itertools.product((math.nan, math.inf), (0, 1)):
        one = parameter(torch.tensor([bad if dist.get_rank() == place else 1.0]))
        for order in (1.0, 2.0, math.inf):
            assert not grad_norm(one, dist.group.WORLD, norm_type=order).isfinite()


def placed(mesh, placements, values):
    made = nn.Parameter(distribute_tensor(torch.zeros_like(values), mesh, placements))
    made.grad = distribute_tensor(values, mesh, placements)
    return made


@pytest.mark.ranks(4)
def test_dtensors_plain_tensors_and_records_are_mixed_in_any_order():
    """Two pipeline stages, each on a mesh of two; torch raises on such a mix."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))["tensor"]
    stage = rank // 2
    values = {name: gradient(name, seed=stage) for name in ("embedding", "norm", "row")}
    held = [
        placed(mesh, [Replicate()], values["embedding"]),
        placed(mesh, [Shard(0)], values["norm"]),
        placed(mesh, [Shard(1)], values["row"]),
        rows_of(gradient("column"), rank % 2, 2, (rank % 2, rank % 2 + 2)),  # both stages hold it
        parameter(torch.full((5,), float(rank))),
    ]
    both = [gradient(name, seed=seed) for name in values for seed in range(2)]
    whole = [*both, gradient("column"), *(torch.full((5,), float(each)) for each in range(4))]
    expected = torch.cat([each.flatten() for each in whole]).double().norm()
    assert near(grad_norm(held, dist.group.WORLD), expected)
    assert near(grad_norm(held[::-1], dist.group.WORLD), expected)


@pytest.mark.ranks(4)
def test_uneven_and_empty_shards_of_dtensors_are_counted_once():
    mesh = init_device_mesh("cpu", (2, 2))
    held = [
        placed(mesh, [Shard(0), Shard(0)], gradient("embedding")),
        placed(mesh, [Shard(0), Replicate()], torch.tensor([3.0])),  # nothing on ranks 2 and 3
        placed(mesh, [Replicate(), Shard(1)], gradient("deep.column")),
    ]
    parts = (gradient("embedding"), torch.tensor([3.0]), gradient("deep.column"))
    expected = torch.cat([each.flatten() for each in parts]).double().norm()
    assert near(grad_norm(held, dist.group.WORLD), expected)
    assert near(grad_norm(held[::-1], dist.group.WORLD), expected)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_still_a_sum_over_ranks_is_summed_first():
    mesh = init_device_mesh("cpu", (2,))
    one = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    one.grad = DTensor.from_local(torch.tensor([1.0, -2.0, 3.0]) * (dist.get_rank() + 1), mesh, [Partial()])
    expected = torch.tensor([3.0, -6.0, 9.0]).double().norm()
    assert near(grad_norm(one, dist.group.WORLD), expected)
    assert one.grad.placements == (Replicate(),)


@pytest.mark.ranks(2)
def test_what_is_cut_needs_a_group():
    mesh = init_device_mesh("cpu", (2,))
    for one in (placed(mesh, [Shard(0)], gradient("norm")), rows_of(gradient("column"), dist.get_rank(), 2, (0,))):
        with pytest.raises(ValueError, match=r"cut over ranks, of which this one holds \d+ elements; pass the group"):
            grad_norm(one, None)
    assert grad_norm(placed(mesh, [Replicate()], torch.tensor([3.0, 4.0])), None) == 5


def test_a_module_and_an_optimizer_are_taken_for_their_parameters():
    module = nn.Linear(3, 5)
    module(torch.ones(2, 3)).sum().backward()
    optimizer = torch.optim.SGD([{"params": [module.weight]}, {"params": [module.bias]}])
    expected = grad_norm(module.parameters(), None)
    assert expected > 0
    assert grad_norm(module, None) == grad_norm(optimizer, None) == expected


def test_a_module_whose_gradients_live_elsewhere_is_refused():
    module = nn.Linear(3, 5)
    set_gradient_elsewhere(module.bias, "the flat shard")
    with pytest.raises(RuntimeError, match="'bias' lives in the flat shard"):
        grad_norm(module, None)


def test_no_gradients_have_a_norm_of_zero():
    for order in ORDERS:
        assert grad_norm([nn.Parameter(torch.ones(3))], None, norm_type=order) == 0
        assert grad_norm([], None, norm_type=order) == 0


@pytest.mark.parametrize("order", [0.0, -1.0, math.nan])
def test_an_order_that_is_none_is_refused(order):
    with pytest.raises(ValueError, match="norm_type is"):
        grad_norm([], None, norm_type=order)


def test_a_bf16_norm_has_more_digits_than_bf16():
    one = parameter(torch.linspace(-1, 1, 246).bfloat16())
    expected = one.grad.double().norm()
    assert near(grad_norm(one, None), expected)
    assert abs(torch.nn.utils.get_total_norm([one.grad]).item() / expected - 1) > 1e-4  # what torch gives


@pytest.mark.cpu(reason="arithmetic on sparse tensors")
@pytest.mark.ranks(2)
def test_a_sparse_gradient_on_one_rank_is_an_error_on_both():
    one = parameter(torch.tensor([3.0, 4.0]))
    if dist.get_rank() == 1:
        one.grad = one.grad.to_sparse()
    where = "on another rank" if dist.get_rank() == 0 else r"of shape \(2,\)"
    for norm in (grad_norm, lambda each, group: clip_grad_norm_(each, 1.0, group)):
        with pytest.raises(TypeError, match=f"a gradient {where} is sparse.*use an embedding with sparse=False"):
            norm(one, dist.group.WORLD)
    assert one.grad.sum() == 7
