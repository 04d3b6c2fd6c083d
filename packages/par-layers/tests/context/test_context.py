"""A context cuts batches and says where tokens are, and refuses on every rank, before it sends, what does not fit."""

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import Context, Mask
from par_testing import count_collectives

from .reference import attention, numbers

IGNORED = -100


def live(config):
    world = dist.get_world_size()
    return ProcessGroups(Topology.from_config({"sequence": {"size": world, **config}}, world))


@pytest.mark.ranks(2)
def test_a_batch_is_cut_shifted_and_padded():
    with live({"split": "zigzag"}) as groups:
        context = Context(groups)
        ids = torch.arange(20, 27).expand(2, 7)
        batch = {
            "ids": ids,
            "targets": ids,
            "labels": ids,
            "image": torch.ones(2, 3, 7),
            "names": ["a", "b"],
            "size": torch.ones(2),
        }
        cut, tokens = context.cut(
            batch, documents=[[7], [3, 4]], shift=("targets",), dims={"image": 2, "size": None}, pad=True
        )
        assert tokens.runs == (((0, 2), (6, 8)), ((2, 6),))
        mine = dist.get_rank() == 0
        assert cut["ids"].tolist() == ([[20, 21, 26, 0]] * 2 if mine else [[22, 23, 24, 25]] * 2)
        assert cut["labels"].tolist() == ([[20, 21, 26, IGNORED]] * 2 if mine else [[22, 23, 24, 25]] * 2)
        assert cut["targets"].tolist() == (
            [[21, 22, IGNORED, IGNORED]] * 2 if mine else [[23, 24, 25, 26], [IGNORED, 24, 25, 26]]
        )
        assert cut["image"].shape == (2, 3, 4)
        assert (cut["names"], cut["size"].tolist()) == (["a", "b"], [1, 1])
        assert context.positions(tokens).tolist() == (
            [[0, 1, 6, 0], [0, 1, 3, 0]] if mine else [[2, 3, 4, 5], [2, 0, 1, 2]]
        )
        assert torch.equal(context.gather(cut["ids"], tokens), ids)
        assert torch.equal(context.gather(cut["image"], tokens, dim=-1), batch["image"])
        pair, _ = context.cut((ids, ids), pad=True)
        assert [x[0, -1].item() for x in pair] == ([0, IGNORED] if mine else [25, 25])


@pytest.mark.ranks(2)
def test_the_mean_of_gradients_over_ranks_is_that_of_one_device():
    with live({}) as groups:
        context = Context(groups)
        weight, whole = numbers(3), numbers(1, 8, 3, seed=1).detach()
        (mine,), tokens = context.cut((whole,))
        for loss in (
            context.sum((mine * weight).square().sum()) / 8,
            context.gather(mine * weight, tokens).square().sum() / 8,
        ):
            expected = (whole * weight).square().sum() / 8
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-14)  # sums in another order
            (found,), (there,) = (torch.autograd.grad(x, weight) for x in (loss, expected))
            dist.all_reduce(found)
            torch.testing.assert_close(found / 2, there, rtol=0, atol=1e-14)  # sums in another order


def test_one_device_takes_documents_too():
    context = Context(None)
    q, k, v = (numbers(2, 12, heads, 8, seed=heads) for heads in (4, 2, 2))
    parts, tokens = context.cut((q, k, v), documents=[[12], [5, 7]])
    assert all(torch.equal(a, b) for a, b in zip(parts, (q, k, v), strict=True))
    mask = Mask(causal=True, window=4)
    expected = attention(q, k, v, mask, tokens)
    torch.testing.assert_close(context.attention(q, k, v, tokens, mask=mask), expected, rtol=0, atol=1e-13)  # order


def test_plans_are_made_once_for_a_batch_and_a_mask():
    context, x = Context(None), torch.zeros(1, 4, 2, 8)
    for mask in (Mask(), Mask(causal=True), Mask()):
        for _ in range(3):
            context.attention(x, x, x, mask=mask)
    assert context._attend.plan.cache_info().misses == 2


@pytest.mark.ranks(2)
def test_ranks_that_cut_differently_all_raise():
    with live({}) as groups:
        context, rank = Context(groups), dist.get_rank()
        ids = torch.zeros(1, 16, dtype=torch.int64)
        documents, masks = [[8, 8], [4, 12]][rank], (Mask(causal=bool(rank)),)
        for one in (lambda: context.cut((ids[:, : 8 + 8 * rank],)), lambda: context.cut((ids,), documents=documents)):
            with pytest.raises(
                ValueError, match=r"rank 1 has other tokens than rank 0 \(rank 1: 1 rows, .*; rank 0: 1"
            ):
                one()
        with pytest.raises(ValueError, match=r"masks \(Mask\(causal=True\),\); .*masks \(Mask\(\),\)"):
            context.cut((ids,), masks=masks)
        with pytest.raises(
            ValueError, match=r"rank 1: 1 rows, .* integers that add up to 16; rank 0: .* add up to 0\)"
        ):
            context.cut((ids + rank, ids.double()))  # other samples, or a part of them that was cut before
        wrong = r"documents \[8, 7\] have 15 tokens together, but the row has 16"
        with pytest.raises(ValueError, match=wrong if rank else f"rank 1: ValueError: {wrong}"):
            context.cut((ids,), documents=[8, 8 - rank])
        assert context.cut((ids,))[1].local == 8


