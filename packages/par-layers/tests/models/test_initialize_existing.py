"""Weights that are drawn on shards are the shards of the weights that are drawn on one device."""

import pytest
import torch

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import initialize_transformers_, parallelize

transformers = pytest.importorskip("transformers")


def abstract_llama():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.mark.ranks(2)
def test_initialize_transformers_draws_shards_of_the_full_weights():
    part, full = abstract_llama(), abstract_llama()
    with ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)) as groups:
        parallelize(part, groups)
        for model in (part, full):
            initialize_transformers_(model, abstract_llama(), 0, "cpu")
        wanted, sharded = dict(full.named_parameters()), 0
        for name, parameter in part.named_parameters():
            for box in sharding_of(parameter).boxes:
                assert torch.equal(box.of(parameter.detach()), wanted[name].detach()[box.slices])
            sharded += parameter.numel() < wanted[name].numel()
        assert sharded
    assert not any(buffer.is_meta for buffer in part.buffers())
    assert wanted["model.layers.0.mlp.up_proj.weight"].std() > 0
