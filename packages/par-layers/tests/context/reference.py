"""Attention by torch on one device, with the dense mask, which everything here is compared with."""

import torch
from torch.nn import functional

from .dense import dense


def attention(q, k, v, mask, tokens, *, scale=None, sinks=None):
    """Attention of whole rows, [B, S, H, D]; zero where a token sees nothing."""
    visible = torch.from_numpy(dense(mask, tokens)[:, : tokens.length, : tokens.length])
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        *heads, attn_mask=visible[:, None], scale=scale, enable_gqa=True
    ).transpose(1, 2)
    if sinks is not None:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
        scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        kept = torch.exp(lse - torch.logaddexp(lse, sinks[None, :, None]))
        out = out * kept.transpose(1, 2).unsqueeze(-1)
    return torch.where(visible.any(-1)[:, :, None, None], out, 0)


def numbers(*shape, seed=0, dtype=torch.float64):
    """Normal numbers that require a gradient, the same on every rank."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()
