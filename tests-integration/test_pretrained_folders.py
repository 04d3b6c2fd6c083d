"""A folder that holds all that transformers and peft open, and models from the meta device, made whole."""

import copy
import json
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import par_checkpoint
from par_checkpoint import CheckpointError
from par_groups import Box, ProcessGroups, Sharding, Topology
from par_layers import parallelize
from par_testing import for_each, storm
from par_zero import shard

transformers = pytest.importorskip("transformers", minversion="5.0")

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 67,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {  # transformers loads the classes here, once for all ranks
    "llama": (transformers.LlamaForCausalLM, {**TEXT, "tie_word_embeddings": False}),
    "tied llama": (transformers.LlamaForCausalLM, {**TEXT, "tie_word_embeddings": True}),
    "llama with scaled positions": (
        transformers.LlamaForCausalLM,
        {
            **TEXT,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen2": (transformers.Qwen2ForCausalLM, {**TEXT, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3ForCausalLM, {**TEXT, "head_dim": 8}),
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        {**TEXT, "head_dim": 8, "sliding_window": 16, "tie_word_embeddings": True},
    ),
    "mistral": (transformers.MistralForCausalLM, TEXT),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 40},
    ),
    "phi": (transformers.PhiForCausalLM, TEXT),
    "phi3": (transformers.Phi3ForCausalLM, TEXT),
    "mixtral": (transformers.MixtralForCausalLM, {**TEXT, "num_local_experts": 4}),
    "qwen3-moe": (transformers.Qwen3MoeForCausalLM, {**TEXT, **EXPERTS, "head_dim": 8}),
    "deepseek-v3": (
        transformers.DeepseekV3ForCausalLM,
        {
            **TEXT,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "q_lora_rank": 12,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "bert": (transformers.BertForMaskedLM, {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}),
}
RECOMPUTED = {
    "gpt2": (),
    "bert": ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
    "gemma3": ("model.embed_tokens.embed_scale", "model.rotary_emb.sliding_attention_inv_freq"),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def kind_of(family):
    kind, settings = FAMILIES[family]
    return kind, kind.config_class(**settings)


def build(family, dtype=torch.float32):
    torch.manual_seed(0)
    kind, config = kind_of(family)
    model = kind(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def on_meta(family, dtype=torch.float32):
    """As from_pretrained builds a model before it fills it."""
    kind, config = kind_of(family)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return kind(config).eval()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(12).view(2, 6), attention_mask=torch.ones(2, 6)).logits


def tensors_of(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def assert_same(model, other):
    mine, others = tensors_of(model), tensors_of(other)
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name
        assert tensor.stride() == others[name].stride() or tensor.numel() == 0, name


# From the meta device


@every_family
@pytest.mark.parametrize("dtype", [storm(torch.float32), torch.bfloat16], ids=str)  # a cast is one thing more
def test_a_model_from_the_meta_device_is_what_from_pretrained_makes(family, dtype, tmp_path):
    saved = build(family, dtype)
    saved.save_pretrained(tmp_path)
    expected = type(saved).from_pretrained(tmp_path, dtype=dtype).eval()
    model = on_meta(family, dtype)
    for name, tensor in expected.state_dict().items():  # what the model wants in float32, whatever dtype is asked for
        if tensor.dtype != dtype:
            assert name == "model.layers.1.mlp.gate.e_score_correction_bias"
            gate = model.model.layers[1].mlp.gate
            gate.e_score_correction_bias = gate.e_score_correction_bias.float()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    report = par_checkpoint.load(tmp_path, model=model, dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn"
    assert report.missing == report.unexpected == ()
    assert set(RECOMPUTED.get(family, ("model.rotary_emb.inv_freq",))) <= set(report.recomputed)
    assert bool(RECOMPUTED.get(family, True)) == bool(report.recomputed)
    assert not any(tensor.is_meta for tensor in tensors_of(model).values())
    assert_same(model, expected)
    assert torch.equal(logits(model), logits(expected))
    assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in tensors_of(model).values())


@pytest.mark.parametrize("family", ["tied llama", "gemma3", "qwen2"])
def test_a_model_that_was_left_untied_on_the_meta_device_is_tied(family, tmp_path):
    build(family).save_pretrained(tmp_path)
    model = on_meta(family)
    head = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(head))  # as release 5.0 leaves it
    par_checkpoint.load(tmp_path, model=model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert_same(model, type(model).from_pretrained(tmp_path))


def test_a_stage_without_one_of_two_tied_tensors_is_left_as_it_is(tmp_path):
    model = build("tied llama")
    par_checkpoint.save(tmp_path / "c", model=model)
    stage = on_meta("tied llama")
    del stage.model.embed_tokens
    par_checkpoint.load(tmp_path / "c", model=stage, strict=False)
    assert torch.equal(stage.lm_head.weight, model.lm_head.weight)


def test_a_module_of_ones_own_inside_computes_its_own_buffers(tmp_path):
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.full((2,), 3.0), persistent=False)

        def reset_buffers(self):
            self.factor.fill_(3.0)

    class Forgotten(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.full((2,), 3.0), persistent=False)

    build("llama").save_pretrained(tmp_path)
    model = on_meta("llama")
    with torch.device("meta"):
        model.model.layers[1].scale = Scale()
    report = par_checkpoint.load(tmp_path, model=model)
    assert "model.layers.1.scale.factor" in report.recomputed
    assert model.model.layers[1].scale.factor.tolist() == [3.0, 3.0]
    model = on_meta("llama")
    with torch.device("meta"):
        model.model.layers[1].scale = Forgotten()
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.scale\.factor' is a buffer .* reset_buffers"):
        par_checkpoint.load(tmp_path, model=model)
    assert all(tensor.is_meta for tensor in tensors_of(model).values()), "nothing was changed"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["gemma3", "bert"])
def test_fsdp_from_the_meta_device(family, tmp_path):
    whole = build(family)
    if dist.get_rank() == 0:
        whole.save_pretrained(tmp_path / "theirs")
    dist.barrier()
    model = on_meta(family)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.bert.encoder.layer if family == "bert" else model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    par_checkpoint.load(tmp_path / "theirs", model=model)
    torch.testing.assert_close(logits(model), logits(whole), rtol=0, atol=0)


# What transformers opens


@for_each(stage=(1, 3))
@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["tied llama", "gemma3", "gpt2"])
def test_par_zero_from_the_meta_device(stage, family, tmp_path):
    """Parameters have memory when they are sharded, and values when they are loaded; buffers are computed then."""
    expected = build(family)
    if dist.get_rank() == 0:
        expected.save_pretrained(tmp_path)
    dist.barrier()
    model = on_meta(family)
    shard(model, torch.optim.AdamW(model.parameters()), stage=stage, group=dist.group.WORLD, overlap={"bucket": 10_000})
    with pytest.raises(RuntimeError, match="has no values yet"):
        logits(model)
    par_checkpoint.load(tmp_path, model=model)
    assert torch.equal(logits(model), logits(expected))


