"""Models of layers over a sequence that is cut, trained for ten steps of Adam in fp64, as on one device."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from par_layers import Mask, initialize, layer_set
from par_layers.examples import GPT
from par_pipeline import Batch, PipelineStages
from par_precision import clip_grad_norm_
from par_testing import assert_equal_to_one_device
from par_train import Strategy
from par_train.jobs.byte_gpt import fill_, gpt_stages, make_gpt
from par_train.jobs.options import ModelOptions

WORDS, ROWS, LENGTH, CLIP_NORM, STEPS = 30, 4, 16, 0.3, 10
DOCUMENTS = [[5, 2, 9], [16], [1, 15], [8, 7, 1]]  # of the rows of a batch: unevenly many targets


class Llama(nn.Module):
    """RMSNorm, rotary positions, grouped heads, a window in the second block, a gated MLP, dropout."""

    def __init__(self, layers, width=16, heads=4, key_heads=2):
        super().__init__()
        self.layers, self.head_size = layers, width // heads
        sizes = [width, key_heads * self.head_size, key_heads * self.head_size]
        self.tokens = layers.VocabEmbedding(WORDS, width)
        self.dropout = layers.Dropout(0.2)
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
        self.head = layers.VocabClassifier(width, WORDS)

    def forward(self, ids, tokens):
        hidden = self.dropout(self.tokens(ids), tokens)
        for block, mask in zip(self.blocks, (Mask(causal=True), Mask(causal=True, window=3)), strict=True):
            q, k, v = block.qkv.parts(block.qkv(block.norms[0](hidden)))
            q, k = (self.rotated(x, tokens) for x in (q, k))
            mixed = self.layers.attention(q, k, v, head=self.head_size, mask=mask, tokens=tokens)
            hidden = hidden + self.dropout(block.output(mixed), tokens)
            gate, up = block.gate_up.parts(block.gate_up(block.norms[1](hidden)))
            hidden = hidden + block.down(functional.silu(gate) * up)
        return self.head(self.norm(hidden))

    def rotated(self, x, tokens):
        """Each pair of features, turned by its token's position."""
        angles = self.layers.positions(x, tokens)[..., None, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        first, second = x.unflatten(-1, (-1, 2, 2)).movedim(-2, 0)
        first, second = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
        return torch.stack([first, second], -2).flatten(-3)


def gpt(layers, dropout=0.2):
    """Learned positions, and one table for ids and logits."""
    return filled(GPT(layers, WORDS, 16, 4, 2, LENGTH, tied=True, dropout=dropout))


def gpt_of_rows(layers):
    """Without dropout, which draws for the rows of a data rank anew."""
    return gpt(layers, dropout=0.0)


def llama(layers):
    return filled(Llama(layers))


def byte_gpt(layers):
    """What stages are made of."""
    return fill_(make_gpt(BYTES, layers), 3).double()


BYTES = ModelOptions(width=16, heads=4, layers=2, context=LENGTH, tied=True)


def filled(model):
    initialize(model, 3, dtype=torch.float64)
    return model


def recomputed(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-6)  # above the rounding of a gradient that is 0


def batch_of(step, context, rows):
    """Some rows of a batch as a model is given them, and how many targets each has: one has none in the third step."""
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    counts = torch.tensor([LENGTH - len(row) for row in DOCUMENTS])
    targets = ids.clone()
    if step == 2:
        targets[0], counts[0] = -100, 0
    (inputs, targets), tokens = context.cut((ids[rows], targets[rows]), documents=DOCUMENTS[rows], shift=(1,))
    return Batch((inputs,), {"tokens": tokens}, (targets, counts[rows]))


def summed_by(layers, classes):
    """A criterion: the sum over the targets of whole rows, and their number."""

    def criterion(logits, target):
        targets, counts = target
        return layers.cross_entropy(logits, targets, classes=classes, reduction="sum"), counts.sum()

    return criterion


def one_device(make):
    """Losses, norms and the model."""
    layers = layer_set(None)
    model, classes = make(layers), 256 if make is byte_gpt else WORDS
    optimizer, losses, norms = adam(model), [], []
    for step in range(STEPS):
        (inputs,), keywords, target = batch_of(step, layers.context, slice(None))
        torch.manual_seed(step)  # of dropout
        total, count = summed_by(layers, classes)(model(inputs, **keywords), target)
        loss = total / count
        loss.backward()
        norms.append(float(clip_grad_norm_(optimizer, CLIP_NORM, None)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model


def run(make, parallel, folder=None, *, begin=0, end=STEPS, checkpointing=False, **options):
    """Losses, norms and the model of some steps under a topology, which go on from a checkpoint, and leave one."""
    microbatches = 2 if "pipeline" in parallel else 1  # a microbatch draws what it drops anew
    pipeline = {"microbatches": microbatches}
    with Strategy(parallel=parallel, clip_norm=CLIP_NORM, pipeline=pipeline, **options) as strategy:
        layers, groups = strategy.layers, strategy.groups
        classes = 256 if make is byte_gpt else WORDS
        if strategy.schedule is None:
            whole = make(layers)
            model = recomputed(whole) if checkpointing else whole
        else:
            rank = groups.rank("pipeline")
            model = whole = fill_(gpt_stages(make_gpt(BYTES, layers), strategy.schedule, rank), 3).double()
        model, optimizer = strategy.initialize(model, adam(whole))
        if begin:
            assert strategy.resume(folder) == begin
        replica, replicas = groups.rank("data"), groups.size("data")
        rows = slice(replica * ROWS // replicas, (replica + 1) * ROWS // replicas)
        losses, norms = [], []
        for step in range(begin, end):
            batch = batch_of(step, strategy.context, rows)
            torch.manual_seed(step)
            loss = strategy.execute_pipeline(iter([batch]), model, summed_by(layers, classes), optimizer)
            count = batch.target[1].sum().double()
            both = torch.stack([loss * count if count else count, count])
            dist.all_reduce(both, group=groups["data"])
            losses.append(float(both[0] / both[1]))
            norms.append(float(optimizer.step().grad_norm))
            optimizer.zero_grad()
        if folder is not None and end < STEPS:
            strategy.checkpoint(folder, step=end)
        return losses, norms, None if options.get("zero") == 3 else model


def assert_same(found, expected, what, *, begin=0, end=STEPS):
    """Sums in fp64 over other orders, 1e-16 each, of which Adam makes lr / eps = 1e4 where a gradient is 0."""
    losses, norms, model = found
    assert losses == pytest.approx(expected[0][begin:end], rel=1e-10), what
    assert norms == pytest.approx(expected[1][begin:end], rel=1e-9), what
    if model is not None and end == STEPS and not isinstance(model, PipelineStages):
        assert_equal_to_one_device(model, expected[2], rtol=1e-7, atol=1e-10, reason=f"as above: {what}")


def check(make, cases):
    expected = one_device(make)
    for parallel, options in cases:
        assert_same(run(make, parallel, **options), expected, f"{make.__name__}, {parallel}, {options}")


SP = {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}
TP = {"tensor": {"size": 2, "mode": "1d"}}


@pytest.mark.ranks(4, timeout=120)
def test_saved_over_a_sequence_and_gone_on_without_it(tmp_path):
    expected, half = one_device(gpt_of_rows), STEPS // 2
    begun = run(gpt_of_rows, {"sequence": {"size": 4, "mode": "ring"}}, tmp_path, end=half, zero=1)
    assert_same(begun, expected, "sequence 4", end=half)
    gone_on = run(gpt_of_rows, {}, tmp_path, begin=half, zero=2)
    assert_same(gone_on, expected, "sequence 1", begin=half)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=300)
def test_over_four_ranks():
    cuts = [{"size": 4, "mode": mode} for mode in ("gather", "ring", "ulysses")]
    cuts.append({"size": 4, "mode": "2d", "ulysses": 2})
    for make in (gpt, llama):
        check(make, [({"sequence": cut}, {"checkpointing": cut["mode"] == "ring"}) for cut in cuts])
        check(make, [({"sequence": 2, **tensor}, {"checkpointing": tensor is SP}) for tensor in (TP, SP)])
    check(gpt_of_rows, [({"sequence": 2}, {"zero": stage, "checkpointing": stage == 2}) for stage in range(4)])
    check(gpt_of_rows, [({"sequence": 4}, {"zero": stage}) for stage in (1, 3)])
    check(byte_gpt, [({"sequence": 2, "pipeline": 2}, {"zero": stage}) for stage in (0, 1)])


@pytest.mark.storm
@pytest.mark.ranks(8, timeout=300)
def test_over_eight_ranks():
    for make in (gpt, llama):
        check(make, [({"sequence": 4, **tensor}, {"checkpointing": True}) for tensor in (TP, SP)])
        check(make, [({"sequence": 2, "tensor": {"size": 4, "mode": "2d"}}, {})])
    check(gpt_of_rows, [({"sequence": 4}, {"zero": stage}) for stage in range(4)])
    check(gpt_of_rows, [({"sequence": 2, **SP}, {"zero": stage}) for stage in range(4)])
    check(byte_gpt, [({"sequence": size, "pipeline": 2}, {"zero": 2}) for size in (2, 4)])
    check(byte_gpt, [({"sequence": 2, "pipeline": 2, **SP}, {})])
