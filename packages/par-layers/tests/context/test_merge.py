"""Pieces added up: which is the first of a query, in which precision, and what sinks add."""

import pytest
import torch
from torch.nn import functional

from par_layers import Mask, Tokens
from par_layers.context.kernels.choose import choose_kernels
from par_layers.context.merge import spans_in_order
from par_layers.context.modes.gather import GatherOptions, attend, plan_gather
from par_layers.context.modes.ring import RingOptions, attend_ring, plan_ring
from par_layers.context.pieces import AttentionPiece
from par_layers.context.steps import AttentionOptions, Masks, halves, make_work

from .reference import attention, numbers


def whole(length, *documents):
    return Tokens(length, length, (documents or (length,),), (((0, length),),))


def test_the_first_piece_of_each_query_is_copied():
    pieces = [
        AttentionPiece(0, 4, 0, 1, "full"),
        AttentionPiece(2, 6, 1, 2, "full"),
        AttentionPiece(3, 5, 2, 3, "full"),
        AttentionPiece(8, 9, 0, 1, "full"),
    ]
    spans, unseeing = spans_in_order(pieces, 10)
    assert spans == [((0, 4, True),), ((2, 4, False), (4, 6, True)), ((3, 5, False),), ((8, 9, True),)]
    assert unseeing == ((6, 8), (9, 10))


def test_work_is_halved_for_two_times_of_waiting():
    first_key, last_key = Mask(causal=True, window=64).intervals(whole(640))
    (steps,) = make_work(first_key[0], last_key[0], ((0, 640),), [((0, 640),)], block=64).buffers
    first, second = halves(steps)
    assert first + second == steps
    assert 0.8 < sum(step.piece.pairs for step in first) / sum(step.piece.pairs for step in second) < 1.25
    assert halves(()) == ((), ())


CASES = [
    (Mask(), (37,)),
    (Mask(causal=True), (1, 2, 20, 14)),
    (Mask(causal=True, window=7), (37,)),
    (Mask(window=5), (30, 7)),
    (Mask(causal=True, prefix=9), (20, 17)),
    (Mask(causal=True, chunk=10), (37,)),
    (Mask.from_intervals([t - t % 3 for t in range(37)], [min(37, t + t % 5) for t in range(37)]), (37,)),
]
"""The last one has queries that see nothing."""


@pytest.mark.parametrize("kernel", ["auto", "math"])
@pytest.mark.parametrize(("mask", "documents"), CASES, ids=str)
def test_pieces_on_one_rank_are_torchs_attention(mask, documents, kernel):
    q, k, v = (numbers(2, 37, heads, 8, seed=heads) for heads in (4, 2, 2))
    sinks = numbers(4, seed=9)
    tokens = whole(37, *documents)
    how = AttentionOptions(choose_kernels(q, v, kernel, 8), Masks(), 8**-0.5)
    expected = attention(q, k, v, mask, tokens, sinks=sinks)
    upstream = numbers(*q.shape, seed=8).detach()
    gradients = torch.autograd.grad(expected, (q, k, v, sinks), upstream)
    for out in (
        attend(q, k, v, sinks, plan=plan_gather(mask, tokens, 0, 8), how=how, options=GatherOptions("")),
        attend_ring(q, k, v, sinks, plan=plan_ring(mask, tokens, 0, 8), how=how, options=RingOptions("", "")),
    ):
        found = torch.autograd.grad(out, (q, k, v, sinks), upstream)
        for a, b in zip((out, *found), (expected, *gradients), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # sums in another order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_in_eight_parts_are_about_as_exact_as_torchs_own(dtype):
    length, q = 256, numbers(1, 256, 4, 32, seed=1, dtype=dtype)
    k, v = (numbers(1, 256, 2, 32, seed=seed, dtype=dtype) for seed in (2, 3))
    upstream = numbers(1, 256, 4, 32, seed=4, dtype=dtype).detach()
    tokens = whole(length)
    keys = [((a, a + 32),) for a in range(0, 256, 32)]
    first, last = (x[0] for x in Mask(causal=True).intervals(tokens))
    plan = plan_gather(Mask(causal=True), tokens, 0, 32)
    steps = make_work(first, last, ((0, 256),), keys, block=32)
    how = AttentionOptions(choose_kernels(q, v), Masks(), 32**-0.5)
    shifted = [  # each buffer's pieces, as of one buffer with all keys
        type(step)(step.piece._replace(k0=step.piece.k0 + 32 * n, k1=step.piece.k1 + 32 * n), step.spans, step.bounds)
        for n, buffer in enumerate(steps.buffers)
        for step in buffer
    ]
    plan = type(plan)((type(steps)((tuple(shifted), ()), steps.unseeing),), plan.fetch, plan.most)

    def ours():
        return attend(q, k, v, None, plan=plan, how=how, options=GatherOptions(""))

    def torchs():
        return functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = attention(*exact_inputs, Mask(causal=True), tokens)
    exact = (exact, *torch.autograd.grad(exact, exact_inputs, upstream.double()))
    errors = []
    for run in (ours, torchs):
        out = run()
        found = (out, *torch.autograd.grad(out, (q, k, v), upstream))
        errors.append(
            [float((a.double() - b).detach().square().mean().sqrt()) for a, b in zip(found, exact, strict=True)]
        )
    for mine, theirs in zip(*errors, strict=True):
        assert mine <= 1.5 * theirs  # keys in 8 parts are rounded 8 times, where torch rounds once
