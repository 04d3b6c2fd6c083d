import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology, check_owned, sharding_of
from par_layers import constant, initialize, layer_set, normal, uniform
from par_layers.examples import GPT, ViT
from par_testing import assert_equal_to_one_device

from ..helpers import FROM_4, MODES, filled, in_the_typical_modes, run_checks


class Everything(nn.Module):
    """Every kind of parameter, among them some that do not divide."""

    def __init__(self, layers):
        super().__init__()
        self.gpt = GPT(layers, 13, 16, 4, 1, 12, tied=True)
        self.own = layers.VocabClassifier(16, 13)
        self.vit = ViT(layers, 2, 4, 16, 4, 1, 5)
        self.small = layers.Embedding(7, 16)
        self.padded = layers.VocabEmbedding(13, 16, padding_id=11)
        self.linear = layers.Linear(16, 32)


@pytest.mark.ranks(FROM_4)
@in_the_typical_modes
def test_the_typical_modes(configs):
    run_checks(
        [
            check_weights_are_the_same_bits_in_every_mode,
            check_a_parameter_keeps_its_identity_and_its_record,
            check_local_parts_add_up_and_padding_is_zero,
            check_the_tensor_group_owns_every_element_once,
        ],
        configs[dist.get_world_size()],
    )


def check_weights_are_the_same_bits_in_every_mode(mode):
    whole = filled(Everything(layer_set(None)), torch.bfloat16)
    parallel = filled(Everything(mode.layers), torch.bfloat16)
    assert_equal_to_one_device(parallel, whole)


def check_a_parameter_keeps_its_identity_and_its_record(mode):
    model = Everything(mode.layers)
    before = {name: (parameter, sharding_of(parameter)) for name, parameter in model.named_parameters()}
    assert all(parameter.is_meta for parameter, _ in before.values())
    model.linear.weight.requires_grad_(False)
    filled(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert sharding_of(parameter) is before[name][1]
        assert parameter.device.type == "cpu"
        assert parameter.dtype == torch.float64
        assert parameter.requires_grad == (parameter is not model.linear.weight)


def check_local_parts_add_up_and_padding_is_zero(mode):
    for parameter in filled(Everything(mode.layers)).parameters():
        covered = torch.zeros_like(parameter)
        for box in sharding_of(parameter).boxes:
            box.of(covered).add_(1)
        assert covered.max() <= 1
        assert not parameter[covered == 0].any()


def check_the_tensor_group_owns_every_element_once(mode):
    records = [(name, sharding_of(each)) for name, each in Everything(mode.layers).named_parameters()]
    check_owned(records)
    check_owned(records, mode.groups["tensor"])


@pytest.mark.ranks(8)
def test_data_parallel_replicas_are_copies():
    for tensor in [*MODES[4], {"mode": "1d", "kv_heads": 2}]:
        with ProcessGroups(Topology.from_config({"tensor": {"size": 4, **tensor}}, 8)) as groups:
            model = Everything(layer_set("auto", groups))
            records = [(name, sharding_of(each)) for name, each in model.named_parameters()]
            check_owned(records)
            check_owned(records, groups["tensor"])
            copies = records[0][1].boxes[0].copies
            assert set(copies) >= set(groups.ranks("data"))


@pytest.mark.ranks(2)
def test_data_parallel_alone_has_copies_too():
    for config in ({}, {"tensor": {"size": 1, "mode": "2d"}}):
        with ProcessGroups(Topology.from_config(config, 2)) as groups:
            model = Everything(layer_set("auto", groups))
            check_owned([(name, sharding_of(each)) for name, each in model.named_parameters()])


@pytest.mark.ranks(4)
def test_a_pipeline_stage_is_no_copy_of_another():
    config = {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}
    with ProcessGroups(Topology.from_config(config, 4)) as groups:
        stage = groups.rank("pipeline")
        model = layer_set("auto", groups).Linear(16, 16)
        check_owned([(f"stages.{stage}.{name}", sharding_of(each)) for name, each in model.named_parameters()])


def test_rules():
    layers = layer_set(None)
    model = nn.ModuleDict(
        {
            "normal": layers.Linear(100, 100, init=normal(0.02)),
            "uniform": layers.Linear(100, 100, init=uniform(0.5)),
            "constant": layers.Linear(100, 100, init=constant(3.0)),
            "default": layers.Linear(100, 100),
        }
    )
    initialize(model, seed=3)
    weights = {name: layer.weight for name, layer in model.items()}
    assert abs(weights["normal"].std() - 0.02) < 4 * 0.02 / (2 * 10_000) ** 0.5  # 4 sigma
    assert 0.49 < weights["uniform"].abs().max() <= 0.5
    assert (weights["constant"] == 3.0).all()
    assert 0.09 < weights["default"].abs().max() <= 0.1  # 1 / sqrt(100), as torch.nn.Linear
    assert not torch.equal(model["default"].bias, model["normal"].bias)