BATCHES = [
    ({"batch": {"ids": torch.zeros(1, 15)}}, "length 15 does not divide by 2 ranks.*; use 16, or pad=True"),
    ({"batch": {"a": torch.zeros(1, 16), "b": torch.zeros(1, 8)}}, "different lengths: {'a': 16, 'b': 8}"),
    ({"batch": {"a": torch.zeros(16)}}, "'a' is .16. and has no dim 1 of tokens; name it, dims={'a': ...}"),
    ({"batch": {"a": "text"}}, "no tensor of the batch has tokens"),
    ({"batch": {"a": torch.zeros(1, 16)}, "shift": ("b",)}, "there is no 'b' in the batch; it has .'a'."),
    ({"batch": {"a": torch.zeros(1, 16)}, "dims": {"a": None}, "shift": ("a",)}, "'a' cannot be shifted"),
    ({"batch": (torch.zeros(3, 16),), "documents": [[16], [8, 8]]}, "documents are of 2 rows, but the batch has 3"),
    ({"batch": (torch.zeros(1, 16),), "documents": [16, 0]}, "documents must have 1 token at least"),
]


@pytest.mark.ranks(2)
def test_batches_that_cannot_be_cut_are_refused():
    with live({"split": "zigzag"}) as groups:
        for arguments, message in BATCHES:
            with pytest.raises(ValueError, match=message):
                Context(groups).cut(**arguments)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


X = zeros(1, 8, 4, 8)
CALLS = [
    ((zeros(8, 4, 8), X, X), {}, "q must have four dims"),
    (
        (X, zeros(1, 4, 4, 8), X),
        {},
        r"q is \[1, 8\] and k \[1, 4\] in rows and tokens; they must be of the same tokens",
    ),
    ((X, X, zeros(1, 8, 4, 8, dtype=torch.float64)), {}, "q is torch.float32 on cpu, v torch.float64 on cpu"),
    ((X, zeros(1, 8, 4, 4), X), {}, "heads do not fit"),
    ((X, zeros(1, 8, 3, 8), zeros(1, 8, 3, 8)), {}, "heads 4 are not a multiple of key heads 3"),
    ((X, X, X), {"sinks": torch.zeros(3)}, r"sinks must be one number a head, \[4\]; they are \[3\]"),
    ((X, X, X), {"mask": torch.ones(8, 8)}, "mask must be a par_layers Mask, it is Tensor; masks of pairs are not"),
    ((X, X, X), {"scale": 0.0}, "scale is 0.0; it must be a positive number"),
    ((X, X, X), {"tokens": "16"}, "tokens must be Tokens, as `cut` gives them; they are str"),
    ((X[:, :5],) * 3, {"tokens": (16, None)}, "tokens are 8 a rank, q has 5; cut the batch with the same tokens"),
    (
        (X, X, X),
        {"tokens": (16, [[16], [8, 8]])},
        "tokens have documents for 2 rows, q has 1; take a part of them by tokens.rows",
    ),
]


@pytest.mark.ranks(2)
def test_attention_of_what_does_not_fit_is_refused_before_anything_is_sent():
    with live({}) as groups:
        context = Context(groups)
        for arguments, keywords, message in CALLS:
            given = dict(keywords)
            if isinstance(given.get("tokens"), tuple):
                length, documents = given["tokens"]
                given["tokens"] = context.tokens(length, documents=documents)
            with count_collectives() as counted, pytest.raises(ValueError, match=message):
                context.attention(*arguments, **given)
            assert not counted.calls()
        with pytest.raises(ValueError, match="tokens are cut over 1 ranks, but the context has 2"):
            context.attention(X, X, X, Context(None).tokens(8))
        with pytest.raises(ValueError, match="tokens are 8 a rank, x has 5 along dim 1"):
            context.gather(X[:, :5], context.tokens(16))


@pytest.mark.ranks(4)
def test_heads_that_do_not_divide_by_the_ranks_of_ulysses_are_refused():
    x = zeros(1, 8, 6, 8)
    with live({"mode": "ulysses"}) as groups:
        message = "heads 6 do not divide by 4 ranks of ulysses; use mode 'ring' or 'gather', or '2d' with ulysses=2"
        with pytest.raises(ValueError, match=message):
            Context(groups).attention(x, x, x)


@pytest.mark.ranks(2)
def test_contexts_that_the_topology_has_not_are_refused():
    with live({}) as groups:
        for options, message in [
            ({"mode": "rings"}, "mode is 'rings'; it must be one of 'gather', 'ring', 'ulysses', '2d'"),
            (
                {"mode": "2d"},
                "mode '2d' needs the axes 'ring' and 'ulysses', but 'sequence' is sequence; name the mode",
            ),
            ({"mode": "ulysses", "split": "zigzag"}, "split is 'zigzag', but with mode 'ulysses'"),
            ({"split": "zig"}, "split is 'zig'; it must be one of 'auto', 'contiguous', 'zigzag', 'balanced'"),
            ({"kernel": "flash"}, "kernel is 'flash'; it must be 'auto' or 'math'"),
            ({"block": 0}, "block is 0; it must be a number of tokens, 1 at least"),
            ({"axis": "rows"}, "rows"),
        ]:
            with pytest.raises(ValueError, match=message):
                Context(groups, **options)


@pytest.mark.ranks(2)
def test_attention_is_left_out_of_graphs():
    """One break at each: twice attention makes three graphs."""
    with live({"mode": "ring"}) as groups:
        context, q, graphs = Context(groups), numbers(1, 8, 2, 8).detach(), []

        def backend(graph, _inputs):
            graphs.append(graph)
            return graph.forward

        def model(x):
            mixed = context.attention(x * 2, x, x) + 1
            return context.attention(mixed * 3, x, x) + 1

        def strict(x):
            return context.attention(x * 2, x, x) + 1

        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(q), model(q), rtol=0, atol=0)
        assert len(graphs) == 3
        with pytest.raises(torch._dynamo.exc.Unsupported, match="attention"):
            torch.compile(strict, backend="eager", fullgraph=True)(q)
