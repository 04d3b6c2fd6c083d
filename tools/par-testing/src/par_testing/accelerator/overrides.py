"""Operators that torch leaves to the device, and how the CPU computes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute attention by the CPU's fused kernel."""
    flash = _aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = flash(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
    none = torch.empty(0)
    return out, logsumexp, none, none, q.shape[2], k.shape[2], none, none, none


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    needed: Any,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute the gradients of attention by the CPU's fused kernel."""
    _, _, _, _, dropout, causal, *_ = rest
    flash = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = flash(grad, q, k, v, out, logsumexp, dropout, causal, attn_mask=bias, scale=scale)
    return (*grads, torch.empty(0))


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """Compute the gradients of a convolution; the CPU's operator also takes the size of the bias."""
    *sizes, needed = rest
    return _aten.convolution_backward(grad, x, weight, [weight.shape[0]], *sizes, needed)


OVERRIDES: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_fused_attention_overrideable: _attention,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    # A tensor of zeros without memory, which forward-mode differentiation makes. The device needs the memory.
    _aten._efficientzerotensor: _aten.zeros,
    _aten.convolution_overrideable: _aten.convolution,
    _aten.convolution_backward_overrideable: _convolution_backward,
}
"""By the operator that torch calls on the device."""
