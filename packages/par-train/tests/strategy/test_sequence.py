"""Sequences that are cut over ranks: the same losses, norms and weights as on one device, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from par_groups import ProcessGroups, Topology, agree
from par_layers import Context, initialize, layer_set
from par_layers.examples import GPT
from par_train import Strategy

WORDS, ROWS, LENGTH, STEPS = 29, 8, 16, 3
CLIP_NORM = 0.5

# fp32: sums over tokens and ranks in another order, a few roundings of 6e-8 each; a norm adds up squares of differences
LOSS, NORM, WEIGHT = 1e-5, 3e-5, 1e-4


def tokens_and_targets(length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (3 * ROWS, length), generator=generator)
    return tokens, (5 * tokens + 3) % WORDS


def loader(*tensors, batch_size=ROWS):
    return DataLoader(TensorDataset(*(tensors or tokens_and_targets())), batch_size=batch_size)


def gpt(layers):
    return GPT(layers, WORDS, 16, 4, 2, LENGTH)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=6e-3, eps=1e-6)


def one_device(steps=STEPS):
    """Losses, norms and the model after some steps, in plain torch."""
    model = gpt(layer_set(None))
    initialize(model, 0)
    optimizer, losses, norms = adamw(model), [], []
    for inputs, targets in list(loader())[:steps]:
        loss = model.loss(inputs, targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model


def train(strategy, steps=STEPS):
    """The loop of the README."""
    model = gpt(strategy.layers)
    model, optimizer, batches = strategy.initialize(model, adamw(model), loader())
    losses, norms = [], []
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        loss = model.loss(inputs, targets)
        strategy.backward(loss, optimizer)
        norms.append(float(optimizer.step().grad_norm))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model


def assert_same(found, expected, *, weights=True):
    assert found[0] == pytest.approx(expected[0], rel=LOSS)
    assert found[1] == pytest.approx(expected[1], rel=NORM)
    whole = dict(expected[2].named_parameters())
    for name, parameter in found[2].named_parameters() if weights else ():
        torch.testing.assert_close(parameter, whole[name], rtol=WEIGHT, atol=1e-5)


@pytest.mark.ranks(2)
def test_sequence_ranks_train_as_one_device_does():
    expected = one_device()
    for zero, mode in ((0, "gather"), (2, "ring"), (3, "gather")):
        parallel = {"sequence": {"size": 2, "mode": mode}}
        with Strategy(parallel=parallel, zero=zero, clip_norm=CLIP_NORM) as strategy:
            assert_same(train(strategy), expected, weights=zero < 3)


def sum_and_count(logits, targets):
    """Of this rank's tokens alone; those with an odd target count."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    counts = targets.flatten() % 2
    return (losses * counts).sum(), counts.sum()


@pytest.mark.ranks(2)
def test_sums_and_counts_of_sequence_ranks_add_up():
    """Ranks have other numbers of targets that count, and the loss is the mean over all of them."""
    whole = gpt(layer_set(None))
    initialize(whole, 0)
    inputs, targets = next(iter(loader()))
    total, count = sum_and_count(whole(inputs), targets)
    (total / count).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    with Strategy(parallel={"sequence": 2}, pipeline={"microbatches": 2}) as strategy:
        model = gpt(strategy.layers)
        model, optimizer, batches = strategy.initialize(model, adamw(model), loader())
        loss = strategy.execute_pipeline(batches, model, sum_and_count, optimizer)
        assert float(loss) == pytest.approx((total / count).item(), rel=LOSS)
        assert float(optimizer.step().grad_norm) == pytest.approx(float(norm), rel=NORM)


PROMPTS = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([2]), torch.tensor([7, 18, 2, 8, 1, 8, 2])]


@pytest.mark.ranks(2)
def test_texts_are_written_on_as_one_device_does():
    """Of any length, to the last of the model's positions; no rank is asked for tokens that it does not have."""
    with Strategy() as strategy:
        whole = far_from_ties(strategy.initialize(gpt(layer_set(None))))
        expected = [strategy.sample(whole, PROMPTS, 9, temperature=each, seed=2) for each in (0.0, 1.0)]
    assert len({*expected[0][0].tolist()}) > 4
    for mode in ("gather", "ulysses"):
        with Strategy(parallel={"sequence": {"size": 2, "mode": mode}}) as strategy:
            model = far_from_ties(strategy.initialize(gpt(strategy.layers))).train()
            for temperature, texts in zip((0.0, 1.0), expected, strict=True):
                found = strategy.sample(model, PROMPTS, 9, temperature=temperature, seed=2)
                assert all(map(torch.equal, found, texts)), mode
            assert model.training


