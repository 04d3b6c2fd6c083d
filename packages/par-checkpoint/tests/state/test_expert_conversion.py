"""Experts in files of their own and packed in memory: names, places, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from par_checkpoint import CheckpointError, Format, expert_conversion, load, save
from par_checkpoint.state.conversion import parts_cover

EXPERTS, WIDTH, HIDDEN = 3, 4, 5
MEMORY = "blocks.*.moe.experts"
MIXTRAL = [f"blocks.*.sparse.experts.{{expert}}.{each}.weight" for each in ("w1", "w3", "w2")]


def in_memory(gate, up, down, *, interleaved=False, transposed=False):
    """The packed tensors of experts, each expert's matrices [out, in] or its biases [out] given."""
    first = [up] if gate is None else [gate, up]
    joined = torch.stack(first, 2).flatten(1, 2) if interleaved else torch.cat(first, 1)
    return [each.mT.contiguous() if transposed and each.dim() == 3 else each for each in (joined, down)]


def one_layer(seed, *, gated=True):
    """The matrices and biases of a layer, expert by expert: gate, up and down."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    weights = [torch.randn(EXPERTS, *shape, generator=generator) for shape in shapes]
    biases = [torch.randn(EXPERTS, shape[0], generator=generator) for shape in shapes]
    if not gated:
        weights[0] = biases[0] = None
    return weights, biases


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_every_expert_has_tensors_of_its_own_in_the_files(interleaved, transposed, gated, tmp_path):
    gate, up, down = MIXTRAL if gated else (None, *MIXTRAL[1:])
    layout = expert_conversion(MEMORY, gate, up, down, interleaved=interleaved, transposed=transposed)
    model, expected = {"blocks.1.norm": torch.randn(HIDDEN)}, {}
    expected.update(model)
    first = "gate_up_proj" if gated else "up_proj"
    for block in (0, 12):
        weights, biases = one_layer(block, gated=gated)
        for end, each in (("", weights), ("_bias", biases)):
            packed = in_memory(*each, interleaved=interleaved, transposed=transposed)
            model.update(
                zip([f"blocks.{block}.moe.experts.{name}{end}" for name in (first, "down_proj")], packed, strict=True)
            )
            for name, one in zip(MIXTRAL, each, strict=True):
                for expert in range(EXPERTS if one is not None else 0):
                    key = name.replace("*", str(block)).replace("{expert}", str(expert))
                    expected[key.replace("weight", "bias") if end else key] = one[expert]
    save(tmp_path / "c", model=model, format=Format(convert=layout))
    files = load_file(tmp_path / "c" / "model.safetensors")
    assert files.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(files[name], tensor), name
    again = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.items()}
    load(tmp_path / "c", model=again, format=Format(convert=layout))
    for name, tensor in model.items():
        assert torch.equal(again[name], tensor), name


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_the_parts_hold_every_element_once(experts, width, hidden, interleaved, transposed):
    layout = expert_conversion(MEMORY, *MIXTRAL, interleaved=interleaved, transposed=transposed)
    for name, *shape in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        whole = (experts, *(reversed(shape) if transposed else shape))
        parts_cover(whole, layout(f"blocks.0.moe.experts.{name}", whole))
        bias = (experts, shape[0])
        parts_cover(bias, layout(f"blocks.0.moe.experts.{name}_bias", bias))


def test_what_is_no_tensor_of_experts_stays_as_it_is():
    layout = expert_conversion(MEMORY, *MIXTRAL)
    for name in ("blocks.0.moe.gate.weight", "blocks.x.moe.experts.down_proj", "more.blocks.0.moe.experts.down_proj"):
        assert layout(name, (EXPERTS, HIDDEN, WIDTH)) is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("w1.weight", *MIXTRAL[1:]), r"'w1.weight' must have '\{expert\}' once, and '\*' as often as the pattern"),
        ((MIXTRAL[0], "blocks.*.{expert}.{expert}", MIXTRAL[2]), r"must have '\{expert\}' once"),
        ((MIXTRAL[0], MIXTRAL[0], MIXTRAL[2]), "must be different names"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, words):
    with pytest.raises(ValueError, match=words):
        expert_conversion(MEMORY, *names)


def test_shapes_and_biases_that_do_not_fit_are_refused():
    layout = expert_conversion("moe", "{expert}.gate", "{expert}.up", "{expert}.down")
    with pytest.raises(ValueError, match=r"'moe.gate_up_proj' has shape \(2, 5, 4\); .* gate and up are as wide"):
        layout("moe.gate_up_proj", (2, 5, 4))
    with pytest.raises(ValueError, match=r"'moe.down_proj' has shape \(8, 4\)"):
        layout("moe.down_proj", (8, 4))
    with pytest.raises(ValueError, match=r"the bias beside '\{expert\}.down' has no name in the files"):
        layout("moe.down_proj_bias", (2, 4))


def test_quantised_experts_are_refused_by_name(tmp_path):
    """As gpt-oss is published: four bits an element, and a scale for each 32."""
    name = "model.layers.0.mlp.experts.down_proj"
    files = {f"{name}_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8), f"{name}_scales": torch.zeros(2, 4, 1)}
    save(tmp_path / "c", model=files)
    model = {name: torch.ones(2, 4, 32)}
    with pytest.raises(
        CheckpointError, match=r"down_proj' is quantised in the files, as .*_blocks' and .*_scales'; load"
    ):
        load(tmp_path / "c", model=model)
    assert torch.equal(model[name], torch.ones(2, 4, 32))
    report = load(tmp_path / "c", model=model, strict=False)
    assert report.missing == report.unexpected == ()
    assert "Mxfp4Config(dequantize=True)" in report.mismatched[0]
