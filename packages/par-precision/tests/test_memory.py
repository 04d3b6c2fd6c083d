"""Bytes per parameter while training: weights, gradients, masters and moments, counted by their storages.

And what is left afterwards.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

from par_groups import GradientElsewhere, written_
from par_precision import MasterWeights, StochasticRounding, mixed

from .training import ON_CPU, adamw, loss_of, model, train

N = 256 * 256


def live(module, optimizer):
    """Bytes of everything that lives between backward and step, and after steps."""
    tensors = [*module.parameters(), *(t for group in optimizer.param_groups for t in group["params"])]
    gradients = [t.grad for t in tensors if t.grad is not None and type(t.grad) is not GradientElsewhere]
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*tensors, *gradients, *state)}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        ("fp32", {}, 16),
        ("bf16-amp", {}, 16),
        ("fp16-amp", {}, 16),
        ("bf16", {}, 16),
        ("fp16", {}, 16),
        ("bf16", {"masters": MasterWeights(accumulate=True)}, 18),
        ("fp16", {"masters": MasterWeights(accumulate=True)}, 18),
        ("fp8", {}, 16),
        ("bf16-sr", {}, 8),
        ("bf16-sr", {"rounding": StochasticRounding(moments=torch.float32)}, 12),
    ],
)
def test_bytes_per_parameter_are_those_stated(precision, options, expected):
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    module, optimizer = mixed(module, optimizer, precision, **options)
    for _ in range(2):
        optimizer.backward(module(torch.randn(4, 256)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.backward(module(torch.randn(4, 256)).square().mean())
    assert live(module, optimizer) == expected * 3 * N


def test_a_step_with_masters_makes_fp32_gradients_for_one_bucket_at_a_time():
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    inner = torch.optim.AdamW(module.parameters(), fused=True)
    module, optimizer = mixed(module, inner, "bf16", masters=MasterWeights(bucket=4 * N))
    wide = []
    inner.register_step_pre_hook(
        lambda *_: wide.append(sum(t.grad.numel() for t in inner.param_groups[0]["params"] if t.grad is not None))
    )
    optimizer.backward(module(torch.randn(4, 256)).square().mean())
    optimizer.step()
    assert wide == [N] * 4


def alive(references):
    gc.collect()
    return [reference() for reference in references if reference() is not None]


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        *((name, {}) for name in ON_CPU),
        ("bf16", {"masters": MasterWeights(accumulate=True)}),
        ("fp16", {"masters": MasterWeights(accumulate=True)}),
    ],
)
@pytest.mark.usefixtures("quick_collector")
def test_masters_and_moments_go_with_the_optimizer_and_nothing_outlives_the_module(precision, options):
    module = model()
    inner = adamw(module)
    module, optimizer = mixed(module, inner, precision, clip_norm=1.0, **options)
    train(module, optimizer, steps=2)
    assert optimizer.scaling.skipped == 0
    optimizer.backward(loss_of(module, 2))  # its gradients are left
    own = {id(parameter) for parameter in module.parameters()}
    masters = [tensor for group in inner.param_groups for tensor in group["params"] if id(tensor) not in own]
    moments = [value for state in inner.state.values() for value in state.values()]
    assert moments
    references = [weakref.ref(each) for each in (optimizer, inner, *masters, *moments)]
    del optimizer, inner, masters, moments
    module.zero_grad()
    assert alive(references) == []
    loss_of(module, 0).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    written_(module.parameters())
    references = [weakref.ref(each) for each in (module, *module.parameters())]
    del module
    assert alive(references) == []
