"""Clipping: the same factor on every rank, and the same gradients as on one device."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_groups import sharding_of
from par_precision import clip_grad_norm_, clip_grad_value_
from par_precision.norm.clip import multiply_
from par_testing import count_collectives

from ..helpers import expected_norm, gradient, parameter, stage_parameters, zero_parameters


@pytest.mark.ranks(8)
def test_clipping_over_tensor_pipeline_and_zero_is_that_of_one_device():
    """fp32 gradients times a factor that is rounded to fp32 once: two roundings of 6e-8."""
    for order in (1.0, 2.0, math.inf):
        norm = expected_norm(order)
        for sharded in (False, True):
            parameters = stage_parameters()
            held = zero_parameters(parameters) if sharded else list(parameters.values())
            before = [each.grad.clone() for each in held]
            returned = clip_grad_norm_(held, 0.5, dist.group.WORLD, norm_type=order)
            assert abs(returned / norm - 1) < 1e-12
            for each, old in zip(held, before, strict=True):
                torch.testing.assert_close(each.grad.double(), old.double() * 0.5 / norm, rtol=2e-7, atol=0)
    for name, each in stage_parameters(huge=True).items():
        clip_grad_value_([each], 0.25)
        box = sharding_of(each).boxes[0]
        assert torch.equal(box.of(each.grad), gradient(name, huge=True)[box.slices].clamp(-0.25, 0.25))


def test_a_norm_below_the_limit_leaves_every_bit():
    one = parameter(gradient("row"))
    before = one.grad.clone()
    clip_grad_norm_(one, 1e6, None)
    assert torch.equal(one.grad, before)


def test_the_norm_after_clipping_is_the_limit():
    for dtype, digits in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        one = parameter(gradient("column").to(dtype))
        clip_grad_norm_(one, 0.125, None)
        assert one.grad.double().norm().item() == pytest.approx(0.125, rel=digits)  # as dtypes round


def test_gradients_of_zero_stay_zero():
    one = parameter(torch.zeros(3))
    assert clip_grad_norm_(one, 1.0, None) == 0
    assert torch.equal(one.grad, torch.zeros(3))


@pytest.mark.cpu(reason="a mesh of CPUs")
@pytest.mark.ranks(2)
def test_dtensors_and_plain_tensors_are_clipped_together_with_one_all_reduce():
    mesh = init_device_mesh("cpu", (2,))
    kinds = [([Replicate()], "embedding"), ([Shard(0)], "norm"), ([Shard(1)], "row")]
    held = [nn.Parameter(distribute_tensor(torch.zeros_like(gradient(name)), mesh, how)) for how, name in kinds]
    for each, (how, name) in zip(held, kinds, strict=True):
        each.grad = distribute_tensor(gradient(name), mesh, how)
    plain = parameter(gradient("deep.norm"))
    with count_collectives() as counted:
        norm = clip_grad_norm_([*held, plain], 1.0, dist.group.WORLD, replicas=dist.group.WORLD)
    assert counted.calls() == counted.calls("all_reduce") == 1
    names = [name for _, name in kinds] + ["deep.norm"]
    expected = torch.cat([gradient(name).flatten() for name in names]).double().norm()
    assert abs(norm / expected - 1) < 1e-12
    for each, (_, name) in zip(held, kinds, strict=True):
        torch.testing.assert_close(each.grad.full_tensor().double(), gradient(name).double() / norm, rtol=2e-7, atol=0)
    torch.testing.assert_close(plain.grad.double(), gradient("deep.norm").double() / norm, rtol=2e-7, atol=0)


@pytest.mark.ranks(2)
def test_an_infinite_gradient_on_one_rank_is_an_error_on_both_if_asked_for():
    one = parameter(torch.tensor([1.0, math.inf if dist.get_rank() == 1 else 2.0]))
    before = one.grad.clone()
    with pytest.raises(RuntimeError, match="the norm of the gradients is inf"):
        clip_grad_norm_(one, 1.0, dist.group.WORLD, error_if_nonfinite=True)
    assert torch.equal(one.grad, before)
    clip_grad_norm_(one, 1.0, dist.group.WORLD)  # as torch: times zero
    assert one.grad[0] == 0


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ValueError, match=r"max_norm is .*; give a number above 0, or leave clipping away"):
        clip_grad_norm_([], limit, None)
    with pytest.raises(ValueError, match="clip_value is"):
        clip_grad_value_([], limit)


def test_an_infinite_limit_clips_nothing():
    one = parameter(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(one, math.inf, None) == 5
    assert one.grad.tolist() == [3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_multiplied_to_the_bits_of_torchs_product(dtype):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in [(123,), (), (0,), (15, 17), (2, 3, 4)]]
    given += [torch.randn(15, 17).to(dtype).t(), torch.randn(16, 8).to(dtype)[::2, 1:5]]
    given[0][:3] = torch.tensor([math.inf, math.nan, -math.inf])
    for factor in (0.37, 1.0, 0.0, math.nan):
        by = torch.tensor(factor, dtype=torch.float64)
        single = by.to(dtype if dtype == torch.float64 else torch.float32)
        expected = [each.clone().mul_(single) for each in given]
        multiplied = [torch.empty_strided(each.shape, each.stride(), dtype=dtype).copy_(each) for each in given]
        multiply_(multiplied, by)
        for each, wanted in zip(multiplied, expected, strict=True):
            assert each.dtype == dtype
            torch.testing.assert_close(each, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_are_clipped_by_absolute_value(dtype):
    """The norm is a sum in fp64; the product is rounded to the gradient's own digits."""
    digits = 1e-6 if dtype == torch.complex64 else 1e-14
    given = torch.complex(torch.tensor([1.0, 0.0, -2.0]), torch.tensor([3.0, 100.0, 0.5])).to(dtype)
    for order in (1.0, 2.0, 3.5, math.inf):
        for conjugate in (False, True):
            one = parameter(torch.zeros(3, dtype=dtype))
            one.grad = given.clone().conj() if conjugate else given.clone()
            wanted = torch.linalg.vector_norm(given.to(torch.complex128), order)
            assert clip_grad_norm_(one, 1.0, None, norm_type=order).item() == pytest.approx(wanted.item(), rel=1e-12)
            assert torch.linalg.vector_norm(one.grad, order).item() == pytest.approx(1.0, rel=digits)
    one = parameter(torch.zeros(3, dtype=dtype))
    one.grad = given.clone()
    clip_grad_value_(one, 2.0)
    assert one.grad.tolist() == [1 + 2j, 2j, -2 + 0.5j]


def test_clip_accepts_the_order_as_text_like_torch():
    one = parameter(torch.zeros(2))
    one.grad = torch.tensor([3.0, -6.0])
    assert clip_grad_norm_(one, 3.0, None, norm_type="inf") == 6
    assert torch.equal(one.grad, torch.tensor([1.5, -3.0]))
