"""Kernels: one piece of each kind, their choice, and what torch's own would end the process for."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from par_layers import _torch_private
from par_layers.context.kernels.choose import choose_kernels
from par_layers.context.kernels.flash import CpuFlash, CudaEfficient, CudaFlash
from par_layers.context.kernels.kernel import Visible
from par_layers.context.kernels.plain import Math
from par_layers.context.pieces import AttentionPiece
from par_layers.context.steps import Masks, PieceStep

from .reference import numbers


def visible(kind, queries, keys):
    q, k = torch.arange(queries)[:, None], torch.arange(keys)
    return {
        "full": torch.ones(queries, keys, dtype=torch.bool),
        "causal": k <= q + keys - queries,
        "anti": k >= q,
        "band": (k >= q // 2) & (k < q // 2 + 3),
    }[kind]


def bias(kind, queries, keys, like):
    bounds = None
    if kind == "band":
        first = torch.arange(queries) // 2
        bounds = torch.stack([first, (first + 3).clamp_max(keys)]).numpy()
    return Masks().of(PieceStep(AttentionPiece(0, queries, 0, keys, kind), (), bounds), like)


@pytest.mark.parametrize("kernel", [CpuFlash(), Math(512), Math(3)], ids=["flash", "math", "math in blocks"])
@pytest.mark.parametrize("kind", ["full", "causal", "anti", "band"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_a_piece_is_torchs_attention(kernel, kind, key_heads):
    queries, keys = (17, 17) if kind != "full" else (11, 17)
    q = numbers(2, 40, 4, 8, seed=1)[:, 5 : 5 + queries]  # views, as pieces are
    k, v = (numbers(2, 40, key_heads, 8, seed=seed)[:, 7 : 7 + keys] for seed in (2, 3))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible(kind, queries, keys), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    upstream = numbers(*expected.shape, seed=4).detach()
    gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    mask = bias(kind, queries, keys, q) if kind in kernel.biased else None
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, visible=Visible(kind, mask), scale=0.3)
        found = kernel.backward(upstream, q, k, v, out, lse, visible=Visible(kind, mask), scale=0.3)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(4 // key_heads, 2)) * 0.3
        sums = scores.masked_fill(~visible(kind, queries, keys), -torch.inf).logsumexp(-1)
    for a, b in zip((out, lse, *found), (expected, sums, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)  # sums in another order


def test_plain_products_take_values_of_another_head_size():
    q, k, v = numbers(1, 5, 2, 4, seed=1), numbers(1, 5, 2, 4, seed=2), numbers(1, 5, 2, 6, seed=3)
    assert choose_kernels(q, v).plain.name == "math"
    out, _ = Math().forward(q, k, v, visible=Visible("causal"), scale=0.5)
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=0.5
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)  # sums in another order


@pytest.mark.parametrize("kernel", [CpuFlash(), CudaFlash(), CudaEfficient()], ids=lambda kernel: kernel.name)
def test_what_torch_would_die_of_or_take_without_a_word_is_refused(kernel):
    q, k = torch.zeros(1, 4, 6, 8), torch.zeros(1, 4, 4, 8)
    with pytest.raises(ValueError, match="without queries or keys"):
        kernel.forward(q, k[:, :0], k[:, :0], visible=Visible("full"), scale=1.0)
    with pytest.raises(ValueError, match="6 heads do not divide by 4 key heads"):
        kernel.forward(q, k, k, visible=Visible("full"), scale=1.0)


def test_a_query_that_sees_nothing_gets_zero_from_torch_and_not_minus_infinity():
    hidden = torch.full((4, 4), -torch.inf)
    q = torch.zeros(1, 1, 4, 8)
    _, lse = _torch_private.flash_attention_on_cpu(q, q, q, attn_mask=hidden)
    assert lse.tolist() == [[[0.0] * 4]]  # so pieces hold no query that sees nothing


@pytest.mark.parametrize(
    ("device", "dtype", "head", "value_head", "plain", "masked"),
    [
        ("cpu", torch.float64, 8, 8, "cpu flash", "cpu flash"),
        ("cpu", torch.bfloat16, 8, 8, "cpu flash", "cpu flash"),
        ("cpu", torch.float32, 8, 4, "math", "math"),
        ("cuda", torch.bfloat16, 64, 64, "cuda flash", "cuda efficient"),
        ("cuda", torch.float16, 256, 256, "cuda flash", "cuda efficient"),
        ("cuda", torch.bfloat16, 512, 512, "cuda efficient", "cuda efficient"),
        ("cuda", torch.bfloat16, 12, 12, "math", "math"),
        ("cuda", torch.float32, 64, 64, "cuda efficient", "cuda efficient"),
        ("cuda", torch.float64, 64, 64, "math", "math"),
        ("mps", torch.float32, 64, 64, "math", "math"),
    ],
)
def test_kernels_are_chosen_by_device_dtype_and_head_size(device, dtype, head, value_head, plain, masked):
    q, v = (
        SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 8, 2, size)) for size in (head, value_head)
    )
    chosen = choose_kernels(q, v)
    assert [chosen.of(kind).name for kind in ("full", "causal", "band")] == [plain, plain, masked]
    assert chosen.of("anti").name == ("cuda flash" if plain == "cuda flash" else masked)
    assert choose_kernels(q, v, "math").of("full").name == "math"


@pytest.mark.parametrize("kernel", [CudaFlash(), CudaEfficient()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("kind", ["full", "causal", "anti", "band"])
def test_operators_of_gpus_are_called_as_torch_wants_them(kernel, kind):
    q = torch.empty(2, 40, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 40, 2, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(40, 40, dtype=torch.bfloat16, device="meta") if kind in kernel.biased else None
    if kernel.name == "cuda flash" and kind == "band":
        with pytest.raises(ValueError, match="takes no additive mask"):
            kernel.forward(q, k, k, visible=Visible(kind, mask), scale=0.1)
        return
    out, lse = kernel.forward(q, k, k, visible=Visible(kind, mask), scale=0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 8, 40), torch.float32)
    found = kernel.backward(q, q, k, k, out, lse, visible=Visible(kind, mask), scale=0.1)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
