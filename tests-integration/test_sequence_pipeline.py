"""Pipelines of packed rows that are cut over sequence ranks: each microbatch has documents of its own."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from par_layers import initialize, layer_set
from par_layers.examples import GPT
from par_pipeline import Batch, PipelineStages
from par_train import Strategy

WORDS, ROWS, LENGTH, STEPS, CLIP_NORM = 29, 4, 16, 2, 0.5
DOCUMENTS = [[5, 2, 9], [16], [1, 15], [8, 8]]  # of the rows of a batch
LOSS, NORM = 1e-5, 3e-5  # fp32: sums over tokens, microbatches and ranks in another order; a norm is one of differences


def gpt(layers):
    """With positions inside documents."""
    return GPT(layers, WORDS, 16, 4, 2, LENGTH)


class Part(nn.Module):
    """The embeddings and the first block, or the second one and the classifier."""

    def __init__(self, model, number):
        super().__init__()
        self.number = number
        self.own = nn.ModuleList(
            [model.tokens, model.positions, model.blocks[0]]
            if number == 0
            else [model.blocks[1], model.norm, model.head]
        )

    def forward(self, given, tokens):
        first, second, third = self.own
        if self.number == 0:
            return third(second(first(given), tokens), tokens)
        return third(second(first(given, tokens)))


def stages(layers, number):
    """One of two, whose parameters have the names that they have in the whole."""
    model = gpt(layers)
    own = (model.tokens, model.positions) if number == 0 else (model.norm, model.head)
    kept = {name: child for name, child in model.named_children() if any(child is one for one in own)}
    blocks = nn.ModuleDict({str(number): model.blocks[number]})
    return PipelineStages({number: Part(model, number)}, {**kept, "blocks": blocks})


def loader():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (STEPS * ROWS, LENGTH), generator=generator)
    return DataLoader(TensorDataset(ids), batch_size=ROWS)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=6e-3, eps=1e-6)


def cut_by(context):
    """Ids and the targets that follow them, cut by documents: stages are given `tokens`, a microbatch's own."""

    def cut(batch):
        pair, tokens = context.cut((batch[0], batch[0]), documents=DOCUMENTS, shift=(1,))
        return Batch((pair[0],), {"tokens": tokens}, pair[1])

    return cut


def one_device():
    model = gpt(layer_set(None))
    initialize(model, 0)
    optimizer, cut, losses, norms = adamw(model), cut_by(model.layers.context), [], []
    for batch in loader():
        (ids,), keywords, targets = cut(batch)
        whole = model(ids, keywords["tokens"])
        loss = sum(  # two microbatches of two rows, each a mean over its own targets
            model.layers.cross_entropy(whole[rows], targets[rows], classes=WORDS) / 2
            for rows in (slice(0, 2), slice(2, 4))
        )
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def check(parallel, **options):
    pipeline = {"schedule": "1f1b", "microbatches": 2}
    with Strategy(parallel=parallel, pipeline=pipeline, clip_norm=CLIP_NORM, **options) as strategy:
        model = stages(strategy.layers, strategy.groups.rank("pipeline"))
        model, optimizer, batches = strategy.initialize(model, adamw(model), loader())
        batches.transform = cut_by(strategy.context)

        def criterion(logits, targets):
            return strategy.layers.cross_entropy(logits, targets, classes=WORDS)

        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(float(strategy.execute_pipeline(batches, model, criterion, optimizer)))
            norms.append(float(optimizer.step().grad_norm))
            optimizer.zero_grad()
    expected_losses, expected_norms = one_device()
    assert losses == pytest.approx(expected_losses, rel=LOSS)
    assert norms == pytest.approx(expected_norms, rel=NORM)


@pytest.mark.ranks(4)
def test_microbatches_of_packed_rows_train_as_on_one_device():
    check({"pipeline": 2, "sequence": 2}, zero=1)


@pytest.mark.storm
@pytest.mark.ranks(8, timeout=120)
def test_microbatches_of_packed_rows_beside_tensor_ranks():
    for mode in ("ring", "ulysses"):
        sequence = {"size": 2, "mode": mode}
        check({"pipeline": 2, "sequence": sequence, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}})
