import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_groups import sharding_of
from par_layers import layer_set

from ..helpers import (
    FROM_4,
    assert_layer_equals_one_device,
    every_config,
    filled,
    in_the_typical_modes,
    modes,
    numbers,
    run_checks,
)


class Scaled(nn.Module):
    """A norm with weights that are not all alike."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        for parameter in norm.parameters():
            parameter.par_init = lambda whole, generator: whole.normal_(1.0, 1.0, generator=generator)

    def forward(self, x):
        return self.norm(x)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch tells that it is not fused
@pytest.mark.ranks([1, *FROM_4])
@in_the_typical_modes
def test_the_typical_modes(configs):
    run_checks(
        [
            check_norms_equal_one_device,
            check_the_norm_of_one_token,
            check_a_mean_far_from_zero_loses_no_digits,
            check_bfloat16_is_computed_in_fp32,
            check_fp32_weights_leave_bfloat16_activations_as_they_are,
        ],
        configs[dist.get_world_size()],
    )


def check_norms_equal_one_device(mode):
    for x in (numbers(8, 4, 16), numbers(8, 4, 3, 16)):
        assert_layer_equals_one_device(mode, lambda layers: Scaled(layers.LayerNorm(16)), x)
        assert_layer_equals_one_device(mode, lambda layers: Scaled(layers.RMSNorm(16, eps=1e-3)), x)


def check_the_norm_of_one_token(mode):
    if mode.tensor["mode"] == "2d" or (mode.tensor["mode"] == "1d" and not mode.by_sequence):
        assert_layer_equals_one_device(mode, lambda layers: layers.LayerNorm(16), numbers(2, 16))


def check_a_mean_far_from_zero_loses_no_digits(mode):
    # The sum of squares of 1e4 + noise would leave fp32 less than one digit of the variance.
    x = 1e4 + numbers(8, 4, 16)
    exact = functional.layer_norm(x, (16,))
    y = mode.layers.gather(filled(mode.layers.LayerNorm(16), torch.float32)(mode.layers.split(x.float())))
    torch.testing.assert_close(y.double(), exact, rtol=0.02, atol=0.02)  # the input itself is rounded to 1e-3


def check_bfloat16_is_computed_in_fp32(mode):
    # The output rounds to 8 bits, once for the normal and once for the product.
    x = numbers(8, 4, 16, dtype=torch.bfloat16)
    for make, exact in (
        (mode.layers.LayerNorm, functional.layer_norm(x.double(), (16,))),
        (mode.layers.RMSNorm, functional.rms_norm(x.double(), (16,), eps=1e-6)),
    ):
        y = mode.layers.gather(filled(make(16), torch.bfloat16)(mode.layers.split(x)))
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-8)


def check_fp32_weights_leave_bfloat16_activations_as_they_are(mode):
    x = numbers(8, 4, 16, dtype=torch.bfloat16)
    for name in ("LayerNorm", "RMSNorm"):
        one = filled(Scaled(getattr(layer_set(None), name)(16)), torch.float32)
        norm = filled(Scaled(getattr(mode.layers, name)(16)), torch.float32)
        mine = mode.layers.split(x).detach().requires_grad_()
        y = norm(mine)
        assert y.dtype == one(x).dtype == torch.bfloat16
        # Where features are cut, the normal is rounded to 8 bits, too, before it is multiplied by a weight up to 3.
        torch.testing.assert_close(mode.layers.gather(y), one(x), rtol=2**-7, atol=2**-6)
        y.sum().backward()
        assert mine.grad.dtype == torch.bfloat16
        assert norm.norm.weight.grad.dtype == torch.float32


@pytest.mark.ranks(4)
def test_the_record_says_where_gradients_are_partial():
    for mode in modes(every_config()):
        (box,) = sharding_of(mode.layers.LayerNorm(16).weight).boxes
        expected = {
            "1d": ("tensor",) if mode.by_sequence else (),
            "2d": ("row",),
            "2.5d": ("row",) if mode.tensor.get("depth") == 1 else ("depth",),
        }
        assert box.sum_over == expected[mode.tensor["mode"]]


def test_on_one_device_it_is_torch():
    layers, x = layer_set(None), numbers(3, 16)
    norm, rms = filled(layers.LayerNorm(16)), filled(layers.RMSNorm(16))
    assert torch.equal(norm(x), functional.layer_norm(x, (16,), norm.weight, norm.bias))
    assert torch.equal(rms(x), functional.rms_norm(x, (16,), rms.weight, eps=1e-6))
    assert rms.bias is None
    assert "16, eps=1e-05, mean=True" in repr(norm)
