"""Activations of models of transformers within a budget of bytes: kept as predicted, the same losses and gradients."""

import pytest
import torch

from par_recompute import Drop, Keep, ToHost, checkpoint_layers, saved

transformers = pytest.importorskip("transformers", minversion="5.4")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "attn_implementation": "sdpa"}
DECODER = {
    **SIZES,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "head_dim": 8,
    "use_cache": False,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "qwen3": lambda: transformers.Qwen3Config(**DECODER),
    "gemma3": lambda: transformers.Gemma3TextConfig(**DECODER, sliding_window=8),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=50, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
    ),
    "bert": lambda: transformers.BertConfig(
        **SIZES, intermediate_size=48, vocab_size=50, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    ),
    "vit": lambda: transformers.ViTConfig(**SIZES, intermediate_size=48, image_size=16, patch_size=4),
}


def model_and_inputs(family):
    torch.manual_seed(0)
    config = FAMILIES[family]()
    if family == "vit":
        return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}
    return transformers.AutoModel.from_config(config), {"input_ids": torch.randint(50, (2, 15))}


def trained(model, inputs):
    """Output, and gradients."""
    out = model.train()(**inputs).last_hidden_state
    out.square().mean().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.storm if name in {"qwen3", "bert"} else ()) for name in FAMILIES],
)
def test_what_a_budget_keeps_is_what_was_predicted(family):
    expected = trained(*model_and_inputs(family))
    counted = []
    model, inputs = model_and_inputs(family)
    checkpoint_layers(model, None, to_host=ToHost())  # on a CPU nothing is copied: what layers keep by themselves
    everything = offered(model, inputs)
    budgets = [Keep(0.9), "cheap", Keep(0.4), Keep(int(0.3 * everything[1])), Drop(all_of_them), "layers"]
    for policy in budgets:
        model, inputs = model_and_inputs(family)
        checkpoint_layers(model, policy)
        for _ in range(2):  # the first forward looks at the layers, which keep their inputs alone
            model.zero_grad()
            assert all(map(torch.equal, trained(model, inputs), expected)), policy
        report = saved(model)
        assert len(report.lines) == 2, policy
        for line in report.lines:
            assert line.predicted in ({None} if policy == "layers" else {line.counted}), (policy, str(report))
        total, own = offered(model, inputs)
        assert own == report.counted, policy
        if all(line.dropped != ("",) for line in report.lines):  # torch's checkpoint holds keyword arguments itself
            assert total - own == everything[0] - everything[1], policy
        counted.append(own)
    assert everything[1] > counted[0] > counted[1] > counted[2] > counted[3] >= counted[5]
    assert counted[3] <= 0.3 * everything[1]
    assert counted[1] > counted[4]


def all_of_them(name, module):
    """Drops what can be called again."""
    return True


def offered(model, inputs):
    """Bytes that a forward hands to the hooks around the model, and those that its layers have counted."""
    fixed = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    sizes, tensors = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        tensors.append(tensor.detach())
        if storage._cdata not in fixed:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    return sum(sizes.values()), saved(model).counted
