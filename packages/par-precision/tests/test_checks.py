"""Mistakes are errors on all ranks, before anything has changed."""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from par_groups import set_sharding, whole
from par_precision import DynamicScale, MasterWeights, MixedOptimizer, StochasticRounding, mixed
from par_testing import for_each

from .training import adamw, model


def given(module=None, precision="bf16", optimizer=None, **options):
    module = module or model()
    return {"module": module, "optimizer": optimizer or adamw(module), "precision": precision, **options}


def wrapped():
    module = model()
    module, optimizer = mixed(module, adamw(module), "fp32")
    return given(module, optimizer=optimizer)


def wrapped_and_given_again():
    arguments = given()
    mixed(**arguments)
    return arguments


def complex_parameter():
    module = nn.ParameterDict({"phase": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    return given(module, "fp32", torch.optim.SGD(module.parameters()))


def sparse():
    return given(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)))


def stepped():
    arguments = given()
    arguments["module"](torch.ones(1, 16)).sum().backward()
    arguments["optimizer"].step()
    return arguments


def on_meta():
    with torch.device("meta"):
        return given(nn.Linear(2, 2))


def half(dtype, precision):
    module = model().to(dtype)
    return given(module, precision)


def mixed_before():
    module = model()
    mixed(module, adamw(module), "bf16", masters=MasterWeights(accumulate=True))
    return given(module)


def without_float8():
    return given(nn.Sequential(nn.Linear(15, 16), nn.LayerNorm(16)), "fp8")


def foreign(masters, weights):
    """What a package that keeps masters of its own has made."""
    module = nn.Linear(4, 4).to(weights)
    return given(module, optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(20, dtype=masters))]))


