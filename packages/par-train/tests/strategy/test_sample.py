"""Sampling from a model of one's own; models of transformers are in tests-integration/test_strategy_sample.py."""

import pytest
import torch
from torch import nn

from par_train import Strategy

WORDS = 11


class Means(nn.Module):
    """Causal: what comes next depends on the mean of the words so far. In training it drops half of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.table, self.drop, self.head = nn.Embedding(WORDS, 8), nn.Dropout(0.5), nn.Linear(8, WORDS)
        nn.init.normal_(self.head.weight)

    def forward(self, ids):
        means = self.table(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1).unsqueeze(-1)
        return self.head(self.drop(means))


def greedy(model, ids, tokens):
    """What one device writes, row by row."""
    model = model.eval()
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids[None])[0, -1:].argmax(-1)])
    return ids


PROMPTS = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([7]), torch.tensor([0, 9, 9])]


@pytest.mark.ranks(2)
def test_a_model_goes_on_from_prompts_of_any_length():
    expected = [greedy(Means(), prompt, 6) for prompt in PROMPTS]
    for zero in (0, 3):
        with Strategy(zero=zero) as strategy:
            model = Means()
            model, _ = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model.train()
            model.head.eval()
            generator = torch.get_rng_state()
            texts = strategy.sample(model, PROMPTS, 6)
            assert all(map(torch.equal, texts, expected))
            assert torch.equal(torch.get_rng_state(), generator)
            assert model.drop.training, "the mode of each module is put back"
            assert not model.head.training, "the mode of each module is put back"
            rows = strategy.sample(model, torch.stack([PROMPTS[1], PROMPTS[1]]), 6)
            assert torch.equal(rows, torch.stack([expected[1], expected[1]]))


@pytest.mark.ranks(1)
def test_a_text_is_over_at_its_end():
    with Strategy() as strategy:
        model = strategy.initialize(Means())
        whole = [greedy(Means(), prompt, 6) for prompt in PROMPTS]
        end = int(whole[0][len(PROMPTS[0]) + 1])
        texts = strategy.sample(model, PROMPTS, 6, ends=[end, WORDS + 1])
        for text, prompt, longer in zip(texts, PROMPTS, whole, strict=True):
            written = longer[len(prompt) :].tolist()
            over = written.index(end) + 1 if end in written else len(written)
            assert text.tolist() == longer[: len(prompt) + over].tolist()
        rows = strategy.sample(model, PROMPTS[0][None], 6, ends=end)
        assert torch.equal(rows[0], texts[0])
        two = strategy.sample(model, torch.stack([PROMPTS[0][:3], PROMPTS[2]]), 6, ends=end)
        lengths = [len(each) for each in strategy.sample(model, [PROMPTS[0][:3], PROMPTS[2]], 6, ends=end)]
        assert two.shape == (2, max(lengths))
        assert [len(set(row[length - 1 :].tolist())) for row, length in zip(two, lengths, strict=True)] == [1, 1]


@pytest.mark.ranks(1)
def test_draws_follow_the_probabilities_and_the_seed():
    with Strategy() as strategy:
        model = strategy.initialize(Means())
        ids = torch.tensor([[3, 1]]).expand(4000, 2)
        drawn = strategy.sample(model, ids, 1, temperature=2.0, seed=1)
        assert torch.equal(drawn, strategy.sample(model, ids, 1, temperature=2.0, seed=1))
        assert not torch.equal(drawn, strategy.sample(model, ids, 1, temperature=2.0, seed=2))
        alone = strategy.sample(model, ids[:1], 1, temperature=2.0, seed=1)
        assert torch.equal(alone, drawn[:1]), "a prompt's draws do not depend on how many others there are"
        expected = (model.eval()(ids[:1])[0, -1] / 2.0).softmax(-1)
        counted = torch.bincount(drawn[:, -1], minlength=WORDS) / 4000
        assert torch.allclose(counted, expected, atol=0.04)  # five deviations of a share of 4,000 draws
        cold = strategy.sample(model, ids[:50], 1, temperature=1e-3)
        assert torch.equal(cold, strategy.sample(model, ids[:50], 1))


@pytest.mark.ranks(2)
def test_what_cannot_be_sampled_is_refused_on_every_rank():
    rank = torch.distributed.get_rank()
    ids = torch.tensor([[1, 2]])
    with Strategy() as strategy:
        with pytest.raises(ValueError, match=r"this Means is not from initialize\(\)"):
            strategy.sample(Means(), ids, 1)
        model = strategy.initialize(Means())
        with pytest.raises(ValueError, match="tokens is 0; give the number of new tokens"):
            strategy.sample(model, ids, 0)
        with pytest.raises(ValueError, match="temperature is -1; give 0"):
            strategy.sample(model, ids, 1, temperature=-1)
        with pytest.raises(ValueError, match=r"prompt 1 has shape \[0\] and dtype torch.int64"):
            strategy.sample(model, [ids[0], ids[0][:0]], 1)
        with pytest.raises(ValueError, match=r"prompt 0 has shape \[\]"):
            strategy.sample(model, ids[0], 1)
        with pytest.raises(TypeError, match="given a list of no tensors"):
            strategy.sample(model, [], 1)
        with pytest.raises(ValueError, match="hold the id -1, which is negative"):
            strategy.sample(model, -ids[:, :1], 1)
        with pytest.raises(ValueError, match="has other prompts or options to sample by than rank 0"):
            strategy.sample(model, ids + rank, 1)
        with pytest.raises(ValueError, match="tokens is 0; give the number"):
            strategy.sample(model, ids, 1 - rank)
    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}) as strategy:
        layers = strategy.layers
        model = strategy.initialize(nn.Sequential(layers.VocabEmbedding(WORDS, 4), layers.VocabClassifier(4, WORDS)))
        with pytest.raises(TypeError, match="may return sharded logits"):
            strategy.sample(model, ids, 1)
