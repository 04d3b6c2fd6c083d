"""Whole models whose sequence is cut over ranks before the layers see it, beside the same on one device."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import Mask, PartialGradientReducer, layer_set, parallelize
from par_layers.examples import GPT
from par_testing import assert_equal_to_one_device, count_collectives

from .helpers import filled, integers, numbers

DOCUMENTS = [[5, 2, 9], [16], [1, 15], [8, 8]]
"""Of the rows of a batch: each has its own, also documents of one and two tokens."""

TENSOR = {
    "1d": {"size": 2, "mode": "1d"},
    "by sequence": {"size": 2, "mode": "1d", "sequence_parallel": True},
    "2d": {"size": 4, "mode": "2d"},
}


class Llama(nn.Module):
    """RMSNorm, rotary positions, grouped heads, a window in the second block, a gated MLP, logits of their own."""

    def __init__(self, layers, vocabulary=30, width=16, heads=4, key_heads=2):
        super().__init__()
        self.layers, self.vocabulary, self.head_size = layers, vocabulary, width // heads
        sizes = [width, key_heads * self.head_size, key_heads * self.head_size]
        self.tokens = layers.VocabEmbedding(vocabulary, width)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.norms = nn.ModuleList([layers.RMSNorm(width), layers.RMSNorm(width)])
            block.qkv = layers.ColumnLinear(width, sum(sizes), False, blocks=sizes, unit=self.head_size)
            block.output = layers.RowLinear(width, width, False)
            block.gate_up = layers.ColumnLinear(width, 4 * width, False, blocks=2)
            block.down = layers.RowLinear(2 * width, width, False)
            self.blocks.append(block)
        self.norm = layers.RMSNorm(width)
        self.head = layers.VocabClassifier(width, vocabulary)

    def loss(self, ids, target, *, tokens=None):
        hidden = self.tokens(ids)
        for block, mask in zip(self.blocks, (Mask(causal=True), Mask(causal=True, window=3)), strict=True):
            q, k, v = block.qkv.parts(block.qkv(block.norms[0](hidden)))
            q, k = (self.rotated(x, tokens) for x in (q, k))
            mixed = self.layers.attention(q, k, v, head=self.head_size, mask=mask, tokens=tokens)
            hidden = hidden + block.output(mixed)
            gate, up = block.gate_up.parts(block.gate_up(block.norms[1](hidden)))
            hidden = hidden + block.down(functional.silu(gate) * up)
        return self.layers.linear_cross_entropy(self.norm(hidden), self.head, target, classes=self.vocabulary, chunks=3)

    def rotated(self, x, tokens):
        """Each pair of features, turned by its token's position."""
        positions = self.layers.positions(x, tokens)[..., None, None]
        angles = positions * torch.tensor([1.0, 0.1], dtype=x.dtype)
        first, second = x.unflatten(-1, (-1, 2, 2)).movedim(-2, 0)
        first, second = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
        return torch.stack([first, second], -2).flatten(-3)


def gpt(layers):
    """Dropout, learned positions, and one table for ids and logits."""
    return filled(GPT(layers, 30, 16, 4, 2, 16, tied=True, dropout=0.2))


def llama(layers):
    return filled(Llama(layers))


def step(model, groups, batch, tokens, *, loss=None):
    """The loss of a batch; gradients averaged over the sequence, as over data, and summed where they are partial."""
    torch.manual_seed(1)  # of dropout
    loss = (loss or model.loss)(**batch, tokens=tokens)
    loss.backward()
    if groups is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups["sequence"])  # sum over sequence ranks
            parameter.grad /= groups.size("sequence")
        PartialGradientReducer(model, groups).handle_gradient()
    return loss.detach()


