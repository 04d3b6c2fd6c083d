"""What a kernel joins in one call: the calls that a plan makes, on no device, and their numbers, by plain products.

`flash` stands for the operator of CUDA; on a GPU tests-integration/gpu compares the operator itself.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from par_groups import ProcessGroups, Topology
from par_layers import Context, Mask, Tokens
from par_layers.context.balance import cut_tokens
from par_layers.context.kernels import flash as flash_kernels
from par_layers.context.kernels.choose import Kernels, choose_kernels
from par_layers.context.kernels.flash import CpuFlash, CudaFlash
from par_layers.context.merge import RunningSoftmax, empty_sum
from par_layers.context.modes import attention as attention_module
from par_layers.context.modes.gather import GatherOptions, attend, plan_gather
from par_layers.context.modes.ring import plan_ring
from par_layers.context.pieces import AttentionPiece, pieces
from par_layers.context.steps import AttentionOptions, Gradient, Keys, Masks, Queries
from par_testing import storm

from . import flash
from .dense import cut_rows, dense
from .reference import numbers
from .test_modes import MODES, STEPS, S, compare

EVERYTHING = CudaFlash.joins


def of_one_rank(mask, *documents):
    length = sum(documents)
    tokens = Tokens(length, length, (documents,), (((0, length),),))
    first, last = mask.intervals(tokens)
    return pieces(first[0], last[0], tokens.runs[0], tokens.runs[0], joins=EVERYTHING)


def test_a_packed_row_is_one_piece():
    lengths = (2, 3, 5, 6) * 100
    square = tuple((length, length) for length in lengths)
    assert of_one_rank(Mask(causal=True), *lengths) == [AttentionPiece(0, 1600, 0, 1600, "causal", None, square)]
    assert of_one_rank(Mask(), *lengths) == [AttentionPiece(0, 1600, 0, 1600, "full", None, square)]
    assert of_one_rank(Mask(causal=True, window=4), *lengths) == [AttentionPiece(0, 1600, 0, 1600, "window", 3, square)]
    assert of_one_rank(Mask(causal=True, window=4), 2, 4, 3, 1) == [
        AttentionPiece(
            0, 10, 0, 10, "causal", None, ((2, 2), (4, 4), (3, 3), (1, 1))
        )  # no document is longer than the window
    ]
    assert of_one_rank(Mask(causal=True, chunk=10), 25, 5) == [
        AttentionPiece(0, 30, 0, 30, "causal", None, ((10, 10), (10, 10), (5, 5), (5, 5)))
    ]


def test_a_window_is_one_piece_from_the_first_token_on():
    assert of_one_rank(Mask(causal=True, window=64), 300) == [AttentionPiece(0, 300, 0, 300, "window", 63)]
    assert of_one_rank(Mask(causal=True, window=64), 65) == [AttentionPiece(0, 65, 0, 65, "window", 63)]
    assert of_one_rank(Mask(causal=True, window=1), 300) == [AttentionPiece(0, 300, 0, 300, "window", 0)]
    assert of_one_rank(Mask(window=64), 300) == [
        AttentionPiece(0, 237, 0, 300, "window", 126),
        AttentionPiece(237, 300, 174, 300, "anti"),
    ]


def test_documents_of_another_kind_are_pieces_of_their_own():
    prefix = of_one_rank(Mask(causal=True, prefix=40), 40, 40, 100)
    assert prefix == [
        AttentionPiece(0, 120, 0, 120, "full", None, ((40, 40), (40, 40), (40, 40))),
        AttentionPiece(120, 180, 80, 180, "causal"),
    ]


class Calls(TorchDispatchMode):
    """Writes down which kernels are called, with which shapes and flags."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if "attention" in name:
            given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}
            given |= kwargs or {}
            said = [name.removeprefix("_scaled_dot_product").removeprefix("_")]
            said += ["x".join(map(str, given[tensor].shape)) for tensor in ("query", "key")]
            if (documents := given.get("cum_seq_q")) is not None:
                said.append(f"{len(documents) - 1} documents of {given['max_q']}, {given['max_k']} at most")
            said += ["causal"] * given.get("is_causal", False)
            window = [given.get(f"window_size_{side}") for side in ("left", "right")]
            said += [] if window == [None, None] else [f"window {window[0]}, {window[1]}"]
            if (bias := given.get("attn_bias", given.get("attn_mask"))) is not None:
                said.append("mask " + "x".join(map(str, bias.shape)))
            self.made.append(" | ".join(said))
        return func(*args, **(kwargs or {}))


