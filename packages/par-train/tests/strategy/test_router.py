"""Routers under a strategy."""

import pytest
import torch
from torch import nn

from par_layers import LoadBalancing, Router, RouterConfig
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
