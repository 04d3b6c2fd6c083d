"""Every kind of adapter of the installed peft trains as in one process, or an error names it before the first step."""

import dataclasses
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from par_pipeline import PipelineError
from par_testing import keep_fp64, storm
from par_train import Strategy

from . import tiny_llama

transformers = pytest.importorskip("transformers", minversion="5.4")
peft = pytest.importorskip("peft", minversion="0.21")
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS  # noqa: E402 - peft may be absent

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # peft asks by the older name
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),  # of options that its own defaults leave out
]

STEPS = 3
TEXT = {**tiny_llama.TEXT, "num_hidden_layers": 2}
PROMPT = {"num_virtual_tokens": 4}
OPTIONS = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "CARTRIDGE": PROMPT,
    "CPT": {**PROMPT, "cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "FOURIERFT": {"n_frequency": 8},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {**PROMPT, "num_tasks": 2, "num_ranks": 1},
    "OFT": {"r": 4, "oft_block_size": 0},
    "POLY": {"n_tasks": 2, "n_skills": 2},
    "PREFIX_TUNING": PROMPT,
    "PROMPT_TUNING": PROMPT,
    "P_TUNING": {**PROMPT, "encoder_hidden_size": 8},
    "ROAD": {"group_size": 8},
    "SHADOW": {"target_modules": r".*layers\.\d+$", "shadow_dropout": 0.0},
    "SHIRA": {"r": 4},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 8},
    "XLORA": {"hidden_size": 32, "xlora_depth": 1, "xlora_dropout_p": 0.0, "use_trainable_adapters": True},
}
"""Options of kinds whose defaults do not fit a small model, or draw numbers."""

DRAWS = {"POLY", "PVERA"}
"""Kinds that draw numbers in train mode, which differ between ranks."""

FP32 = {"FOURIERFT"}
"""Kinds that mix fp32 and fp64 if the model's own casts are left out."""

CUT = {"size": 2, "mode": "1d"}
WAYS = {
    "tensor": {"parallel": {"tensor": CUT}},
    "sequence": {"parallel": {"tensor": {**CUT, "sequence_parallel": True}}},
    "stage 3": {"zero": 3},
}
OVER_TENSOR = {"LORA", "LN_TUNING", "MULTITASK_PROMPT_TUNING", "PROMPT_TUNING", "P_TUNING"}
"""Kinds that tensor ranks train; the others have matrices or classifiers that no rank computes with its part."""

TRAINS = {
    "tensor": OVER_TENSOR,
    "sequence": OVER_TENSOR,
    "stage 3": {kind.value for kind in CONFIGS} - {"CARTRIDGE", "CPT", "LILY"},
}


def base():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, use_cache=False))


def adapted(kind, folder):
    """A model with an adapter of a kind, whose parameters are off their first values, which may be zeros."""
    config = CONFIGS[peft.PeftType(kind)]
    options = {"task_type": "CAUSAL_LM"}
    if "target_modules" in {field.name for field in dataclasses.fields(config)}:
        options["target_modules"] = ["q_proj", "o_proj"]
    options |= OPTIONS.get(kind, {})
    if kind == "XLORA":
        options["adapters"] = {"0": folder, "1": folder}
    torch.manual_seed(1)
    model = peft.get_peft_model(base(), config(**{key: value for key, value in options.items() if value is not None}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.double().parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model.train(kind not in DRAWS)


def losses_of(model, optimizer, backward, rows, mean):
    found = []
    keywords = {}
    if model.peft_type.value in ("POLY", "MULTITASK_PROMPT_TUNING"):
        keywords = {"task_ids": torch.zeros(4, dtype=torch.int64)[rows]}
    for step in range(STEPS):
        ids = ((torch.arange(48).view(4, 12) + step) % tiny_llama.WORDS)[rows]
        loss = model(input_ids=ids, labels=ids, **keywords).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss.detach().clone()).item())
    return found


def optimizer_of(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.3)


