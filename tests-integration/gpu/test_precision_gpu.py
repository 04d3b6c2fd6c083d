"""par-precision on a GPU: the same numbers as on the CPU, and no waiting for the host."""

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from par_groups import Box, Sharding, set_sharding
from par_precision import Float8Linear, convert_to_float8_, mixed, stochastic_round_
from par_precision.rounding.rounding import Rounding, round_all_
from par_testing import accelerator_type

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]


def has_float8():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@contextmanager
def no_syncs():
    """Whoever makes the host wait raises."""
    torch.accelerator.synchronize()
    module = torch.get_device_module(DEVICE)
    before = module.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that this mode is a prototype
            module.set_sync_debug_mode("error")
        yield
    finally:
        module.set_sync_debug_mode(before)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def both_ways(target, source):
    """Rounded on the CPU and on the GPU, as integers; the record on the target goes along."""
    results = []
    for device in ("cpu", DEVICE):
        into = target.to(device, copy=True)
        into.__dict__.update(target.__dict__)
        stochastic_round_(into, source.to(device), 1, 2, name="w")
        results.append(into.cpu())
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-39])
def test_the_kernel_rounds_like_the_cpu_bit_for_bit(dtype, scale):
    for shape in [(), (1,), (123,), (15, 17), (300, 4096), (3, 5, 7)]:
        source = randn(*shape) * scale
        for given in (source, source.mT.contiguous().mT if source.dim() > 1 else source):
            one, other = both_ways(torch.zeros(shape, dtype=dtype), given)
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), shape


def test_a_part_of_a_tensor_rounds_like_on_the_cpu():
    for start, size in [((2**20 - 3, 2**14 - 5), (3, 5)), ((17, 100), (128, 1000))]:
        target = torch.zeros(size, dtype=torch.bfloat16)
        set_sharding(target, Sharding((2**20, 2**14), (Box(start, size, 0, (size[1], 1), (0,)),)))
        one, other = both_ways(target, randn(*size))
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nan_infinities_and_what_is_exact_stay(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    found = both_ways(torch.zeros_like(every), every.float())[1]
    assert torch.equal(found.isnan(), every.isnan())
    assert torch.equal(found[~every.isnan()], every[~every.isnan()])
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -8388607], dtype=torch.int32).view(torch.float32)
    assert both_ways(torch.zeros(4, dtype=dtype), odd)[1].isnan().all()


def lying_otherwise(tensor):
    """The same values as they are, transposed in memory, with gaps, and at an odd address."""
    yield tensor
    if tensor.dim() > 1:
        yield tensor.mT.contiguous().mT
    if tensor.dim():
        yield torch.stack([tensor, tensor], dim=-1)[..., 0]
    yield torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def many_roundings(device):
    """Of weights of both dtypes and of many shapes, as parameters of a model and their moments have them."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for shape in [(), (1,), (0, 3), (123,), (15, 17), (3, 5, 7), (4096,), (300, 4096), (100_003,)]:
            source = randn(*shape, seed=len(found)).to(device)
            targets = list(lying_otherwise(torch.zeros(shape, dtype=dtype, device=device)))
            found += [Rounding(into, each, f"{len(found)}") for into in targets for each in lying_otherwise(source)]
            found += [Rounding(into.clone(), source, f"{len(found)}", ".exp_avg") for into in targets]
    return found


def test_many_tensors_at_once_round_like_on_the_cpu_without_waiting():
    expected, found, again = many_roundings("cpu"), many_roundings(DEVICE), many_roundings(DEVICE)
    round_all_(expected, 1, 2)
    round_all_(found, 1, 2)
    with no_syncs():
        round_all_(again, 1, 2)
    for one, *others in zip(expected, found, again, strict=True):
        for other in others:
            assert torch.equal(one.target, other.target.cpu()), (one.target.shape, one.target.stride())


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).to(DEVICE)


@pytest.mark.parametrize("precision", ["bf16", "bf16-amp", "fp16", "fp16-amp", "bf16-sr", "fp8"])
def test_a_step_does_not_wait_for_the_host(precision):
    if precision == "fp8" and not has_float8():
        pytest.skip("this GPU has no float8 products")
    module = model()
    adam = torch.optim.AdamW(module.parameters(), fused=True)
    module, optimizer = mixed(module, adam, precision, clip_norm=1.0)
    x = randn(48, 64).to(DEVICE)
    for step in range(4):
        loss = module(x).square().mean()
        optimizer.backward(loss)
        if step < 2:  # state and kernels are made
            optimizer.step()
        else:
            with no_syncs():
                optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()


def trained(sizes, weigh, precision, device=DEVICE, watched=no_syncs):
    """A layer after four steps on 12 rows each, of which every loss has some; from the third on it is watched."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4).to(device)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    scale = 2.0**10 if precision == "fp16" else None  # so that no step is skipped
    layer, optimizer = mixed(layer, sgd, precision, clip_norm=0.5, scale=scale)
    for step in range(4):
        watching = watched if step >= 2 else nullcontext
        for part in randn(12, 8, seed=step).to(device).split(sizes):
            loss = layer(part).square().mean()
            with watching():
                optimizer.backward(loss, weight=weigh(len(part), device))
        with watching():
            optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu().float() for parameter in layer.parameters()]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_losses_weigh_by_their_items_without_waiting(precision):
    """Tolerance: in each of four steps, weights and gradients below 1 are rounded to the dtype."""
    tolerance = 8 * torch.finfo(torch.float16 if precision == "fp16" else torch.float32).eps
    expected = trained([12], lambda *_: None, precision)
    for weigh in (lambda count, _: count, lambda count, device: torch.full((), float(count), device=device)):
        found = trained([3, 8, 1], weigh, precision)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    unweighed = trained([3, 8, 1], lambda *_: None, precision)
    assert any((one - other).abs().max() > tolerance for one, other in zip(unweighed, expected, strict=True))


@pytest.mark.skipif(not has_float8(), reason="this GPU has no float8 products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 17, 123, 256])
def test_float8_products_are_those_of_the_cpu(dtype, rows):
    """Quantisation is the same; sums are in another order, and forward ones in the tensor cores' fewer bits."""
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        layer = convert_to_float8_(nn.Sequential(nn.Linear(64, 48)))[0].to(device, dtype)
        x = randn(rows, 64).to(device, dtype).requires_grad_()
        output = layer(x)
        gradient = randn(rows, 48, seed=1).to(device, dtype)
        results.append([output, *torch.autograd.grad(output, [x, *layer.parameters()], gradient)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other.cpu().float(), one.float(), rtol=2**-6, atol=2**-6 * one.abs().mean().item())


@pytest.mark.skipif(not has_float8(), reason="this GPU has no float8 products")
def test_float8_takes_strided_inputs_and_expanded_gradients_without_waiting():
    layer = Float8Linear(64, 48, device=DEVICE, dtype=torch.bfloat16)
    x = randn(64, 40).to(DEVICE).bfloat16().t().requires_grad_()
    layer(x).sum().backward()
    with no_syncs():
        layer(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.skipif(has_float8() or DEVICE != "cuda", reason="this GPU has float8 products, or is none of CUDA")
def test_a_gpu_without_float8_says_so():
    with pytest.raises(RuntimeError, match=r"compute capability .*use bf16"):
        convert_to_float8_(model())
