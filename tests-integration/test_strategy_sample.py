"""Sampling from models of transformers under a strategy: the tokens of one device, however they are cut."""

import pytest
import torch

from par_testing import once
from par_train import Strategy

from . import tiny_llama
from .tiny_llama import WORDS

transformers = pytest.importorskip("transformers")

Llama = transformers.LlamaForCausalLM  # whose module is imported here once, and not by each rank
TEXT = {
    **tiny_llama.TEXT,
    "initializer_range": 0.2,  # far from ties, which sums in another order could decide otherwise
    "eos_token_id": None,
}
PROMPTS = [torch.tensor([5, 17, 100, 2, 64]), torch.tensor([33, 8, 1])]
TOKENS = 5


def make_model(**options):
    torch.manual_seed(0)
    return Llama(transformers.LlamaConfig(**{**TEXT, **options}))


def batch():
    ids = torch.randint(0, WORDS, (8, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def one_device():
    """What transformers itself writes after a step of training, greedily."""
    model = make_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch()).loss.backward()
    optimizer.step()
    model.eval()
    texts = [model.generate(ids[None], max_new_tokens=TOKENS, do_sample=False)[0] for ids in PROMPTS]
    assert len({*texts[0].tolist(), *texts[1].tolist()}) > 10
    return texts


CUT = {"size": 2, "mode": "1d"}
CASES = {
    "data": {},
    "tensor, data, stage 3": {"parallel": {"tensor": CUT}, "zero": 3},
    "pipeline x sequence": {"parallel": {"pipeline": 2, "tensor": {**CUT, "sequence_parallel": True}}},
    "over a cut sequence, tensor": {"parallel": {"sequence": {"size": 2, "mode": "ring"}, "tensor": CUT}},
    "over a cut sequence, pipeline": {"parallel": {"pipeline": 2, "sequence": 2}, "zero": 1},
    "two stages a rank": {
        "parallel": {"pipeline": 2},
        "pipeline": {"schedule": "interleaved", "microbatches": 4},
        "zero": 2,
    },
}


SOME = tuple(name for name in CASES if name != "data")
"""Replicas alone ask for nothing that these do not ask for, too."""


@pytest.mark.parametrize("names", [SOME, pytest.param(tuple(CASES), marks=pytest.mark.storm)], ids=["some", "all"])
@pytest.mark.ranks(4, timeout=180)
def test_every_rank_writes_what_one_device_does(names):
    expected, drawn = once(one_device), None
    for name in names:
        options = CASES[name]
        with Strategy(**options) as strategy:
            model = make_model()
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model.train()
            replica, replicas = strategy.groups.rank("data"), strategy.groups.size("data")
            rows = slice(replica * 8 // replicas, (replica + 1) * 8 // replicas)
            part = {key: value[rows] for key, value in batch().items()}
            strategy.execute_pipeline(iter([part]), model, None, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            texts = strategy.sample(model, PROMPTS, TOKENS)
            assert all(map(torch.equal, texts, expected)), name
            again = strategy.sample(model, PROMPTS, 3, temperature=0.8, seed=3)
            drawn = again if drawn is None else drawn
            assert all(map(torch.equal, again, drawn)), name
            assert not all(map(torch.equal, again, texts))
            assert model.training
            strategy.execute_pipeline(iter([part]), model, None, optimizer)
            optimizer.step()


@pytest.mark.ranks(2, timeout=120)
def test_ends_and_bounds_are_those_of_the_folder(tmp_path):
    whole = make_model().eval()
    written = whole.generate(PROMPTS[0][None], max_new_tokens=TOKENS, do_sample=False)
    end = int(written[0, len(PROMPTS[0]) + 1])
    whole.generation_config.eos_token_id = [end, WORDS]
    if torch.distributed.get_rank() == 0:
        whole.save_pretrained(tmp_path)
    torch.distributed.barrier()
    with Strategy(parallel={"tensor": CUT}) as strategy:
        model = strategy.initialize(strategy.from_pretrained(tmp_path))
        expected = written[:, : written[0, len(PROMPTS[0]) :].tolist().index(end) + len(PROMPTS[0]) + 1]
        assert torch.equal(strategy.sample(model, PROMPTS[0][None], TOKENS), expected)
        assert strategy.sample(model, PROMPTS[0][None], TOKENS, ends=None).shape == written.shape
        with pytest.raises(ValueError, match="the id 101, which is beyond the 101 words of the model"):
            strategy.sample(model, [torch.tensor([WORDS])], 1)
        with pytest.raises(ValueError, match="more than the model's context of 32"):
            strategy.sample(model, PROMPTS, 28)
