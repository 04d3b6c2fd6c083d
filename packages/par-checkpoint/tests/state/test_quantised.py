"""Float8 tensors that have scales: their values are codes, and no cast may take them for numbers."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import par_checkpoint as pc
from par_checkpoint.state.quantised import Scales
from par_checkpoint.tools.cli import main

SCALES = ["weight_scale_inv", "weight_scale", "weight.scale", "scale_weight", "weight_scales", "weight._scale"]


def publish(folder, scale):
    """A folder as publishers write it: codes, and a scale under one of the names that are used."""
    folder.mkdir()
    tensors = {"weight": torch.full((4, 4), 448.0).to(torch.float8_e4m3fn), "bias": torch.ones(4)}
    save_file(tensors | ({scale: torch.tensor([0.01])} if scale else {}), folder / "model.safetensors")


@pytest.mark.parametrize("scale", SCALES)
def test_load_of_scaled_float8_is_refused_or_reported(tmp_path, scale):
    publish(tmp_path / "a", scale)
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    before = model.weight.detach().clone()
    with pytest.raises(pc.CheckpointError, match="'weight' is quantised in the files"):
        pc.load(tmp_path / "a", model=model, dtype=torch.bfloat16)
    report = pc.load(tmp_path / "a", model=model, dtype=torch.bfloat16, strict=False)
    assert scale in report.mismatched[0]
    assert not report.unexpected
    assert torch.equal(model.weight, before)
    assert torch.equal(model.bias, torch.ones_like(model.bias))


@pytest.mark.parametrize("scale", SCALES)
def test_convert_of_scaled_float8_to_a_dtype_is_refused(tmp_path, capsys, scale):
    publish(tmp_path / "a", scale)
    for to in ("huggingface", "torch", "dcp"):
        assert main(["convert", str(tmp_path / "a"), str(tmp_path / to), "--dtype", "bfloat16", "--to", to]) == 2
        assert "is quantised in the files" in capsys.readouterr().err
        assert not (tmp_path / to).exists()
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "same")]) == 0
    assert pc.read_tensor(tmp_path / "same", "weight").dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": torch.ones(4, 4, dtype=torch.int8), "SCB": torch.rand(4)},
        {"qweight": torch.ones(4, 4, dtype=torch.int32), "scales": torch.rand(2, 4)},
        {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)},
    ],
    ids=["bitsandbytes", "gptq", "float8"],
)
def test_convert_of_a_quantized_folder_to_a_dtype_raises(tmp_path, capsys, tensors):
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_text('{"quantization_config": {"quant_method": "x"}}')
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "bfloat16"]) == 2
    assert "config.json has a quantization_config" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "b").exists()
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "same")]) == 0


def test_load_of_float8_beside_pickled_scales_is_reported(tmp_path):
    """Transformer Engine pickles the scales of a module."""
    (tmp_path / "a").mkdir()
    tensors = {"weight": torch.full((4, 4), 448.0).to(torch.float8_e4m3fn), "_extra_state": torch.zeros(3)}
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    model = nn.Linear(4, 4, bias=False)
    report = pc.load(tmp_path / "a", model=model, dtype=torch.float32, strict=False)
    assert "_extra_state" in report.mismatched[0]
    assert model.weight.abs().max() < 1


def test_save_of_scaled_float8_in_a_dtype_is_refused(tmp_path):
    model = {"w": torch.ones(2).to(torch.float8_e4m3fn), "w_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"dtype=torch.bfloat16: 'w' is quantised .* or leave dtype"):
        pc.save(tmp_path / "a", model=model, format=pc.Format(dtype=torch.bfloat16))
    pc.save(tmp_path / "a", model=model)
    found = {"w": torch.zeros(2).to(torch.float8_e4m3fn), "w_scale": torch.zeros(1)}
    pc.load(tmp_path / "a", model=found)
    assert torch.equal(found["w"].float(), torch.ones(2))


def test_load_of_float8_without_a_scale_is_a_cast(tmp_path):
    publish(tmp_path / "a", "")
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    pc.load(tmp_path / "a", model=model, dtype=torch.bfloat16)
    assert torch.equal(model.weight.float(), torch.full((4, 4), 448.0))


def test_scales_belong_to_their_own_module():
    scales = Scales(["a.weight_scale", "a.input_scale", "b.gate_up_proj_scale_inv", "logit_scale", "c.weight"])
    assert scales.of("a.weight") == ["a.weight_scale"]
    assert scales.of("a.codes") == ["a.weight_scale", "a.input_scale"]
    assert scales.of("b.gate_up_proj") == ["b.gate_up_proj_scale_inv"]
    assert scales.of("c.weight") == scales.of("weight") == []