def far_from_ties(model):
    """Which sums in another order could decide otherwise."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


@pytest.mark.ranks(2)
def test_a_loader_gives_each_sequence_rank_its_tokens_of_the_same_samples():
    with Strategy(parallel={"sequence": {"size": 2, "split": "zigzag"}}) as strategy:
        for batches in (strategy.initialize(loader()), strategy.initialize(loader(*tokens_and_targets(24)))):
            for cut, whole in zip(batches, batches._plain, strict=True):
                for mine, every in zip(cut, whole, strict=True):
                    tokens = strategy.context.tokens(every.shape[1])
                    assert torch.equal(mine, every[:, torch.from_numpy(tokens.index(strategy.groups.rank("sequence")))])
        assert len(set(agree(None, torch.initial_seed(), None).values())) == 1  # they draw alike, too


@pytest.mark.ranks(2)
def test_batches_of_another_kind_are_cut_by_a_function():
    documents = [[3, 13]] * ROWS
    with Strategy(parallel={"sequence": 2}, pipeline={"microbatches": 1}, clip_norm=CLIP_NORM) as strategy:
        context, model = strategy.context, gpt(strategy.layers)
        inputs, targets = tokens_and_targets()
        model, optimizer, batches = strategy.initialize(model, adamw(model), loader(inputs, targets, inputs.float()))
        with pytest.raises(TypeError, match=r"a list of a tensor \[8, 16\] of int64, .* dataloader\.transform to a"):
            next(iter(batches))

        def cut(batch):
            (ids, aims), tokens = context.cut((batch[0], batch[1]), documents=documents)
            return (ids, tokens), aims

        batches.transform = cut
        batches.load_state_dict({"samples": 0})
        loss = strategy.execute_pipeline(batches, model, model_loss(strategy), optimizer)
        whole = gpt(layer_set(None))
        initialize(whole, 0)
        tokens = whole.layers.context.tokens(LENGTH, documents=documents)
        expected = whole.loss(inputs[:ROWS], targets[:ROWS], tokens=tokens)
        assert float(loss) == pytest.approx(expected.item(), rel=LOSS)


def model_loss(strategy):
    return lambda logits, targets: strategy.layers.cross_entropy(logits, targets, classes=WORDS)


class Attention(nn.Module):
    """A model of one's own, with plain layers."""

    def __init__(self, context=None):
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(8, WORDS)
        self.context = context

    def forward(self, ids):
        q, k, v = self.qkv(self.table(ids)).unflatten(-1, (3, 2, 4)).unbind(2)
        return self.head(self.context.attention(q, k, v).flatten(-2))


@pytest.mark.ranks(2)
def test_a_model_of_plain_layers_trains_with_a_context():
    losses = []
    for parallel in ({"sequence": 2}, {"data": 2}):
        with Strategy(parallel=parallel, zero=1, clip_norm=CLIP_NORM) as strategy:
            torch.manual_seed(3)
            model = Attention(strategy.context)
            model, optimizer, batches = strategy.initialize(model, adamw(model), loader())
            curve = []
            for inputs, targets in batches:
                loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                strategy.backward(loss, optimizer)
                norm = optimizer.step().grad_norm
                optimizer.zero_grad()
                mean = loss.detach().double()
                torch.distributed.all_reduce(mean)
                curve += [mean.item() / 2, float(norm)]
            losses.append(curve)
    assert losses[0] == pytest.approx(losses[1], rel=NORM)


@pytest.mark.ranks(2)
def test_what_has_no_use_for_the_axis_is_refused():
    with ProcessGroups(Topology({"data": 1, "sequence": 2, "pipeline": 1, "tensor": 1, "expert": 1})) as groups:
        assert Strategy(parallel=groups).averaged_over == ("data", "sequence")  # a group of one axis needs no declaring
    with ProcessGroups(Topology({"sequence": 2})) as groups, pytest.raises(ValueError, match="there is no axis 'data'"):
        Strategy(parallel=groups)
    with Strategy(parallel={"sequence": 2}) as strategy:
        model = nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(ValueError, match=r"nothing in this Sequential .* sequence=2: .* with context\.attention"):
            strategy.initialize(model, adamw(model))
        with pytest.raises(ValueError, match="nothing in this Attention reaches"):
            strategy.initialize(Attention())
        with pytest.raises(ValueError, match="nothing in this Attention reaches"):
            strategy.initialize(Attention(Context(None)))
        with pytest.raises(ValueError, match="nothing in this GPT reaches"):
            strategy.initialize(gpt(layer_set(None)))
        model, batches = strategy.initialize(gpt(strategy.layers), loader(*tokens_and_targets(15)))
        with pytest.raises(ValueError, match="length 15 does not divide by 2 ranks"):
            next(iter(batches))
