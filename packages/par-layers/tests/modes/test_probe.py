"""The probe of kernels finds those whose bits depend on more than their shapes."""

import pytest
import torch
from torch.nn import functional

from par_layers import unstable_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_probe_finds_no_unstable_kernel_on_this_machine(dtype):
    state = torch.get_rng_state()
    assert unstable_kernels(CPU, dtype, lanes=4) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_probe_names_a_softmax_that_depends_on_other_rows(monkeypatch):
    softmax = functional.softmax
    monkeypatch.setattr(functional, "softmax", lambda x, dim: softmax(x - x.mean(0), dim))
    assert unstable_kernels(CPU, torch.float32, lanes=4) == ["a softmax or norm of a row, next to other rows"]
    assert unstable_kernels(CPU, torch.float32, lanes=1) == []


def test_probe_names_an_activation_function_with_another_tail(monkeypatch):
    silu = functional.silu

    def with_other_tail(x):
        y = silu(x)
        y[:, -1] += 1e-3
        return y

    monkeypatch.setattr(functional, "silu", with_other_tail)
    assert unstable_kernels(CPU, torch.float32, lanes=2) == ["an activation function of part of the features"]


def test_probe_names_attention_that_depends_on_other_heads(monkeypatch):
    attend = functional.scaled_dot_product_attention

    def times_heads(q, *others, **options):
        return q.shape[1] * attend(q, *others, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", times_heads)
    assert unstable_kernels(CPU, torch.float32, lanes=2) == ["attention next to other heads"]