def calls(mask, tokens, rank, *, mode="gather", dtype=torch.bfloat16, head=64, device="cuda"):
    """The kernels that a rank calls as on a GPU, for 1 row, 4 heads and 2 key heads: tensors have no memory."""
    like = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, tokens.local, 4, head))
    chosen = choose_kernels(like, like)
    plan = (plan_ring if mode == "ring" else plan_gather)(mask, tokens, rank, 512, chosen.joins)
    how, (work,) = AttentionOptions(chosen, Masks(), 0.125), plan.works
    fetched = [] if mode == "ring" else [sum(stop - start for start, stop in plan.fetch.keys[0])]
    sizes = [tokens.local] * len(work.buffers) if mode == "ring" else [tokens.local, *fetched]
    q = torch.empty(1, tokens.local, 4, head, dtype=dtype, device="meta")
    out, lse = empty_sum(q, head)
    found = []
    for backward in (False, True):
        with Calls() as seen:
            for steps, size in zip(work.buffers, sizes, strict=True):
                k = torch.empty(1, size, 2, head, dtype=dtype, device="meta")
                if not backward:
                    how.forward(steps, q, k, k, RunningSoftmax(out, lse, work.unseeing))
                    continue
                dq, dk, dv = (Gradient(torch.empty(x.shape, device="meta")) for x in (q, k, k))
                how.backward(steps, Queries(q, q, out.to(dtype), lse, dq), Keys(k, k, dk, dv))
        found.append([call.replace("_forward", "").replace("_backward", "") for call in seen.made])
    assert found[0] == found[1]  # of backward as of forward
    return found[0]


