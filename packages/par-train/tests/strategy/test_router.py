"""Routers under a strategy."""

import pytest
import torch
from torch import nn

from par_layers import LoadBalancing, Router, RouterConfig
from par_testing import for_each, storm
from par_train import Strategy


class Model(nn.Module):
    """A router whose experts are rows of a table."""

    def __init__(self):
        super().__init__()
        self.gate = Router(
            8,
            4,
            2,
            balance=LoadBalancing(bias_update_rate=1e-3),
            config=RouterConfig(scoring_func="sigmoid", correction_bias=True),
        )
        self.table = nn.Parameter(torch.ones(4, 8))

    def forward(self, x):
        routing = self.gate(x)
        return (routing.gates.to(x.dtype).unsqueeze(-1) * self.table[routing.ids]).sum(1)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("precision", ["bf16", "bf16-sr"])
def test_the_bias_of_the_choice_stays_in_fp32_where_weights_do_not(precision):
    model = Model()
    model.gate.e_score_correction_bias.fill_(1.0 + 1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Strategy(precision=precision, zero=1) as strategy:
        model, optimizer = strategy.initialize(model, optimizer)
        strategy.backward(model(torch.randn(6, 8)).square().mean(), optimizer)
        optimizer.step()
        assert model.gate.weight.dtype == torch.bfloat16
        assert model.gate.e_score_correction_bias.dtype == torch.float32
        load = strategy.expert_load(model)["gate"]
        moved = torch.sign(load.sum() - 4 * load) * 1e-3
        assert moved.any()
        assert torch.equal(model.gate.e_score_correction_bias, torch.full((4,), 1.0 + 1e-3).add_(moved))


CASES = (({}, 0), ({}, 2), ({}, 3), ({"pipeline": 2}, 1), ({"tensor": {"size": 2, "mode": "1d"}}, 1))


@for_each(case=CASES, precision=("bf16", storm("bf16-sr")))  # whose bias is rounded by the same rule above
@pytest.mark.ranks(2, timeout=120)
def test_router_of_transformers_stays_in_fp32_as_it_declares(case, precision):
    parallel, zero = case
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
    torch.manual_seed(0)
    model = transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**sizes, **experts))
    assert model._keep_in_fp32_modules_strict == {"gate.weight", "moe_statics"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Strategy(parallel=parallel, precision=precision, zero=zero) as strategy:
        model, optimizer = strategy.initialize(model, optimizer)
        ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            if "pipeline" in parallel:
                strategy.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, None, optimizer)
            else:
                strategy.backward(model(input_ids=ids, labels=ids).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        kept = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
        declared = {name for name in tensors if name.endswith(("gate.weight", "e_score_correction_bias", "inv_freq"))}
        assert kept == declared
        assert sum(name.endswith("gate.weight") for name in kept) == (1 if "pipeline" in parallel else 2)
