"""A budget that is said after a step in which layers kept their inputs alone, by what that has measured."""

import time

import pytest
import torch
from torch import nn

from par_recompute import Keep, checkpoint_layers, choices, knapsack, saved, set_budget

from .models import MODELS
from .training import equal, train


def test_layers_keep_their_inputs_until_a_budget_is_said():
    model, inputs = MODELS["gpt"]()
    expected = train(*MODELS["gpt"](), steps=5)
    checkpoint_layers(model, Keep(None))
    first = train(model, inputs, steps=2)
    assert all(line.dropped == ("",) for line in saved(model).lines)
    (found,) = choices(model)
    assert len(found.layers) == len(found.frontiers) == 3
    assert found.forwards == 2, "in two steps"
    bytes_of = [
        sum(one.bytes for one in some) for some in ([f[0] for f in found.frontiers], [f[-1] for f in found.frontiers])
    ]
    middle = sum(bytes_of) // 2
    set_budget(model, middle)
    losses, gradients = train(model, inputs, steps=3)
    assert equal(([*first[0], *losses], gradients), expected)
    assert bytes_of[1] < saved(model).counted <= middle
    chosen = knapsack(found.frontiers, middle)
    assert saved(model).predicted == sum(each.bytes for each in chosen)


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


def test_seconds_are_those_that_layers_have_taken():
    model = nn.Sequential(*(nn.Sequential(Slow(64, 64), nn.GELU()) for _ in range(2)))
    checkpoint_layers(model, Keep(None))
    for _ in range(2):
        train(model, torch.ones(8, 64), steps=1)
    (found,) = choices(model)
    assert all(frontier[-1].seconds > 0.01 for frontier in found.frontiers), "most of it is the product's"
    assert all(frontier[0].seconds == 0 for frontier in found.frontiers)


def test_several_models_in_one_have_a_budget_each():
    both = nn.ModuleList([MODELS["gpt"]()[0], MODELS["gpt"]()[0]])
    _, inputs = MODELS["gpt"]()
    for model in both:
        checkpoint_layers(model, Keep(None))
        train(model, inputs, steps=1)
    assert len(choices(both)) == 2
    with pytest.raises(ValueError, match="1 budgets were given for 2 models; give one for each"):
        set_budget(both, 1)
    set_budget(both, 1.0, 0.5)
    for model in both:
        train(model, inputs, steps=1)
    assert saved(both[0]).counted > saved(both[1]).counted


def test_a_policy_without_a_budget_is_named():
    model, _ = MODELS["gpt"]()
    with pytest.raises(ValueError, match=r"no layer of this .* drops activations"):
        choices(model)
    checkpoint_layers(model, "layers")
    with pytest.raises(ValueError, match="has no budget; use Keep"):
        set_budget(model, 1)
