import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from par_groups import ProcessGroups, Topology, set_sharding, sharding_of
from par_layers import PartialGradientReducer, initialize, layer_set
from par_layers.examples import GPT

from ..helpers import FROM_4, PRODUCTS, filled, integers, modes, numbers, run_checks


def make(layers):
    return nn.ModuleDict(
        {
            "column": layers.ColumnLinear(16, 32),
            "row": layers.RowLinear(32, 16),
            "table": layers.VocabEmbedding(13, 16, padding_id=11),
            "small": layers.Embedding(7, 16),
            "positions": layers.PositionEmbedding(8, 16),
            "patches": layers.PatchEmbedding(2, 3, 16),
            "norm": layers.LayerNorm(16),
            "head": layers.Classifier(16, 5),
            "logits": layers.VocabClassifier(16, 13),
        }
    )


def records(model):
    return {name: (sharding_of(each), each.par_init) for name, each in model.named_parameters()}


def assert_keeps(model, change):
    """`change` leaves the records as they are; with what it returns, where that is another model."""
    before = records(model)
    assert records(change(model) or model) == before


# What torch does to modules


@pytest.mark.ranks(FROM_4)
def test_what_torch_does_to_modules():
    run_checks(
        [
            check_to_empty_and_then_initialize_is_initialize,
            check_load_state_dict_assigns_tensors_that_take_over_the_records,
            check_a_deep_copy_computes_by_itself,
            check_a_deep_copy_of_a_model_has_one_table_of_its_own,
        ],
        PRODUCTS[dist.get_world_size()],
    )


def check_to_empty_and_then_initialize_is_initialize(mode):
    expected = make(mode.layers)
    initialize(expected, seed=3)
    model = make(mode.layers)
    before = dict(model.named_parameters())
    assert_keeps(model, lambda model: model.to_empty(device="cpu"))
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        parameter.data.fill_(777.0)
    initialize(model, seed=3)
    for here, there in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(here, there)


def test_to_empty_leaves_a_shared_parameter_shared():
    model = make(layer_set(None))
    model["again"] = layer_set(None).ColumnLinear(16, 32)
    model["again"].weight = model["column"].weight
    model.to_empty(device="cpu")
    assert model["again"].weight is model["column"].weight


def check_load_state_dict_assigns_tensors_that_take_over_the_records(mode):
    state = filled(make(mode.layers)).state_dict()
    model = make(mode.layers)
    assert_keeps(model, lambda model, state=state: model.load_state_dict(state, assign=True) and model)
    assert all(torch.equal(each, state[name]) for name, each in model.named_parameters())


@pytest.mark.ranks(2)
def test_conversions_and_loads_that_swap():
    torch.__future__.set_swap_module_params_on_conversion(True)  # in this world alone
    for mode in modes():
        model = filled(make(mode.layers), torch.float32)
        assert_keeps(model, nn.Module.double)
        assert model["row"].weight.dtype == torch.float64
        assert_keeps(model, lambda model: model.load_state_dict(model.state_dict()) and model)
        assert_keeps(model, lambda model: model.to(device="meta"))


def check_a_deep_copy_computes_by_itself(mode):
    model, x = filled(make(mode.layers)), mode.layers.split(numbers(8, 4, 16))
    model["row"].weight.requires_grad_(False)
    expected = model["row"](model["column"](x))
    assert_keeps(model, copy.deepcopy)
    copied = copy.deepcopy(model)
    assert not copied["row"].weight.requires_grad
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(copied["row"](copied["column"](x)), expected)


@pytest.mark.ranks(2)
def test_a_deep_copy_shares_the_layer_set_and_not_what_is_the_users():
    for mode in modes():
        layer = filled(mode.layers.ColumnLinear(16, 32))
        layer.notes, layer.again = {"seen": [1]}, layer.weight
        model = nn.ModuleDict({"layer": layer})
        model.layers = mode.layers
        copied = copy.deepcopy(model)
        assert copied.layers is mode.layers
        assert copied["layer"].again is copied["layer"].weight
        copied["layer"].notes["seen"].append(2)
        assert layer.notes == {"seen": [1]}


def check_a_deep_copy_of_a_model_has_one_table_of_its_own(mode):
    ids = integers(13, 8, 8)
    model = filled(GPT(mode.layers, 13, 16, 4, 1, 12, tied=True))
    expected = model.loss(ids, ids)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.tokens.weight
    assert copied.head.weight is not model.head.weight
    assert records(copied) == records(model)
    assert torch.equal(copied.loss(ids, ids), expected)


def test_a_model_of_one_device_can_be_pickled():
    model = filled(make(layer_set(None)))
    assert_keeps(model, lambda model: pickle.loads(pickle.dumps(model)))
    model = GPT(layer_set(None), 13, 16, 4, 1, 12, tied=True)
    assert model.layers.context.ranks == 1  # what it made for documents stays behind
    again = pickle.loads(pickle.dumps(model))
    assert again.head.weight is again.tokens.weight
    ids = integers(13, 2, 8)
    assert torch.isfinite(filled(again).loss(ids, ids))


# What cannot be put back


@pytest.mark.ranks(4)
def test_fully_shard_is_refused_by_name():
    config = {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}
    with ProcessGroups(Topology.from_config(config, dist.get_world_size())) as groups:
        for name, layer in filled(make(layer_set("auto", groups))).items():
            model = nn.ModuleDict({name: fully_shard(layer, mesh=groups.mesh("data"))})
            message = rf"'{name}.weight', a DTensor of shape .* fully_shard .* use par-zero"
            with pytest.raises(RuntimeError, match=message):
                PartialGradientReducer(model, groups).handle_gradient()
            with pytest.raises(RuntimeError, match=message):
                initialize(model, seed=3)


@pytest.mark.ranks(2)
def test_a_parameter_that_was_replaced_needs_a_record():
    for mode in modes():
        layer = filled(mode.layers.RowLinear(16, 8))
        record = sharding_of(layer.weight)
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        with pytest.raises(RuntimeError, match=r"'weight', a Parameter of shape .* par_groups.set_sharding"):
            PartialGradientReducer(layer, mode.groups).handle_gradient()
        set_sharding(layer.weight, record)
        PartialGradientReducer(layer, mode.groups).handle_gradient()
        with pytest.raises(RuntimeError, match=r"'weight', a Parameter of shape .* filled by you"):
            initialize(layer, seed=3)
