"""What transformers' conversion mapping becomes, against the files that `save_pretrained` writes."""

import importlib
import sys

import pytest
import torch

from par_checkpoint.state.conversion import TensorSlice, parts_cover, split
from par_checkpoint.state.transformers import conversion_of
from par_groups import whole

transformers = pytest.importorskip("transformers", minversion="5.0")
load_file = pytest.importorskip("safetensors.torch").load_file

if not hasattr(importlib.import_module("transformers.core_model_loading"), "Split"):
    pytest.skip(
        f"transformers {transformers.__version__} lacks some conversions that are tested here", allow_module_level=True
    )

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 32, "intermediate_size": 12, "num_key_value_heads": 2, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 6}


def build(name, config, **settings):
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms, too: no two tensors are alike
    return model


def llama():
    return build("LlamaForCausalLM", "LlamaConfig", **TEXT)


def mixtral():
    return build("MixtralForCausalLM", "MixtralConfig", **TEXT, num_local_experts=4)


def qwen_moe():
    return build("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **TEXT, **EXPERTS, shared_expert_intermediate_size=10)


def nomic_bert():
    return build("NomicBertModel", "NomicBertConfig", **SMALL, vocab_size=32, intermediate_size=12)


def clip_text():
    return build("CLIPTextModel", "CLIPTextConfig", **SMALL, vocab_size=32, intermediate_size=12)


def llama_with(*conversions, layers=2):
    """A Llama that was loaded through conversions of somebody's own."""
    loading = importlib.import_module("transformers.core_model_loading")
    model = build("LlamaForCausalLM", "LlamaConfig", **{**TEXT, "num_hidden_layers": layers})
    model._weight_conversions = [
        loading.WeightConverter(sources, targets, [getattr(loading, name)(**settings) for name, settings in operations])
        for sources, targets, operations in conversions
    ]
    return model


def fused_unevenly():
    targets = [f"self_attn.{each}_proj" for each in "qkv"]
    return llama_with(("self_attn.qkv_proj", targets, [("Split", {"dim": 0})]))


def fused_and_transposed():
    targets = ["mlp.gate_proj", "mlp.up_proj"]
    operations = [("Transpose", {"dim0": 0, "dim1": 1}), ("Chunk", {"dim": 0})]
    return llama_with(("mlp.gate_up", targets, operations))


def many_fused():
    """Twelve layers, so that the order of numbers is not that of letters."""
    norms = ("all_norms.weight", "layers.*.input_layernorm.weight")
    return llama_with((*norms, [("Chunk", {"num_shards_attribute": "num_hidden_layers"})]), layers=12)


def checked_transpose():
    return llama_with(("q_proj.weight", "q_proj.weight", [("Transpose", {"check_dims": True})]))


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def parts_of(model):
    """By name in the model: the parts, one of the same name where nothing is converted."""
    shapes = shapes_of(model)
    convert = conversion_of(model, shapes)
    as_it_is = {
        name: [TensorSlice(name=name, shape=shape, start=(0,) * len(shape), dims=tuple(range(len(shape))))]
        for name, shape in shapes.items()
    }
    return {name: (convert and convert(name, shape)) or as_it_is[name] for name, shape in shapes.items()}


def saved(model, path):
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


every_model = pytest.mark.parametrize(
    "make",
    [
        llama,
        mixtral,
        qwen_moe,
        nomic_bert,
        clip_text,
        fused_unevenly,
        fused_and_transposed,
        many_fused,
        checked_transpose,
    ],
)


@every_model
def test_the_model_comes_out_of_the_files(make, tmp_path):
    model = make()
    files = saved(model, tmp_path)
    parts = parts_of(model)
    for name, tensor in model.state_dict().items():
        parts_cover(tuple(tensor.shape), parts[name])
        local = torch.full_like(tensor, torch.nan)
        for segment in split(whole(tensor.shape, (0,)), parts[name]):
            for box in segment.sharding.boxes:
                box.of(local).copy_(files[segment.name][box.slices])
        assert local.equal(tensor), name


@every_model
def test_the_files_come_out_of_the_model(make, tmp_path):
    model = make()
    files = saved(model, tmp_path)
    parts = parts_of(model)
    made = {part.name: torch.full(part.shape, torch.nan) for each in parts.values() for part in each}
    assert shapes_of(model).keys() == parts.keys()
    assert {name: tensor.shape for name, tensor in made.items()} == {name: each.shape for name, each in files.items()}
    for name, tensor in model.state_dict().items():
        for segment in split(whole(tensor.shape, (0,)), parts[name]):
            for box in segment.sharding.boxes:
                made[segment.name][box.slices] = box.of(tensor)
    for name, tensor in files.items():
        assert made[name].equal(tensor), name


@pytest.mark.parametrize(
    ("make", "name", "pieces"),
    [
        (mixtral, "model.layers.1.mlp.experts.gate_up_proj", 8),
        (qwen_moe, "model.layers.1.mlp.experts.down_proj", 4),
        (nomic_bert, "layers.1.self_attn.q_proj.weight", 1),
    ],
)
def test_converted_tensors_are_rectangles_of_others(make, name, pieces):
    model = make()
    parts = parts_of(model)[name]
    assert len({part.name for part in parts}) == pieces
    assert all(part.shape != shapes_of(model)[name] for part in parts)


def test_a_model_that_was_loaded_saves_as_it_was(tmp_path):
    files = saved(mixtral(), tmp_path)
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    assert {part.name for each in parts_of(loaded).values() for part in each} == files.keys()


def test_what_transformers_does_not_convert_has_no_conversion():
    assert conversion_of(llama(), shapes_of(llama())) is None
    assert conversion_of(torch.nn.Linear(2, 2), {"weight": (2, 2), "bias": (2,)}) is None


def test_without_transformers_there_is_no_conversion(monkeypatch):
    model = mixtral()
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    assert conversion_of(model, shapes_of(model)) is None


def test_a_class_that_a_wrapper_swaps_in_changes_nothing():
    model, plain = mixtral(), parts_of(mixtral())
    for module in list(model.modules()):
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {"__module__": "torch.distributed"})
    assert parts_of(model) == plain


def test_shapes_count_not_the_local_tensors():
    model, plain = checked_transpose(), parts_of(checked_transpose())
    shapes = shapes_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.data[:1]
    convert = conversion_of(model, shapes)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert convert(name, shapes[name]) is None
    assert len(plain[name]) == 1


def test_a_tensor_that_was_not_given_is_refused():
    convert = conversion_of(mixtral(), {"model.norm.weight": (8,)})
    with pytest.raises(ValueError, match=r"of the 1 tensors that were given leaves no place in the files for 'lm_head"):
        convert("lm_head.weight", (32, 8))


def test_more_than_placement_is_refused_for_that_tensor_only():
    model = llama_with(
        ("mlp.up", "mlp.up_proj", [("Interleave", {"dim": 0})]),
        ("mlp.down", "mlp.down_proj", [("Transpose", {})]),
    )
    shapes = shapes_of(model)
    convert = conversion_of(model, shapes)
    (down,) = convert("model.layers.1.mlp.down_proj.weight", (8, 12))
    assert (down.name, down.shape, down.dims) == ("model.layers.1.mlp.down.weight", (12, 8), (1, 0))
    assert convert("model.norm.weight", (8,)) is None
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' by \[Interleave\(dim=0\)\]"):
        convert("model.layers.1.mlp.up_proj.weight", (12, 8))