def assert_trains_as_one_device(make, groups, *, steps=1, documents=None, length=16, debug=False):
    """Losses, gradients, and so parameters, of some steps of momentum, in fp64."""
    models = make(layer_set("auto", groups, debug=debug)), make(layer_set(None))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for number in range(steps):
        ids = integers(30, 4, length, seed=number)
        losses = []
        for model, live in zip(models, (groups, None), strict=True):
            batch, tokens = model.layers.context.cut(
                {"ids": ids, "target": ids}, documents=documents, shift=("target",), pad=length % 8 > 0
            )
            losses.append(step(model, live, batch, tokens if documents or length % 8 else None))
        what = f"{groups.topology}, step {number}"
        # sums in fp64 over other orders: some 1e-15 a step, in gradients larger by 1 / the smallest scale
        torch.testing.assert_close(
            losses[0], losses[1], rtol=1e-11, atol=0, msg=lambda text, what=what: f"{what}: {text}"
        )
        assert_equal_to_one_device(*models, gradients=True, rtol=1e-9, atol=1e-12, reason=f"fp64 sums: {what}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_to_one_device(*models, rtol=1e-9, atol=1e-12, reason=f"fp64 sums: {groups.topology}")


def live(sequence, tensor=None):
    parallel = {"sequence": sequence} | ({} if tensor is None else {"tensor": TENSOR[tensor]})
    return ProcessGroups(Topology.from_config(parallel, dist.get_world_size()))


@pytest.mark.ranks(2)
def test_models_train_as_on_one_device():
    with live(2) as groups:
        assert_trains_as_one_device(gpt, groups, steps=2, documents=DOCUMENTS, debug=True)
        assert_trains_as_one_device(gpt, groups)  # rows of one document: no layer is given tokens
        assert_trains_as_one_device(gpt, groups, documents=[[4, 11]] * 4, length=15)  # padded
        assert_trains_as_one_device(llama, groups, documents=DOCUMENTS)
    with live({"size": 2, "split": "zigzag"}) as groups:
        assert_trains_as_one_device(llama, groups)
        check_ignored_targets(groups)


@pytest.mark.ranks(4)
def test_models_train_as_on_one_device_beside_tensor_ranks():
    with live(2, "by sequence") as groups:
        assert_trains_as_one_device(gpt, groups, steps=2, documents=DOCUMENTS)
        assert_trains_as_one_device(llama, groups, documents=DOCUMENTS)
        check_half_precision_rounds_as_one_device_does(groups)
    with live({"size": 2, "split": "contiguous"}, "by sequence") as groups:
        context = layer_set("auto", groups).context
        assert context.tokens(13, pad=True).local == 8  # and not 7, which two tensor ranks cannot share
        with pytest.raises(
            ValueError, match=r"length 14 does not divide by 2 ranks x 2 tensor ranks.*; use 16, or pad"
        ):
            context.tokens(14)
        assert_trains_as_one_device(gpt, groups, documents=[[4, 9]] * 4, length=13)


def check_half_precision_rounds_as_one_device_does(groups):
    """At the same weights: a curve would also show what its later steps make of a rounding in the first."""
    for dtype in (torch.bfloat16, torch.float16):
        of_ranks, of_one = torch.zeros((), dtype=torch.float64), 0.0
        for seed in range(3):
            exact = gpt(layer_set(None)).to(dtype).double()  # weights that the dtype holds
            ids = integers(30, 4, 16, seed=seed)
            models = exact, gpt(layer_set("auto", groups)).to(dtype), gpt(layer_set(None)).to(dtype)
            for model, there in zip(models, (None, groups, None), strict=True):
                batch, tokens = model.layers.context.cut(
                    {"ids": ids, "target": ids}, documents=DOCUMENTS, shift=("target",)
                )
                step(model, there, batch, tokens)
            of_ranks += squared_error(models[1], exact)
            of_one += squared_error(models[2], exact)
        dist.all_reduce(of_ranks)
        # sums over ranks are rounded, too, behind row layers and in gradients: measured 1.27 and 1.18
        assert of_ranks.sqrt() < 1.5 * of_one.sqrt(), dtype


def squared_error(model, exact):
    """Of the gradients that this rank owns; summed over the ranks of a model, each element counts once."""
    whole, error, rank = dict(exact.named_parameters()), 0.0, dist.get_rank()
    for name, parameter in model.named_parameters():
        for box in sharding_of(parameter).boxes:
            if box.owns(rank, range(dist.get_world_size())):
                own = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
                error += (box.of(parameter.grad).double() - whole[name].grad[own]).square().sum()
    return error


@pytest.mark.storm
@pytest.mark.ranks(4)
def test_models_train_as_on_one_device_over_more_ranks():
    modes = [{"mode": "ring"}, {"mode": "ulysses"}, {"mode": "2d", "ulysses": 2}, {"split": "balanced"}]
    for sequence, tensor in (*(({"size": 4, **mode}, None) for mode in modes), (4, None), (2, "1d")):
        with live(sequence, tensor) as groups:
            assert_trains_as_one_device(gpt, groups, steps=4, documents=DOCUMENTS)
            assert_trains_as_one_device(gpt, groups, length=15, documents=[15])
            assert_trains_as_one_device(llama, groups, steps=4, documents=DOCUMENTS)


@pytest.mark.storm
@pytest.mark.ranks(8)
def test_models_train_as_on_one_device_beside_tensor_ranks_of_all_modes():
    for sequence, tensor in ((2, "2d"), (4, "1d"), (4, "by sequence")):
        with live(sequence, tensor) as groups:
            assert_trains_as_one_device(gpt, groups, steps=4, documents=DOCUMENTS)
            assert_trains_as_one_device(gpt, groups)
            if tensor == "2d":  # whose vocabulary logits lie as the residual does
                assert_trains_as_one_device(llama, groups, steps=4, documents=DOCUMENTS)


@pytest.mark.storm  # the first thing that a process compiles takes long
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the tracer does it itself,
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # and looks where graphs begin
@pytest.mark.ranks(2, timeout=180)
def test_a_compiled_model_computes_the_same_for_every_packing():
    with live(2) as groups:
        model = gpt(layer_set("auto", groups))
        compiled, ids = torch.compile(model.loss, backend="aot_eager"), integers(30, 4, 16)
        for documents in (None, [16], DOCUMENTS, [7, 9]):
            batch, tokens = model.layers.context.cut(
                {"ids": ids, "target": ids}, documents=documents, shift=("target",)
            )
            results = []
            for loss in (model.loss, compiled):
                torch.manual_seed(1)
                found = loss(**batch, tokens=tokens if documents else None)
                found.backward()
                results.append([found.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
                model.zero_grad()
            for eager, graph in zip(*results, strict=True):
                torch.testing.assert_close(graph, eager, rtol=1e-12, atol=1e-12)  # a graph may sum in another order


@pytest.mark.ranks(2)
def test_layers_and_losses_over_sequence_ranks():
    with live({"size": 2, "mode": "ring"}) as groups:
        check_what_does_not_fit_is_refused(groups)
        check_the_loss_takes_one_sum(groups)
        check_recomputed_blocks_have_the_same_gradients(groups)
        check_the_context_is_in_both_layouts(layer_set("auto", groups), ("sequence",))
    with live({"size": 2, "mode": "2d", "ulysses": 2}) as groups:
        check_the_context_is_in_both_layouts(layer_set(None, groups), ("ulysses",))


def check_the_context_is_in_both_layouts(layers, axes):
    assert (layers.rules.residual.context, layers.rules.inner.context) == (axes, axes)
    assert layers.context is layers.context
    assert sharding_of(layers.LayerNorm(4).weight).boxes[0].copies == (0, 1)
    assert sharding_of(layers.LayerNorm(4).weight).boxes[0].sum_over == ()  # gradients are averaged, as over data


def check_recomputed_blocks_have_the_same_gradients(groups):
    """Bit for bit: dropout drops the same again, and attention looks at the other rank once more."""
    models = [gpt(layer_set("auto", groups)) for _ in range(2)]
    for block in models[1].blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    ids = integers(30, 4, 16)
    batch, tokens = models[0].layers.context.cut({"ids": ids, "target": ids}, documents=DOCUMENTS, shift=("target",))
    for model in models:
        step(model, groups, batch, tokens)
    for kept, recomputed in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(kept.grad, recomputed.grad)


def check_the_loss_takes_one_sum(groups):
    """Of two numbers, and nothing in backward."""
    layers = layer_set("auto", groups)
    logits = numbers(2, 8, 30).requires_grad_()
    for reduction, elements in (("mean", 2), ("sum", 1)):
        with count_collectives() as counted:
            layers.cross_entropy(logits, integers(30, 2, 8), classes=30, reduction=reduction).backward()
        assert counted.received() == elements  # an all-reduce over two ranks


def check_what_does_not_fit_is_refused(groups):
    layers, x = layer_set("auto", groups, debug=True), numbers(2, 8, 4)
    tokens, others = (layers.context.tokens(16, documents=documents) for documents in ([16], [3, 13]))
    dropout, norm, positions = layers.Dropout(0.5), filled(layers.LayerNorm(4)), filled(layers.PositionEmbedding(8, 4))
    for layer in (dropout, filled(layers.PositionEmbedding(16, 4))):
        with pytest.raises(ValueError, match="tokens are 8 a rank, the activation has 4; cut the batch with the same"):
            layer(x[:, :4], tokens)
        with pytest.raises(ValueError, match="cut over 1 ranks, but the layers are of 2 sequence ranks"):
            layer(x, layer_set(None).context.tokens(8))
        with pytest.raises(ValueError, match="tokens of 3 rows, but the batch has 2"):
            layer(x, layers.context.tokens(16, documents=[[16], [3, 13], [8, 8]]))
    with pytest.raises(ValueError, match="the sequence has 13 positions, this embedding 8"):
        positions(x, others)
    marked = norm(layers.split(x))
    with pytest.raises(ValueError, match=r"two batches, one cut to .* give all layers the same tokens"):
        dropout(norm(dropout(marked, tokens)), others)
    with pytest.raises(ValueError, match="ParallelDropout was given no tokens, but an activation of a batch that was"):
        dropout(dropout(marked, tokens))
    with pytest.raises(ValueError, match="mixes activations: two batches"):
        dropout(marked, tokens) + dropout(marked, others)
    with pytest.raises(ValueError, match=r"attention was given .*two batches"):
        layers.attention(*[dropout(marked, tokens)] * 3, head=4, tokens=others)
    plain = (x, x, x)
    with pytest.raises(ValueError, match=r"causal=True: it cannot be combined with mask=Mask"):
        layers.attention(*plain, head=4, causal=True, mask=Mask(causal=True, window=3))
    with pytest.raises(ValueError, match=r"dropout=0\.1: masks, .* do not support attention dropout; pass 0"):
        layers.attention(*plain, head=4, dropout=0.1)
    with pytest.raises(ValueError, match="reduction is 'none'; it can be 'mean' or 'sum'"):
        layers.cross_entropy(x, integers(4, 2, 8), classes=4, reduction="none")
    with pytest.raises(ValueError, match="PatchEmbedding does not support sequences that are split over 2 ranks"):
        layers.PatchEmbedding(2, 3, 8)
    with pytest.raises(ValueError, match=r"first_token .*; use context\.gather\(x, tokens\)\[:, 0\]"):
        layers.first_token(x)
    with pytest.raises(ValueError, match="the sequence is split over 2 ranks, but attention of this model"):
        parallelize(nn.Linear(4, 4), groups, {"": "replicate"})


def test_one_device_takes_masks_documents_and_sinks():
    layers, (q, k, v) = layer_set(None), (numbers(2, 6, 8, seed=seed) for seed in (1, 2, 3))
    tokens, sinks = layers.context.tokens(6, documents=[[6], [2, 4]]), numbers(2)
    mixed = layers.attention(q, k, v, head=4, mask=Mask(causal=True, window=2), tokens=tokens, sinks=sinks)
    place, start = torch.arange(6), torch.tensor([[0] * 6, [0, 0, 2, 2, 2, 2]])
    seen = (place <= place[:, None]) & (place > place[:, None] - 2) & (place >= start[..., None])  # [rows, 6, 6]
    heads = [x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (q, k, v)]
    scores = (heads[0] @ heads[1].mT / 2).masked_fill(~seen[:, None], -torch.inf)
    weights = torch.cat([scores, sinks.view(2, 1, 1).expand(2, 2, 6, 1)], -1).softmax(-1)[..., :-1]
    expected = (weights @ heads[2]).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-13)  # fp64, sums in another order
    assert layers.positions(q, tokens).tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]]
    assert layers.positions(q).tolist() == [[0, 1, 2, 3, 4, 5]]


