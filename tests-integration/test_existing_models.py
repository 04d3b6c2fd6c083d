"""Models of transformers, cut in place by par-layers: their files, their optimizer's shards, and their clipping."""

import functools

import pytest
import torch
import torch.distributed as dist

import par_checkpoint
from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import PartialGradientReducer, parallelize
from par_testing import assert_equal_to_one_device, for_each
from par_zero import shard

transformers = pytest.importorskip("transformers", minversion="5.4")

TEXT = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**TEXT),
    "tied qwen3": lambda: transformers.Qwen3Config(**TEXT, head_dim=4, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(**TEXT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "phi3": lambda: transformers.Phi3Config(**TEXT),
    "mixtral": lambda: transformers.MixtralConfig(**TEXT, num_local_experts=4),
}


def make(family="llama"):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config({**FAMILIES, **OF_EXPERTS}[family]())


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
OF_EXPERTS = {
    "mixtral": lambda: transformers.MixtralConfig(**TEXT, num_local_experts=4),
    "qwen3 with experts": lambda: transformers.Qwen3MoeConfig(
        **TEXT, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6
    ),
    "deepseek": lambda: transformers.DeepseekV3Config(**TEXT, **LATENT, **GROUPS),
    "gpt-oss": lambda: transformers.GptOssConfig(**TEXT, head_dim=4, num_local_experts=4),
}
DEALT = ({"expert": 2}, {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}})


def live(**tensor):
    topology = Topology.from_config({"tensor": {"size": 2, "mode": "1d", **tensor}}, dist.get_world_size())
    return ProcessGroups(topology)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_model_writes_the_whole_ones_files(family, tmp_path):
    whole = make(family)
    with live() as groups:
        cut = parallelize(make(family), groups)
        par_checkpoint.save(tmp_path / "ours", model=cut, format=par_checkpoint.Format(config=cut.config))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        for name, parameter in whole.named_parameters():
            assert torch.equal(again.get_parameter(name), parameter), name
        if dist.get_rank() == 0:
            whole.save_pretrained(tmp_path / "theirs")
        dist.barrier()
        with torch.no_grad():
            for parameter in cut.parameters():
                parameter.fill_(torch.nan)
        par_checkpoint.load(tmp_path / "theirs", model=cut)
        assert_equal_to_one_device(cut, whole)


@pytest.mark.ranks(2, timeout=120)
def test_a_model_on_the_meta_device_is_cut_and_then_loaded(tmp_path):
    whole = make("llama")
    if dist.get_rank() == 0:
        whole.save_pretrained(tmp_path / "theirs")
    dist.barrier()
    with live(sequence_parallel=True) as groups:
        with torch.device("meta"):
            empty = make("llama")
        parallelize(empty, groups)
        par_checkpoint.load(tmp_path / "theirs", model=empty)
        assert_equal_to_one_device(empty, whole)
        reference = parallelize(make("llama"), groups)
        for (name, here), (_, there) in zip(empty.named_parameters(), reference.named_parameters(), strict=True):
            assert sharding_of(here) == sharding_of(there), name
        ids = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(1))
        assert torch.equal(empty(input_ids=ids).logits, reference(input_ids=ids).logits)


def batch(step):
    return torch.randint(29, (4, 8), generator=torch.Generator().manual_seed(step))


@functools.cache
def one_device():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(input_ids=batch(step), labels=batch(step)).loss.backward()
        optimizer.step()
    return model


@for_each(stage=(0, 1, 2, 3))
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.storm)], ids=["typical", "others"])
@pytest.mark.ranks(4, timeout=240)
def test_zero_over_cut_models_trains_as_one_device(stage, others):
    """At every other stage the sequence is cut too: between blocks, to which par-zero is blind."""
    tensor = {"size": 2, "mode": "1d", "sequence_parallel": (stage % 2 == 1) != others}
    with ProcessGroups(Topology.from_config({"data": 2, "tensor": tensor}, 4)) as groups:
        model = parallelize(make(), groups)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        shard(model, optimizer, stage=stage, group=groups["data"], overlap={"bucket": 20_000})
        partial = PartialGradientReducer(optimizer, groups)
        for step in range(3):
            optimizer.zero_grad()
            ids = batch(step).chunk(2)[dist.get_rank(groups["data"])]
            model(input_ids=ids, labels=ids).loss.backward()
            partial.handle_gradient()
            optimizer.step()
        reason = "sums over ranks are in another order, over three steps in fp32"
        assert_equal_to_one_device(model, one_device(), rtol=1e-4, atol=1e-5, reason=reason)


@for_each(family=OF_EXPERTS)
@pytest.mark.ranks(2, timeout=120)
def test_dealt_experts_are_files_of_the_whole_model(family, tmp_path):
    """Loaded onto the meta device where experts lie on an axis of their own, or are folded, and saved from there."""
    whole = make(family)
    theirs = tmp_path / family
    if dist.get_rank() == 0:
        whole.save_pretrained(theirs)
    dist.barrier()
    for number, config in enumerate(DEALT):
        with ProcessGroups(Topology.from_config(config, 2)) as groups:
            with torch.device("meta"):
                cut = make(family)
            parallelize(cut, groups)
            par_checkpoint.load(theirs, model=cut)
            assert_equal_to_one_device(cut, whole)
            ours = tmp_path / f"{family} {number}"
            par_checkpoint.save(ours, model=cut, format=par_checkpoint.Format(config=whole.config))
            again, info = type(whole).from_pretrained(ours, output_loading_info=True)
            assert not any(info.values()), info
            for name, tensor in whole.state_dict().items():
                assert torch.equal(again.state_dict()[name], tensor), name
