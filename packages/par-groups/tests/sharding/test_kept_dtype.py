"""Parameters and buffers that keep their dtype when a model is cast."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from par_groups import attributes, keep_packed_weights_, kept_tensors, packed_scales, packed_weights


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.register_buffer("e_score_correction_bias", torch.zeros(4))


class Pretrained(nn.Module):
    """What is read of a Hugging Face Transformers model."""

    _keep_in_fp32_modules = None
    _keep_in_fp32_modules_strict = None

    def __init__(self):
        super().__init__()
        self.gate, self.proj = Router(), nn.Linear(8, 8)
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)
        self.register_buffer("mean", torch.ones(4))


ALWAYS = {"gate.e_score_correction_bias", "inv_freq"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("strict", "half", "found"),
    [
        (["gate.weight"], None, {"gate.weight"}),
        ({"gate"}, [], {"gate.weight"}),
        (["ga*ght", "mean"], None, {"gate.weight", "mean"}),
        (None, ["proj"], None),
        ([], None, set()),
    ],
)
def test_kept_tensors_of_transformers_are_those_it_declares(dtype, strict, half, found):
    model = Pretrained()
    model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules = strict, half
    if found is None:  # what is declared without "strict" is for fp16
        found = {"proj.weight", "proj.bias"} if dtype == torch.float16 else set()
    assert kept_tensors(model, dtype).keys() == found | ALWAYS
    assert kept_tensors(nn.ModuleDict({"a": model}), dtype).keys() == {f"a.{name}" for name in found | ALWAYS}
    stage = nn.ModuleDict({"gate": model.gate})  # a stage of a pipeline has parts of the model alone
    attributes.PRETRAINED.set(stage, model)
    assert kept_tensors(stage, dtype).keys() == {name for name in found | ALWAYS if name.startswith("gate")}


@pytest.mark.parametrize("name", ["gate.base_layer.weight", "gate.modules_to_save.default.weight"])
def test_kept_tensors_are_found_inside_adapters(name):
    model = Pretrained()
    model._keep_in_fp32_modules_strict = ["gate.weight"]
    owner = model
    for part in name.split(".")[:-1]:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter("weight", nn.Parameter(torch.zeros(4, 8)))
    assert name in kept_tensors(model, torch.bfloat16)


def test_kept_tensors_that_are_half_already_are_cast():
    model = Pretrained().bfloat16()
    model._keep_in_fp32_modules_strict = ["gate.weight"]
    assert "gate.weight" not in kept_tensors(model, torch.float16)


def test_module_names_its_own_parameters_and_buffers():
    module = Router()
    module.par_keep_dtype = ("weight", "absent")
    assert kept_tensors(nn.Sequential(module), torch.bfloat16).keys() == {"0.weight", "0.e_score_correction_bias"}


def test_packed_weights_keep_their_dtype():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False).quant_state = object()  # as bitsandbytes marks them
    assert packed_weights(model) == kept_tensors(model, torch.bfloat16) == {"1.weight": model[1].weight}


def test_packed_scales_are_those_of_both_levels():
    second = SimpleNamespace(absmax=torch.ones(1), offset=None, code=torch.ones(256), state2=None)
    first = SimpleNamespace(absmax=torch.ones(8), offset=torch.zeros(()), code=torch.ones(16), state2=second)
    packed, plain = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    packed.quant_state = first
    scales = packed_scales([("w", packed), ("b", plain)])
    assert {name: each.numel() for name, each in scales.items()} == {
        "w.0.absmax": 8,
        "w.0.offset": 1,
        "w.0.code": 16,
        "w.1.absmax": 1,
        "w.1.code": 256,
    }


def test_kept_packed_weight_is_the_same_object_on_its_device():
    linear, other = nn.Linear(2, 2), nn.Linear(2, 2)
    linear.weight.quant_state = object()
    keep_packed_weights_(nn.Sequential(linear, other))
    assert linear.support_avx512bf16_for_cpu is False
    assert not hasattr(other, "support_avx512bf16_for_cpu")
    assert linear.weight.to(torch.device("cpu")) is linear.weight
    assert linear.weight.to(torch.device("cpu"), None, False) is linear.weight
    assert linear.weight.to("meta").is_meta
    assert linear.weight.to(torch.float64).dtype == torch.float64