@every_family
def test_the_config_files_are_those_of_save_pretrained(family, tmp_path):
    model = build(family, torch.bfloat16)
    before = copy.deepcopy(model.config.to_dict())
    par_checkpoint.save(tmp_path / "ours", model=model, format=par_checkpoint.Format(max_shard_size="20KB"))
    assert model.config.to_dict() == before, "the model's own config is not touched"
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    theirs = {file.name: file.read_bytes() for file in (tmp_path / "theirs").glob("*config.json")}
    for name, data in theirs.items():
        assert (tmp_path / "ours" / name).read_bytes() == data, name
    assert ("generation_config.json" in theirs) == (family != "bert")
    assert par_checkpoint.verify(tmp_path / "ours") == []
    opened = transformers.AutoModelForCausalLM if family != "bert" else transformers.AutoModelForMaskedLM
    assert_same(opened.from_pretrained(tmp_path / "ours").eval(), opened.from_pretrained(tmp_path / "theirs").eval())


def test_wrappers_and_casts_do_not_hide_the_config(tmp_path):
    model = build("llama")
    par_checkpoint.save(
        tmp_path / "c", model=torch.nn.DataParallel(model), format=par_checkpoint.Format(dtype=torch.bfloat16)
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert json.loads((tmp_path / "c/config.json").read_bytes())["architectures"] == ["LlamaForCausalLM"]


def test_what_is_given_goes_before_what_transformers_would_write(tmp_path):
    model = build("llama")
    (tmp_path / "generation_config.json").write_text('{"max_length": 7}')
    model.generation_config.max_length = 9
    given = tmp_path / "generation_config.json"
    par_checkpoint.save(
        tmp_path / "c", model=model, format=par_checkpoint.Format(config={"model_type": "mine"}, assets=[given])
    )
    assert (tmp_path / "c/generation_config.json").read_text() == '{"max_length": 7}'
    assert json.loads((tmp_path / "c/config.json").read_bytes()) == {"model_type": "mine"}
    par_checkpoint.save(tmp_path / "torch", model=model, format=par_checkpoint.Format(style="torch"))
    par_checkpoint.save(tmp_path / "adapter", model=model, format=par_checkpoint.Format(stem="adapter_model"))
    for path, weights in (("torch", "model.pt"), ("adapter", "adapter_model.safetensors")):
        assert {file.name for file in (tmp_path / path).iterdir()} == {weights, "par_checkpoint.json"}


@pytest.mark.ranks(2)
def test_a_config_that_transformers_refuses_is_an_error_on_every_rank(tmp_path):
    model = build("llama")
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ValueError, match="max_new_tokens"):
        par_checkpoint.save(tmp_path / "c", model=model)
    assert not (tmp_path / "c").exists()


