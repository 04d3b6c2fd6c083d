"""A transformers model is cut by its own plan: outputs, gradients and names are those of the whole."""

import copy

import pytest
import torch
import torch.distributed as dist

from par_pipeline import Pipeline, build_stage, schedule
from par_testing import for_each

transformers = pytest.importorskip("transformers")
LlamaConfig, LlamaForCausalLM = transformers.LlamaConfig, transformers.LlamaForCausalLM  # loaded once for all ranks

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **options)).double()


def loss_of(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@for_each(name=["1f1b", "zb_h1", "zb_v", "interleaved"])
@pytest.mark.ranks(2)
def test_loss_and_gradients_of_a_llama_are_those_of_the_whole(name):
    model = llama()
    whole = copy.deepcopy(model)
    tokens = torch.randint(61, (6, 9))
    loss = loss_of(whole(tokens, use_cache=False).logits, tokens)
    loss.backward()
    expected = {name: each.grad for name, each in whole.named_parameters()}
    plan = schedule(name, 2, 3)
    stages = build_stage(model, plan, dist.get_rank())
    pipeline = Pipeline(stages, plan, dist.group.WORLD, loss_fn=loss_of, broadcast_loss=True)
    result = pipeline.step(tokens, target=tokens)
    torch.testing.assert_close(result.loss.double(), loss.detach())  # fp64 over another order of sums
    own = {name: each.grad for stage in stages for name, each in stage.named_parameters()}
    assert own
    for key, gradient in own.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-10, atol=1e-12)
    every = [None] * 2
    dist.all_gather_object(every, sorted(own))
    assert sorted(every[0] + every[1]) == sorted(expected)
