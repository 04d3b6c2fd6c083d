"""Offloading on a strict accelerator, which raises if memory is used again while a copy may read it."""

import pytest

from par_recompute import Keep, ToHost, checkpoint_layers

from .models import MODELS
from .training import equal, train


@pytest.mark.accelerator(races="error")
@pytest.mark.parametrize("policy", [None, "cheap", "layers", Keep(0.5)])
def test_to_host_on_an_accelerator_is_equal_and_without_races(policy):
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model, policy, to_host=ToHost(ahead=1))
    expected = train(model, inputs)
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model.to("strict"), policy, to_host=ToHost(ahead=1))
    found = train(model, inputs.to("strict"))
    assert equal([[one.cpu() for one in each] for each in found], [[one.cpu() for one in each] for each in expected])