def tokenizer_in(folder):
    """A tokenizer of bytes, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    byte = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=byte, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["tied llama", "deepseek-v3"])
def test_several_ranks_write_what_the_auto_classes_open(family, tmp_path):
    rank, whole = dist.get_rank(), build(family)
    if rank == 0:
        tokenizer_in(tmp_path / "from")
    local, layout = copy.deepcopy(whole), {}
    for name, parameter in local.named_parameters():  # by rows, so that 67 tokens make an uneven cut
        if parameter.dim() != 2:
            continue
        rows, columns = parameter.shape
        low, high = rows * rank // 2, rows * (rank + 1) // 2
        layout[name] = Sharding((rows, columns), (Box((low, 0), (high - low, columns), 0, (columns, 1), (rank,)),))
        parameter.data = parameter.data[low:high].clone()
    par_checkpoint.save(
        tmp_path / "c",
        model=local,
        format=par_checkpoint.Format(max_shard_size="20KB", layout=layout, assets=[tmp_path / "from"]),
    )
    if rank == 0:
        assert (tmp_path / "c/model.safetensors.index.json").exists()
        assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c").eval(), whole)
        opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "c")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "from")
        text = "one \u00e9 two"
        assert opened(text)["input_ids"] == theirs(text)["input_ids"]
        assert opened.decode(opened(text)["input_ids"]) == text
        assert opened.chat_template == theirs.chat_template
        for file in (tmp_path / "from").iterdir():
            assert (tmp_path / "c" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.ranks(2, timeout=180)
def test_a_model_that_is_cut_on_the_meta_device_comes_and_goes_whole(tmp_path):
    topology = Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)
    with ProcessGroups(topology) as groups:
        for family in ("tied llama", "gemma3", "phi3", "qwen3-moe", "deepseek-v3", "gpt2"):
            whole, path = build(family), tmp_path / family
            if dist.get_rank() == 0:
                whole.save_pretrained(path / "theirs")
            dist.barrier()
            cut = parallelize(on_meta(family), groups)
            report = par_checkpoint.load(path / "theirs", model=cut)
            assert not any(tensor.is_meta for tensor in tensors_of(cut).values()), family
            buffers = dict(whole.named_buffers())
            assert set(report.recomputed) <= buffers.keys()
            for name, buffer in cut.named_buffers():
                assert torch.equal(buffer, buffers[name]), (family, name)
            # fp32: the two halves of a sum are added in another order.
            torch.testing.assert_close(logits(cut), logits(whole), rtol=1e-4, atol=1e-5)
            par_checkpoint.save(path / "ours", model=cut, format=par_checkpoint.Format(max_shard_size="20KB"))
            if dist.get_rank() == 0:
                assert_same(transformers.AutoModelForCausalLM.from_pretrained(path / "ours").eval(), whole)
                for name in ("config.json", "generation_config.json"):
                    assert (path / "ours" / name).read_bytes() == (path / "theirs" / name).read_bytes(), family


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for an attribute under its old name
def test_a_saved_adapter_is_opened_by_peft(tmp_path):
    peft = pytest.importorskip("peft")
    rank, base = dist.get_rank(), build("llama")
    tuned = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj"]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=generator)
    state, layout, parts = peft.get_peft_model_state_dict(tuned), {}, {}
    for name, tensor in state.items():
        rows, columns = tensor.shape
        low, high = rows * rank // 2, rows * (rank + 1) // 2  # three rows of A make an uneven cut
        layout[name] = Sharding((rows, columns), (Box((low, 0), (high - low, columns), 0, (columns, 1), (rank,)),))
        parts[name] = tensor[low:high].clone()
    tuned.peft_config["default"].save_pretrained(tmp_path / f"config-{rank}")
    config = tmp_path / f"config-{rank}" / "adapter_config.json"
    par_checkpoint.save(
        tmp_path / "c", model=parts, format=par_checkpoint.Format(stem="adapter_model", layout=layout, assets=[config])
    )
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "c")
    others = peft.get_peft_model_state_dict(opened)
    assert others.keys() == state.keys()
    assert all(torch.equal(others[name], tensor) for name, tensor in state.items())
    assert torch.equal(logits(opened), logits(tuned.eval()))
    into = {name: torch.zeros_like(tensor) for name, tensor in parts.items()}
    par_checkpoint.load(tmp_path / "c", model=into, format=par_checkpoint.Format(layout=layout))
    assert all(torch.equal(into[name], tensor) for name, tensor in parts.items())
    if rank == 0:
        tuned.save_pretrained(tmp_path / "theirs")
    dist.barrier()
    whole = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    par_checkpoint.load(tmp_path / "theirs", model=whole, format=par_checkpoint.Format(stem="adapter_model"))
    assert all(torch.equal(whole[name], tensor) for name, tensor in state.items())


def test_a_transformers_whose_conversions_have_moved_is_refused_and_not_left_unconverted(tmp_path, monkeypatch):
    from transformers import conversion_mapping

    model = build("mixtral")
    monkeypatch.delattr(conversion_mapping, "get_model_conversion_mapping")
    with pytest.raises(ValueError, match=r"transformers 5\..* does not tell how it converts a model"):
        par_checkpoint.save(tmp_path / "c", model=model)
    assert not (tmp_path / "c").exists()
    par_checkpoint.save(tmp_path / "c", model=model, format=par_checkpoint.Format(convert=lambda name, shape: None))
    assert set(par_checkpoint.inspect(tmp_path / "c").tensors) == set(model.state_dict())
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    par_checkpoint.save(tmp_path / "as of 4", model=model)
    assert set(par_checkpoint.inspect(tmp_path / "as of 4").tensors) == set(model.state_dict())


def test_conversions_that_ask_the_model_itself_are_found(tmp_path, monkeypatch):
    """As transformers 5.4 looks for them: by the config of the root, and by its modules without their names."""
    from transformers import conversion_mapping

    def as_in_5_4(model, add_legacy=True):
        kinds = [model.config.model_type, *(module.config.model_type for module in model.modules() if is_model(module))]
        known = (conversion_mapping.get_checkpoint_conversion_mapping(kind) for kind in dict.fromkeys(kinds))
        return [transform for transforms in known for transform in transforms or ()]

    def is_model(module):
        return isinstance(module, transformers.PreTrainedModel)

    model = build("mixtral")
    par_checkpoint.save(tmp_path / "ours", model=model)
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", as_in_5_4)
    par_checkpoint.save(tmp_path / "as in 5.4", model=model)
    names = [set(par_checkpoint.inspect(tmp_path / path).tensors) for path in ("ours", "as in 5.4")]
    assert names[0] == names[1] != set(model.state_dict())
    other = on_meta("mixtral")
    par_checkpoint.load(tmp_path / "ours", model=other)
    assert_same(other, model)


def test_a_traced_tensor_is_squeezed_as_torch_does_it():
    from par_checkpoint.state.transformers import _Traced

    for shape in ((1, 3, 1, 2), (2, 3), (1, 1)):
        tensor, traced = torch.empty(shape), _Traced.of("w", shape)
        assert traced.squeeze().shape == tuple(tensor.squeeze().shape)
        for dim in (0, 1, -1):
            assert traced.squeeze(dim).shape == tuple(tensor.squeeze(dim).shape)