@functools.cache
def one_process(kind, folder):
    model = adapted(kind, folder)
    return losses_of(model, optimizer_of(model), torch.Tensor.backward, slice(None), lambda loss: loss)


def check(kind, way, folder):
    with Strategy(**WAYS[way], seed=3) as strategy:
        model = adapted(kind, folder)
        if kind not in TRAINS[way]:
            with pytest.raises(TypeError, match=f"(?i){kind.lower()}"):
                strategy.initialize(model, optimizer_of(model))
            return
        model, optimizer = strategy.initialize(model, optimizer_of(model))
        replica, replicas = strategy.groups.rank("data"), strategy.groups.size("data")

        def mean(loss):
            dist.all_reduce(loss, group=strategy.groups["data"])
            return loss / replicas

        rows = slice(replica * 4 // replicas, (replica + 1) * 4 // replicas)
        found = losses_of(model, optimizer, lambda loss: strategy.backward(loss, optimizer), rows, mean)
    # Sums over ranks in another order, of fp64, or of a model that casts to fp32 in its norms and attention.
    assert found == pytest.approx(one_process(kind, folder), rel=1e-6 if kind in FP32 else 1e-9)


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("way", ["tensor", storm("sequence"), "stage 3"])
def test_each_kind_of_adapter_trains_or_is_named(way, tmp_path):
    folder = str(tmp_path / "lora")
    if dist.get_rank() == 0:
        peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])).save_pretrained(folder)
    dist.barrier()
    for kind in [kind.value for kind in CONFIGS]:
        try:
            with nullcontext() if kind in FP32 else keep_fp64():
                check(kind, way, folder)
        except ImportError:
            assert kind == "ADAMSS"  # it needs scikit-learn
        except BaseException as error:
            error.add_note(f"with {kind}")
            raise


CAUSAL = ["LORA", "POLY", "PREFIX_TUNING"]
OTHER_LOSS = {
    "ADALORA": "AdaLoraModel of peft adds to the loss; pass a criterion",
    "SHADOW": "ShadowModel of peft adds to the loss; pass a criterion",
    **dict.fromkeys(
        ("MULTITASK_PROMPT_TUNING", "PROMPT_TUNING", "P_TUNING"),
        r"the next token of \[4, 12\] tokens, and the model returns logits of \[4, 16\], as with the virtual tokens",
    ),
}


def check_loss(kind, folder):
    """The loss without a criterion is the adapted model's own, or an error says that it is another one."""
    ids = torch.arange(48).view(4, 12) % tiny_llama.WORDS
    batch = {"input_ids": ids, "labels": ids}
    if kind in ("POLY", "MULTITASK_PROMPT_TUNING"):
        batch["task_ids"] = torch.zeros(4, dtype=torch.int64)
    with Strategy(seed=3) as strategy:
        model = adapted(kind, folder)
        expected = model(**batch).loss.item()
        model, optimizer = strategy.initialize(model, optimizer_of(model))
        if kind in OTHER_LOSS:
            with pytest.raises((ValueError, PipelineError), match=OTHER_LOSS[kind]):
                strategy.execute_pipeline(iter([batch]), model, None, optimizer)
        else:
            loss = strategy.execute_pipeline(iter([batch]), model, None, optimizer)
            assert loss.item() == pytest.approx(expected, rel=1e-6 if kind in FP32 else 1e-12)


@pytest.mark.ranks(1, timeout=300)
@pytest.mark.parametrize("kinds", [(*CAUSAL, *OTHER_LOSS), storm(tuple(kind.value for kind in CONFIGS))])
def test_loss_of_an_adapted_model_is_its_own_or_refused(kinds, tmp_path):
    folder = str(tmp_path / "lora")
    peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])).save_pretrained(folder)
    for kind in kinds:
        try:
            with nullcontext() if kind in FP32 else keep_fp64():
                check_loss(kind, folder)
        except ImportError:
            assert kind == "ADAMSS"  # it needs scikit-learn
        except BaseException as error:
            if kind == "CPT" and "gives its parameters other memory" in str(error):
                continue
            error.add_note(f"with {kind}")
            raise
