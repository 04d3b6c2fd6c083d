"""FlashAttention of CUDA in plain products, with its arguments and what they mean there, for any device and dtype.

Causal masks and windows are aligned at the bottom right: with Q queries and K keys, query i is aligned with key
i + K - Q, and sees `window_size_left` keys before it and `window_size_right` after it; None is all. With cumulated
lengths tensors are [tokens, heads, D], and each document is by itself.
"""

import torch


def forward(  # noqa: PLR0917 - the operator's signature
    q, k, v, cum_q, cum_k, most_q, most_k, dropout, is_causal, debug, *, scale, **window
):
    assert (dropout, debug) == (0.0, False)
    if cum_q is None:
        assert (most_q, most_k) == (q.shape[1], k.shape[1])
        out, lse = _forward(q, k, v, is_causal, scale, **window)
        return out, lse, None, None, None
    parts = [
        _forward(q[a][None], k[b][None], v[b][None], is_causal, scale, **window)
        for a, b in _documents(cum_q, cum_k, most_q, most_k)
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1), None, None, None


def backward(  # noqa: PLR0917 - the operator's signature
    gradient, q, k, v, out, lse, cum_q, cum_k, most_q, most_k, dropout, is_causal, seed, offset, *, scale, **window
):
    assert dropout == 0.0
    assert lse.is_contiguous()
    if cum_q is None:
        return _backward((gradient, q, k, v, out, lse), is_causal, scale, **window)
    parts = []
    for a, b in _documents(cum_q, cum_k, most_q, most_k):
        one = (gradient[a][None], q[a][None], k[b][None], v[b][None], out[a][None], lse[None, :, a])
        parts.append(_backward(one, is_causal, scale, **window))
    return tuple(torch.cat([each[0] for each in of]) for of in zip(*parts, strict=True))


def _documents(cum_q, cum_k, most_q, most_k):
    assert (cum_q.dtype, cum_k.dtype) == (torch.int32, torch.int32)
    assert (int(cum_q.diff().max()), int(cum_k.diff().max())) == (most_q, most_k)
    ends = [[slice(*each) for each in zip(x[:-1].tolist(), x[1:].tolist(), strict=True)] for x in (cum_q, cum_k)]
    return list(zip(*ends, strict=True))


def _scores(q, k, is_causal, scale, window_size_left=None, window_size_right=None):
    queries, keys = q.shape[1], k.shape[1]
    aligned = torch.arange(queries)[:, None] + keys - queries
    place = torch.arange(keys)
    right = 0 if is_causal else window_size_right
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if window_size_left is not None:
        visible &= place >= aligned - window_size_left
    if right is not None:
        visible &= place <= aligned + right
    assert visible.any(1).all()  # a kernel would give NaN
    grouped = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return (torch.einsum("bqhd,bkhd->bhqk", q, grouped) * scale).masked_fill(~visible, -torch.inf)


def _forward(q, k, v, is_causal, scale, **window):
    scores = _scores(q, k, is_causal, scale, **window)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(q.shape[2] // v.shape[2], 2))
    return out, scores.logsumexp(-1)


def _backward(tensors, is_causal, scale, **window):
    gradient, q, k, v, out, lse = tensors
    shared = q.shape[2] // k.shape[2]
    weights = torch.exp(_scores(q, k, is_causal, scale, **window) - lse[..., None])
    values = v.repeat_interleave(shared, 2)
    delta = torch.einsum("bqhd,bqhd->bhq", gradient, out)[..., None]
    of_scores = weights * (torch.einsum("bqhd,bkhd->bhqk", gradient, values) - delta) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", of_scores, k.repeat_interleave(shared, 2))
    dk = torch.einsum("bhqk,bqhd->bkhd", of_scores, q)
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, gradient)
    return dq, *(x.unflatten(2, (-1, shared)).sum(3) for x in (dk, dv))
