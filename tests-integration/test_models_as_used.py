"""Folders and heads of transformers under a strategy, as people have them: what runs, and what is refused in words."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from par_layers.pretrained import balance_factor
from par_testing import once, storm
from par_train import Strategy

from .tiny_llama import TEXT, WORDS

transformers = pytest.importorskip("transformers", minversion="5.4")

MIXTURE = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
WITH_ROUTERS = {
    "Glm4Moe": {**TEXT, **MIXTURE, "head_dim": 8},
    "DeepseekV3": {**TEXT, **MIXTURE, **LATENT, "num_key_value_heads": 4},
}


def model_of(family, kind="ForCausalLM", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, f"{family}{kind}")(config)


def write(model, folder):
    model.config.dtype = next(model.parameters()).dtype
    model.save_pretrained(folder)
    return folder


def opened(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).state_dict()


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("family", WITH_ROUTERS)
def test_a_folder_in_bf16_keeps_biases_of_routers_in_fp32(family, tmp_path):
    """As transformers loads it, whatever dtype is asked for; cut over tensor ranks, too."""
    folder = tmp_path / "folder"
    once(lambda: write(model_of(family, **WITH_ROUTERS[family]).to(torch.bfloat16), folder) and None)
    for dtype in ("auto", torch.float16, torch.float32):
        expected = opened(folder, dtype=dtype)
        with Strategy() as strategy:
            found = strategy.from_pretrained(folder, dtype=dtype).state_dict()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}) as strategy:
        expected = opened(folder)
        for name, tensor in strategy.from_pretrained(folder).state_dict().items():
            assert tensor.dtype == expected[name].dtype, name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_a_folder_of_an_encoder_is_refused(family, tmp_path):
    sizes = {name: size for name, size in TEXT.items() if name != "num_key_value_heads"}
    for decoder in (False, True):
        folder = tmp_path / str(decoder)
        kind = "ForCausalLM" if decoder and family == "Roberta" else "LMHeadModel" if decoder else "ForMaskedLM"
        once(lambda: write(model_of(family, kind, **sizes, is_decoder=decoder), folder) and None)  # noqa: B023
        with Strategy() as strategy:
            if decoder:
                strategy.from_pretrained(folder)
                continue
            with pytest.raises(ValueError, match=rf"holds {family}ForMaskedLM: .* set is_decoder=True"):
                strategy.from_pretrained(folder)
            model = model_of(family, "ForCausalLM" if family == "Roberta" else "LMHeadModel", **sizes)
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with pytest.raises(Exception, match="lets each token attend to later"):
                strategy.execute_pipeline(iter([{"input_ids": torch.ones(2, 8, dtype=int)}]), model, None, optimizer)


@pytest.mark.ranks([storm(2), 4])
def test_heads_that_no_stage_is_said_to_have_are_refused():
    """With tensor ranks too, before these have cut anything."""
    makes = {
        "score": lambda: model_of("Llama", "ForSequenceClassification", **TEXT, num_labels=3, pad_token_id=0),
        "qa_outputs": lambda: model_of("Llama", "ForQuestionAnswering", **TEXT),
    }
    messages = {  # a classifier takes the last token that is no padding, which token ids alone show
        "score": "the last stage returns other values than the full model",
        "qa_outputs": "on the first stage, its code lacks values",
    }
    ranks = torch.distributed.get_world_size()
    parallel = {"pipeline": 2, **({"tensor": {"size": 2, "mode": "1d"}} if ranks == 4 else {})}
    for name, make in makes.items():
        model = make()
        before = [tuple(parameter.shape) for parameter in model.parameters()]
        with (
            Strategy(parallel=parallel, pipeline={"microbatches": 2}) as strategy,
            pytest.raises(TypeError, match=messages[name]),
        ):
            strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert [tuple(parameter.shape) for parameter in model.parameters()] == before


@pytest.mark.ranks(1)
def test_adapters_need_no_release_of_peft_that_is_not_out(tmp_path, monkeypatch):
    """transformers' add_adapter asks for a later peft than the newest one at times; ours does not go through it."""
    peft = pytest.importorskip("peft", minversion="0.21")
    write(model_of("Llama", **TEXT), tmp_path)

    def refuses(*args, **options):
        raise ValueError("The version of PEFT you are using is not compatible, please use a version >= 99.0.0")

    monkeypatch.setattr(sys.modules["transformers.integrations.peft"], "check_peft_version", refuses)
    with Strategy() as strategy:
        model = strategy.from_pretrained(tmp_path, adapter=peft.LoraConfig(r=4, target_modules=["q_proj"]))
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained
        assert all(".lora_" in name for name in trained)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(nn.ModuleList([model]).parameters(), lr=0.1))
        ids = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(1))
        strategy.execute_pipeline(iter([{"input_ids": ids}]), model, None, optimizer)
        strategy.save(model, tmp_path / "adapter", plan="peft")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


JETMOE = {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "aux_loss_coef": 1.0}


@pytest.mark.ranks(1)
def test_the_loss_of_routers_counts_whatever_its_factor_is_called():
    """That of JetMoE is called aux_loss_coef."""
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = model_of("JetMoe", **sizes, **JETMOE, num_key_value_heads=2, output_router_logits=True).train()
    ids = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids, labels=ids).loss.item()
    with Strategy() as strategy:
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = strategy.execute_pipeline(iter([{"input_ids": ids}]), model, None, optimizer)
        assert float(loss) == pytest.approx(expected, rel=1e-5)  # fp32: a mean in another order
    with pytest.raises(ValueError, match="returns an aux_loss, and neither it nor its config has router_aux_loss_coef"):
        balance_factor(SimpleNamespace(config=None))
