import pytest
import torch
from torch import nn

from par_groups import on_written, sharding_of, written_
from par_layers import initialize, layer_set

from .helpers import modes


def test_a_prefix_stands_for_the_rest_of_the_name():
    layers = layer_set(None)
    whole = nn.ModuleDict({"stage": nn.ModuleDict({"linear": layers.Linear(4, 4)})})
    part = nn.ModuleDict({"linear": layers.Linear(4, 4)})
    initialize(whole, seed=3)
    initialize(part, seed=3, prefix="stage.")
    assert torch.equal(whole["stage"]["linear"].weight, part["linear"].weight)
    initialize(part, seed=4, prefix="stage.")
    assert not torch.equal(whole["stage"]["linear"].weight, part["linear"].weight)


def test_parameters_that_are_not_ours():
    model = nn.ModuleDict({"ours": layer_set(None).Linear(4, 4), "torchs": nn.Linear(4, 4)})
    before = model["torchs"].weight.clone()
    initialize(model, seed=3)
    assert torch.equal(model["torchs"].weight, before)
    model["lost"] = nn.Linear(4, 4, device="meta")
    with pytest.raises(ValueError, match=r"'lost.weight' is on the meta device and has no init rule"):
        initialize(model, seed=3)


@pytest.mark.ranks(2)
def test_without_a_seed_the_weights_are_zeros_with_their_records():
    for mode in modes():
        linear = mode.layers.ColumnLinear(4, 6)
        initialize(linear, seed=None)
        assert not linear.weight.is_meta
        assert linear.weight.eq(0).all()
        assert sharding_of(linear.weight).shape == (6, 4)


def test_weights_are_drawn_in_fp32_on_the_cpu_whatever_the_defaults_are():
    expected = layer_set(None).Linear(4, 6)
    initialize(expected, seed=3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        in_half = layer_set(None).Linear(4, 6)
        initialize(in_half, seed=3)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        on_meta = layer_set(None).Linear(4, 6)
        initialize(on_meta, seed=3)
    for model in (in_half, on_meta):
        assert model.weight.dtype == torch.float32
        assert model.weight.device.type == "cpu"
        assert torch.equal(model.weight, expected.weight)
        assert torch.equal(model.bias, expected.bias)


def test_who_waits_for_writes_still_does_after_weights_are_drawn():
    linear, written = layer_set(None).Linear(4, 6), []
    registration = on_written(linear.parameters(), written.extend)
    initialize(linear, seed=3)
    written_(linear.parameters())
    assert [id(each) for each in written] == [id(each) for each in linear.parameters()]
    registration.remove()
    written_(linear.parameters())
    assert len(written) == 2