def check_ignored_targets(groups):
    """All of one rank, and all of all ranks, are ignored: losses, accuracy and gradients of one device."""
    parallel, whole = (gpt(layers) for layers in (layer_set("auto", groups), layer_set(None)))
    ids, elsewhere = integers(30, 4, 16), parallel.layers.context.tokens(16).index(1)
    of_one, none = integers(30, 4, 16, seed=7), torch.full((4, 16), -100)
    of_one[:, elsewhere] = -100
    for target in (of_one, none):
        losses, rights = [], []
        for model, live in ((parallel, groups), (whole, None)):
            model.zero_grad()
            batch, tokens = model.layers.context.cut({"ids": ids, "target": target})
            losses.append(step(model, live, batch, tokens))
            torch.manual_seed(1)
            rights.append(model.layers.accuracy(model(batch["ids"], tokens), batch["target"], classes=30))
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-11, atol=0, equal_nan=True)
        torch.testing.assert_close(rights[0], rights[1], rtol=0, atol=0, equal_nan=True)
        assert_same_gradients(parallel, whole)
        losses = []
        for model, live in ((parallel, groups), (whole, None)):
            model.zero_grad()
            batch, tokens = model.layers.context.cut({"ids": ids, "target": target})
            losses.append(step(model, live, batch, tokens, loss=partial(summed_loss, model)))
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-11, atol=0)
        assert_same_gradients(parallel, whole)
        assert all(bool(each.grad.any()) == (target is of_one) for each in parallel.parameters())


def summed_loss(model, ids, target, *, tokens):
    return model.layers.cross_entropy(model(ids, tokens), target, classes=30, reduction="sum")


def assert_same_gradients(parallel, whole):
    """Also where they are no numbers."""
    for (name, mine), (_, other) in zip(parallel.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad,
            other.grad,
            rtol=1e-9,
            atol=1e-12,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )
