"""Attention over cut sequences on a GPU: each kernel beside plain products, what it joins, and no wait of the host."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import Context, Mask, Tokens
from par_layers.context.kernels.flash import CudaEfficient, CudaFlash
from par_layers.context.kernels.kernel import Visible
from par_layers.context.kernels.plain import Math
from par_layers.context.pieces import AttentionPiece
from par_layers.context.steps import Masks, PieceStep
from par_testing import accelerator_type

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]
of_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="kernels of CUDA")

FLASH = [
    AttentionPiece(0, 200, 0, 300, "full"),
    AttentionPiece(0, 200, 0, 200, "causal"),
    AttentionPiece(0, 200, 0, 300, "causal"),  # aligned at the bottom right
    AttentionPiece(0, 200, 0, 200, "anti"),
    AttentionPiece(0, 200, 0, 300, "anti"),
    AttentionPiece(0, 200, 0, 300, "window", 100),
    AttentionPiece(0, 300, 0, 300, "window", 64),  # the first queries have no whole window
    AttentionPiece(0, 300, 0, 300, "causal", None, ((1, 1), (2, 2), (197, 197), (100, 100))),
    AttentionPiece(0, 200, 0, 300, "causal", None, ((100, 200), (100, 100))),
    AttentionPiece(0, 300, 0, 300, "full", None, ((1, 1), (2, 2), (297, 297))),
    AttentionPiece(0, 300, 0, 300, "window", 31, ((10, 10), (290, 290))),
]
EFFICIENT = [*FLASH[:2], FLASH[3], AttentionPiece(0, 100, 0, 77, "band")]


def dense(piece):
    """Which pairs of a piece are visible, bool [Q, K], from what its kind says."""
    result = np.zeros((piece.q1 - piece.q0, piece.k1 - piece.k0), bool)
    q = k = 0
    for queries, keys in piece.lengths or (result.shape,):
        query, key = np.arange(queries)[:, None], np.arange(keys)[None]
        aligned = query + keys - queries
        result[q : q + queries, k : k + keys] = {
            "full": key >= 0,
            "causal": key <= aligned,
            "anti": key >= query,
            "window": (key <= aligned) & (key >= aligned - (piece.left or 0)),
            "band": (key >= query // 2) & (key < query // 2 + 3),
        }[piece.kind]
        q, k = q + queries, k + keys
    return torch.from_numpy(result)


def numbers(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@of_cuda
@pytest.mark.parametrize(
    ("kernel", "dtype", "piece"),
    [
        *((CudaFlash(), dtype, piece) for dtype in (torch.bfloat16, torch.float16) for piece in FLASH),
        *((CudaEfficient(), dtype, piece) for dtype in (torch.bfloat16, torch.float32) for piece in EFFICIENT),
    ],
    ids=lambda value: getattr(value, "name", str(value)),  # an address would differ between workers
)
def test_a_piece_is_that_of_plain_products(kernel, dtype, piece):
    batch, queries, keys = 2, piece.q1 - piece.q0, piece.k1 - piece.k0
    q, upstream = (numbers(batch, queries, 4, 64, seed=seed, dtype=dtype) for seed in (1, 2))
    k, v = (numbers(batch, keys, 2, 64, seed=seed, dtype=dtype) for seed in (3, 4))
    bounds = None
    if piece.kind == "band":
        first = np.arange(queries) // 2
        bounds = np.stack([first, np.minimum(first + 3, keys)])
    visible = Masks().visible(PieceStep(piece, (), bounds), q, biased=piece.kind in kernel.biased)
    hidden = torch.zeros(queries, keys, device=DEVICE).masked_fill(~dense(piece).to(DEVICE), -torch.inf)
    found, exact = [], []
    for run, told, cast, results in (
        (kernel, visible, dtype, found),
        (Math(), Visible("band", hidden), torch.float32, exact),
    ):
        given = [x.to(cast) for x in (q, k, v)]
        out, lse = run.forward(*given, visible=told, scale=0.2)
        results.extend([out, lse, *run.backward(upstream.to(cast), *given, out, lse, visible=told, scale=0.2)])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, exact, strict=True):
        # Rounded weights: 8 or 11 bits of the largest terms; float32 multiplies in TF32 at most.
        error = (a.float() - b).norm() / b.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), (name, float(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_masks_and_documents_are_those_of_plain_products(dtype):
    context, plain = Context(None), Context(None, kernel="math")
    q, k, v = (numbers(2, 700, heads, 64, seed=heads, dtype=dtype).requires_grad_() for heads in (8, 2, 2))
    steps = Mask.from_intervals(
        [max(0, t - 3 * (t % 3)) for t in range(700)], [min(700, t + t % 5) for t in range(700)]
    )
    for mask in (Mask(), Mask(causal=True), Mask(causal=True, window=90), Mask(window=50), steps):
        for documents in (None, [3, 97, 1, 99, 500], [[700], [350, 350]]):
            tokens = context.tokens(700, documents=documents)
            results = []
            for each in (context, plain):
                out = each.attention(q, k, v, tokens, mask=mask)
                results.append((out, *torch.autograd.grad(out, (q, k, v), out.detach())))
            for a, b in zip(*results, strict=True):
                error = (a - b).detach().norm() / b.detach().norm().clamp_min(1e-6)
                # Both round; bfloat16 has 8 bits, float32 is multiplied in TF32 at most.
                assert error < {torch.bfloat16: 2e-2, torch.float32: 2e-3}.get(dtype, 1e-12), (mask, documents)


def test_the_host_waits_for_nothing_after_the_first_step():
    context = Context(None)
    q, k, v = (numbers(1, 512, heads, 64, seed=heads).requires_grad_() for heads in (8, 2, 2))
    tokens = Tokens(512, 512, ((200, 12, 300),), (((0, 512),),))
    module = torch.get_device_module(DEVICE)
    mode = module.get_sync_debug_mode()
    try:
        for debug in ("default", "error"):
            module.set_sync_debug_mode(debug)
            for mask in (Mask(causal=True), Mask(causal=True, window=30), Mask(window=9)):
                context.attention(q, k, v, tokens, mask=mask).sum().backward()
    finally:
        module.set_sync_debug_mode(mode)


@pytest.mark.ranks(2, timeout=120)
def test_ranks_that_share_a_gpu_have_the_gradients_of_the_cpu():
    results = []
    for device in ("cpu", DEVICE):
        found = []
        for mode in ("gather", "ring", "ulysses"):
            topology = Topology.from_config({"sequence": {"size": 2, "mode": mode}}, dist.get_world_size())
            with ProcessGroups(topology, device="cpu") as groups:
                context = Context(groups)
                parts = (
                    torch.randn(2, 300, heads, 64, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2)
                )
                (q, k), tokens = context.cut(tuple(parts), documents=[[300], [101, 199]], pad=True)
                q, k = (x.to(device).requires_grad_() for x in (q, k))
                out = context.attention(q, k, k, tokens, mask=Mask(causal=True, window=40))
                found += [out.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(out.square().sum(), (q, k)))]
        results.append(found)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)  # products in TF32 at most, sums in another order