CAUSAL, WINDOW, PACKED = Mask(causal=True), Mask(causal=True, window=100), (300, 5, 7, 712)
UNEVEN = Mask.from_intervals([0] * 1024, [1 + t // 300 * 100 + t % 3 for t in range(1024)])
GOLDEN = {
    ("contiguous", "gather", 1, CAUSAL, (1024,)): """
        flash_attention | 1x512x4x64 | 1x512x2x64 | causal
        flash_attention | 1x512x4x64 | 1x512x2x64
    """,
    ("zigzag", "ring", 0, CAUSAL, (1024,)): """
        flash_attention | 1x512x4x64 | 1x512x2x64 | causal
        flash_attention | 1x256x4x64 | 1x512x2x64
    """,
    ("contiguous", "gather", 1, WINDOW, (1024,)): """
        flash_attention | 1x512x4x64 | 1x512x2x64 | window 99, 0
        flash_attention | 1x99x4x64 | 1x99x2x64 | window 0, None
    """,
    ("contiguous", "gather", 0, Mask(window=100), (1024,)): """
        flash_attention | 1x413x4x64 | 1x512x2x64 | window 198, 0
        flash_attention | 1x99x4x64 | 1x198x2x64 | window 99, None
        flash_attention | 1x99x4x64 | 1x99x2x64 | causal
    """,
    ("contiguous", "gather", 0, CAUSAL, PACKED): """
        flash_attention | 512x4x64 | 512x2x64 | 4 documents of 300, 300 at most | causal
    """,
    ("contiguous", "gather", 1, CAUSAL, PACKED): """
        flash_attention | 1x512x4x64 | 1x512x2x64 | causal
        flash_attention | 1x512x4x64 | 1x200x2x64
    """,
    ("zigzag", "ring", 1, WINDOW, PACKED): """
        flash_attention | 512x4x64 | 512x2x64 | 4 documents of 456, 456 at most | window 99, 0
        flash_attention | 1x44x4x64 | 1x99x2x64 | window 55, None
    """,
    ("contiguous", "gather", 0, UNEVEN, (1024,)): """
        efficient_attention | 1x4x256x64 | 1x4x3x64 | mask 1x4x256x3
        efficient_attention | 1x4x256x64 | 1x4x103x64 | mask 1x4x256x103
    """,
    ("contiguous", "gather", 1, Mask(causal=True, window=64), (256,), torch.float32): """
        efficient_attention | 1x4x64x64 | 1x4x64x64 | causal
        efficient_attention | 1x4x64x64 | 1x4x64x64 | mask 1x4x64x64
        efficient_attention | 1x4x63x64 | 1x4x63x64 | causal
        efficient_attention | 1x4x63x64 | 1x4x63x64 | mask 1x4x63x63
    """,
    ("contiguous", "gather", 0, CAUSAL, (256,), torch.bfloat16, 512): """
        efficient_attention | 1x4x128x512 | 1x4x128x512 | causal
    """,
    ("contiguous", "gather", 0, CAUSAL, (256,), torch.float64): "",  # plain products
    ("contiguous", "gather", 1, CAUSAL, (20, 200), torch.bfloat16, 64, "cpu"): """
        flash_attention_for_cpu | 1x4x110x64 | 1x2x110x64 | causal
        flash_attention_for_cpu | 1x4x110x64 | 1x2x90x64
    """,
}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: ", ".join(map(str, case)))
def test_calls_of_a_plan(case):
    cut, mode, rank, mask, documents, *more = case
    tokens = cut_tokens(sum(documents), 2, cut, documents=documents)
    options = dict(zip(("dtype", "head", "device"), more, strict=False))
    assert calls(mask, tokens, rank, mode=mode, **options) == [
        line.strip() for line in GOLDEN[case].strip().splitlines()
    ]


TYPICAL = [  # mask, documents, key heads, length: of `compare`
    (Mask(causal=True), [3, 1, 2, 20, 11], 2, S),
    (Mask(), [1, 2, 20, 14], 1, S),
    (Mask(causal=True, window=7), [[37], [30, 7]], 4, S),
    (Mask(causal=True, window=7), [5, 7, 1, 1, 12, 11], 2, S),
    (Mask(window=4), [20, 17], 2, S),
    (Mask(causal=True, prefix=9), [20, 17], 4, S),
    (Mask(causal=True, chunk=10), None, 4, S),
    (STEPS, None, 2, S),
]


def by_joined_pieces(monkeypatch):
    """Lets `Context` compute by the kernel of GPUs, whose operator is replaced; what that cannot, as ever."""
    monkeypatch.setattr(flash_kernels, "flash_attention", flash.forward)
    monkeypatch.setattr(flash_kernels, "flash_attention_backward", flash.backward)
    monkeypatch.setattr(attention_module, "choose_kernels", lambda *_: Kernels(CudaFlash(), CpuFlash()))


@pytest.mark.ranks([storm(1), 2, pytest.param(4, marks=pytest.mark.storm)])
def test_joined_pieces_are_attention_of_one_device():
    world = dist.get_world_size()
    with pytest.MonkeyPatch.context() as monkeypatch:
        by_joined_pieces(monkeypatch)
        for config in MODES[world]:
            with ProcessGroups(Topology.from_config({"sequence": {"size": world, **config}}, world)) as groups:
                for case in TYPICAL:
                    compare(Context(groups, block=16), *case)


@settings(max_examples=40)
@given(cut_rows(), st.integers(1, 2))
def test_joined_pieces_of_any_row_are_attention(row, batch):
    """Whole rows on one rank: the output and all gradients."""
    cut, mask = row
    tokens = Tokens(cut.length, cut.padded, cut.documents, (((0, cut.padded),),))
    number = len(tokens.documents)
    rows = number if number > 1 else batch
    q, k, v = (numbers(rows, tokens.padded, heads, 4, seed=heads) for heads in (4, 2, 2))
    visible = torch.from_numpy(dense(mask, tokens)).expand(rows, -1, -1)[:, None]
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible, enable_gqa=True
    ).transpose(1, 2)
    expected = torch.where(visible.any(-1).transpose(1, 2)[..., None], expected, 0)
    upstream = numbers(*q.shape, seed=8).detach()
    with pytest.MonkeyPatch.context() as monkeypatch:
        by_joined_pieces(monkeypatch)
        how = AttentionOptions(Kernels(CudaFlash(), CpuFlash()), Masks(), 0.5)
        plan = plan_gather(mask, tokens, 0, 16, EVERYTHING)
        out = attend(q, k, v, None, plan=plan, how=how, options=GatherOptions(""))
        found = torch.autograd.grad(out, (q, k, v), upstream)
    gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    for a, b in zip((out, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # sums in another order