MISTAKES = {
    "clip_norm 0": (lambda: given(clip_norm=0), ValueError, "clip_norm is 0; give a number above 0"),
    "clip_norm negative": (lambda: given(clip_norm=-1.0), ValueError, "clip_norm is -1.0"),
    "clip_norm NaN": (lambda: given(clip_norm=math.nan), ValueError, "clip_norm is nan"),
    "clip_value 0": (lambda: given(clip_value=0), ValueError, "clip_value is 0"),
    "two ways to clip": (lambda: given(clip_value=1, clip_norm=1), ValueError, "give one of them"),
    "a scale of 0": (lambda: given(precision="fp16", scale=0), ValueError, "scale is 0"),
    "a scale of words": (lambda: given(scale="dynamic"), TypeError, "scale is a str; give a number above 0"),
    "whole numbers as outputs": (lambda: given(output_dtype=torch.int32), ValueError, "output_dtype is torch.int32"),
    "a dtype's name": (lambda: given(output_dtype="float32"), ValueError, "output_dtype is 'float32'"),
    "bf16 weights without masters": (lambda: half(torch.bfloat16, "fp32"), ValueError, "use 'bf16', which makes fp32"),
    "fp16 weights under autocast": (lambda: half(torch.float16, "fp16-amp"), ValueError, "use 'fp16', which makes"),
    "a module that has masters": (mixed_before, ValueError, "has an fp32 master in an optimizer that was mixed before"),
    "nothing that float8 can multiply": (without_float8, ValueError, "'fp8' is for linear layers .*; use 'bf16'"),
    "LBFGS": (lambda: given(optimizer=torch.optim.LBFGS(model().parameters())), TypeError, "LBFGS computes gradients"),
    "an unknown precision": (lambda: given(precision="fp4"), ValueError, "precision is 'fp4'"),
    "tf32 on a CPU": (lambda: given(precision="tf32"), RuntimeError, "'tf32' needs the TF32 units .* use 'fp32'"),
    "sparse gradients": (sparse, ValueError, "'0' has sparse gradients, .*; use sparse=False"),
    "complex parameters": (complex_parameter, ValueError, "'phase' has dtype torch.complex64"),
    "an optimizer already mixed": (wrapped, ValueError, "this AdamW is mixed already"),
    "the same optimizer again": (wrapped_and_given_again, ValueError, "this AdamW is mixed already"),
    "no optimizer": (lambda: given(optimizer=[]) | {"optimizer": []}, TypeError, "of type list"),
    "an optimizer that has stepped": (stepped, ValueError, "the AdamW has stepped already; mix first"),
    "the meta device": (on_meta, ValueError, "'weight' is on the meta device"),
    "fp32 sums of fp32": (
        lambda: given(precision="fp32", masters=MasterWeights(accumulate=True)),
        ValueError,
        "gradients are fp32 already under 'fp32'; remove it",
    ),
    "fp32 sums without masters": (
        lambda: given(precision="bf16-sr", masters=MasterWeights(accumulate=True)),
        ValueError,
        "'bf16-sr' has no master weights; use 'bf16'",
    ),
    "others' masters that are not fp32": (
        lambda: foreign(torch.bfloat16, torch.bfloat16),
        ValueError,
        r"dtype torch.bfloat16 that are not the module's .*MixedPrecision\(param_dtype=torch.bfloat16",
    ),
    "others' masters of fp32 weights": (
        lambda: foreign(torch.float32, torch.float32),
        ValueError,
        r"'weight' has dtype torch.float32, .* shard with precision=MixedPrecision\(param_dtype=torch.bfloat16",
    ),
    "others' gradients": (
        lambda: {**foreign(torch.float32, torch.bfloat16), "masters": MasterWeights(accumulate=True)},
        ValueError,
        "reduce_dtype=torch.float32",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_a_remedy(mistake):
    make, kind, words = MISTAKES[mistake]
    arguments = make()
    dtypes = [p.dtype for p in arguments["module"].parameters()]
    held = [id(p) for group in getattr(arguments["optimizer"], "param_groups", ()) for p in group["params"]]
    with pytest.raises(kind, match=words):
        mixed(**arguments)
    assert [p.dtype for p in arguments["module"].parameters()] == dtypes
    after = [id(p) for group in getattr(arguments["optimizer"], "param_groups", ()) for p in group["params"]]
    assert after == held


def test_frozen_half_precision_weights_may_lie_under_trained_fp32_ones():
    module = model()
    module[0].bfloat16().requires_grad_(False)
    mixed(module, adamw(module), "bf16-amp")[0](torch.ones(2, 16)).sum().backward()
    assert module[0].weight.dtype == torch.bfloat16


def test_a_copy_of_a_mixed_module_can_be_mixed():
    module = mixed_before()["module"]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        _, optimizer = mixed(other, adamw(other), "bf16")
        optimizer.backward(other(torch.ones(2, 16)).sum())
        assert optimizer.step().grad_norm > 0


@pytest.mark.cpu(reason="float8 runs on NVIDIA GPUs and CPUs")
@pytest.mark.ranks(2)
def test_a_stage_without_linear_layers_is_no_mistake_where_another_has_them():
    module = model() if dist.get_rank() else nn.Embedding(4, 16)
    module, optimizer = mixed(module, adamw(module), "fp8", group=dist.group.WORLD)
    optimizer.backward(module(torch.ones(2, 16) if dist.get_rank() else torch.tensor([1])).sum())
    assert optimizer.step().grad_norm > 0
    with pytest.raises(ValueError, match="'fp8' is for linear layers"):
        mixed(**without_float8(), group=dist.group.WORLD)


@pytest.mark.ranks(2)
@for_each(mistake=["clip_norm NaN", "tf32 on a CPU", "complex parameters", "no optimizer"])
def test_a_mistake_on_one_rank_is_told_to_the_other(mistake):
    make, kind, words = MISTAKES[mistake]
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=rf"rank 1: {kind.__name__}: .*{words}"):
            mixed(**given(), group=dist.group.WORLD)
    else:
        with pytest.raises(kind, match=words):
            mixed(**make(), group=dist.group.WORLD)
    dist.barrier()


@pytest.mark.ranks(2)
def test_ranks_that_choose_differently_all_hear_of_it():
    odd = dist.get_rank() == 1
    for mine in (
        {"clip_norm": 2.0},
        {"precision": "fp16"},
        {"scale": DynamicScale(max_skipped=3)},
        {"rounding": StochasticRounding(seed=1)},
    ):
        with pytest.raises(
            ValueError,
            match=r"rank 1 has other settings than rank 0 \(rank 1: .*; rank 0: .*\); give all ranks the same",
        ):
            mixed(**given(**(mine if odd else {})), group=dist.group.WORLD)


@pytest.mark.ranks(2)
def test_what_is_cut_needs_a_group_and_one_that_holds_all_of_it():
    mesh = init_device_mesh("cpu", (2,))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for group, words in ((None, "pass the group of all ranks that hold it"), (alone, "the group does not hold all")):
        module = nn.ParameterList([nn.Parameter(distribute_tensor(torch.zeros(5), mesh, [Shard(0)]))])
        with pytest.raises(ValueError, match=words):
            mixed(module, torch.optim.SGD(module.parameters()), "fp32", group=group)


@pytest.mark.ranks(2)
def test_records_with_wrong_copies_are_found_before_the_first_step():
    module = nn.ParameterList([nn.Parameter(torch.zeros(5))])
    set_sharding(module[0], whole((5,), (dist.get_rank(),)))
    with pytest.raises(ValueError, match="own 10 elements of '0', which has 5"):
        mixed(module, torch.optim.SGD(module.parameters()), "fp32", group=dist.group.WORLD)


@pytest.mark.ranks(2)
def test_ddp_around_a_module_that_is_to_be_cast_is_refused_and_around_a_mixed_one_works():
    module = DistributedDataParallel(model())
    with pytest.raises(ValueError, match="mix first, then wrap"):
        mixed(module, adamw(module), "bf16")
    module = model()
    module, optimizer = mixed(module, adamw(module), "bf16", clip_norm=1.0)
    wrapper = DistributedDataParallel(module)
    taking = DistributedDataParallel(mixed(**given(masters=MasterWeights(accumulate=True)))[0])
    with pytest.raises(RuntimeError, match="before DistributedDataParallel averages them"):
        taking(torch.ones(2, 16))
    optimizer.backward(wrapper(torch.full((2, 16), float(dist.get_rank()))).square().mean())
    norm = optimizer.step().grad_norm
    both = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(both, norm)
    assert both[0] == both[1] > 0
    assert isinstance(optimizer, MixedOptimizer)


def test_policies_with_impossible_values_are_refused():
    with pytest.raises(ValueError, match="bucket=0: a bucket has at least 1 byte; pass a larger number"):
        MasterWeights(bucket=0)
    with pytest.raises(ValueError, match=r"moments in torch.float16: keep them in torch.bfloat16 or torch.float32"):
        StochasticRounding(moments=torch.float16)
