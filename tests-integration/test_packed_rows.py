"""Packed rows through models of transformers: the documents of a row do not see each other."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

from par_data import PackedDataset, read_corpus
from par_testing import storm

transformers = pytest.importorskip("transformers", minversion="5.0")
TOOLS = Path(__file__).parents[1] / "tools"

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8)),
    "mistral": transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=16)),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    sys.path.insert(0, str(TOOLS))
    try:
        import tiny_model
    finally:
        sys.path.remove(str(TOOLS))
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.make_model(folder / "model", files=8)
    paths = tiny_model.write_corpora(folder / "texts", files=20)
    return {name: read_corpus(path, folder / "model", folder / "data") for name, path in paths.items()}


ALL = list(itertools.product(("jsonl", "chat"), MODELS, ("eager", "sdpa")))
USUAL = [("jsonl", "llama", "eager"), ("chat", "qwen3", "sdpa"), ("jsonl", "mistral", "sdpa")]
"""Each kind, family and attention."""
OTHERS = [each for each in ALL if each not in USUAL]


def sums(model, batch):
    """The sum of the losses of all targets, and their number. Without a cache: with one, packed rows are not seen."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return float(loss), int((labels != -100).sum())


@torch.no_grad()
@pytest.mark.parametrize(("kind", "family", "attention"), [*USUAL, *(storm(*each) for each in OTHERS)])
def test_a_packed_document_is_predicted_as_it_is_alone(kind, family, attention, corpora):
    model, corpus = MODELS[family].double().eval(), corpora[kind]
    model.set_attn_implementation(attention)
    chosen = corpus.lengths.argsort()[:9]
    rows = PackedDataset(corpus, context=2 * int(corpus.lengths[chosen[-1]]), documents=chosen)
    packed = [sums(model, {name: value[None] for name, value in rows[0, row].items()}) for row in range(rows.count(0))]
    assert len(packed) < len(chosen)
    alone = []
    for number in chosen:
        own = PackedDataset(corpus, context=int(corpus.lengths[number]), documents=[number])
        alone += [sums(model, {name: value[None] for name, value in own[0, 0].items()})]
    assert sum(count for _, count in packed) == sum(count for _, count in alone) > 50
    # Norms and the rotation are computed in float32 whatever the dtype: 1e-7 a token.
    assert sum(loss for loss, _ in packed) == pytest.approx(sum(loss for loss, _ in alone), rel=1e-6)
