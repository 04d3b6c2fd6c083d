"""Packed rows in one process: each document gets the numbers that it has alone, with recurrent layers too."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from par_layers import Context, separate_documents_
from par_layers.context.existing.documents import (
    FOUND,
    DocumentwiseForward,
    check_packed_rows,
    packed_documents,
    prepare_packed_rows_,
)
from par_testing import keep_fp64

transformers = pytest.importorskip("transformers", minversion="5.23")
from .hybrids import DOCUMENTS, MODELS, SIZES, batch_of, loss_of_documents, made  # noqa: E402 - after the skip

OTHERS = {
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 9, "mamba_d_state": 4},
    "Mamba": {"state_size": 4, "time_step_rank": 2},
    "RecurrentGemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 64},
    "GptOss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}
"""Mamba-1, with attention and alone; another recurrence; and attention whose mask ignores positions."""


def other(name):
    """A model of `OTHERS`, in float64."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **OTHERS[name]})
    config._experts_implementation = "eager"
    return getattr(transformers, f"{name}ForCausalLM")(config).double().train()


def packed():
    """A batch of two rows, of which the second has four documents."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    return {"input_ids": batch_of(), "position_ids": positions}


def packed_loss(model):
    """The mean loss of packed rows, without the targets that are the first token of a document."""
    batch = packed()
    logits = model(**batch, use_cache=False).logits[:, :-1]
    labels = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_packed_documents_equal_each_document_alone(name):
    with keep_fp64():
        model = made(name) if name in MODELS else other(name)
        expected = loss_of_documents(model, batch_of(), DOCUMENTS)
        expected.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        # Without separation the documents read each other: this test would see it.
        assert abs(packed_loss(model) - expected).item() > 1e-7
        separate_documents_(model)
        if name == "Qwen3Next":
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        loss = packed_loss(model)
        loss.backward()
    assert abs(loss - expected).item() < 1e-10
    for key, parameter in model.named_parameters():
        if key in gradients:
            scale = max(1.0, gradients[key].abs().max().item())
            assert (parameter.grad - gradients[key]).abs().max().item() / scale < 1e-10, key


def test_rows_of_one_document_and_padded_rows_are_computed_as_before():
    model = made("Qwen3Next").eval()
    separated = separate_documents_(copy.deepcopy(model))
    ids = batch_of()
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    for batch in ({}, {"position_ids": torch.arange(24)[None]}, {"attention_mask": mask, "position_ids": places}):
        assert separated(input_ids=ids, **batch).logits.equal(model(input_ids=ids, **batch).logits)
    generated = [each.generate(ids[:1], max_new_tokens=4, do_sample=False) for each in (model, separated)]
    assert generated[0].equal(generated[1])


def test_models_that_separate_documents_get_no_hooks():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    drawn = torch.random.get_rng_state()
    prepare_packed_rows_(model)
    assert getattr(model, FOUND).names == ()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.random.get_rng_state().equal(drawn)
    # Without `use_cache=False`, Llama's own masks let documents read each other.
    separate_documents_(model.double().eval())
    assert model(**packed()).logits.equal(model(**packed(), use_cache=False).logits)


def test_the_outermost_of_the_modules_that_read_across_is_called_for_each_document():
    model = separate_documents_(other("RecurrentGemma"))
    found = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert found == ["model.layers.0.temporal_block"]  # its convolution and its recurrence are inside
    assert isinstance(model.get_submodule(found[0]).forward, DocumentwiseForward)
    with torch.device("meta"):
        of_meta = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**MODELS["Lfm2"]()))
    prepare_packed_rows_(of_meta)
    assert getattr(of_meta, FOUND).names == ("model.layers.0.conv",)


def bloom():
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


def test_models_that_cannot_separate_documents_raise_for_packed_rows():
    model = bloom()
    text = (
        r"self_attention \(BloomAttention\) of BloomForCausalLM reads across the documents .* one document in each row"
    )
    with pytest.raises(ValueError, match=text):
        separate_documents_(model)
    model = bloom()
    prepare_packed_rows_(model)
    with pytest.raises(ValueError, match=text):
        check_packed_rows(model)
    model(input_ids=batch_of(), attention_mask=torch.ones(2, 24))
    model(input_ids=batch_of(), position_ids=torch.arange(24)[None])
    with pytest.raises(ValueError, match=text):
        model(**packed())


def with_images(name):
    """A model of 16 features whose mask is made from the types of tokens, in float64."""
    torch.manual_seed(3)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    eyes = transformers.SiglipVisionConfig(**small, image_size=8, patch_size=4, projection_dim=16)
    text = {**small, "num_key_value_heads": 2, "vocab_size": 50, "head_dim": 8}
    own = {"mm_tokens_per_image": 4} if name == "Gemma3" else {"projection_dim": 16}
    family = {"Gemma3": "Gemma3Text", "PaliGemma": "Gemma"}[name]
    config = getattr(transformers, f"{name}Config")(
        vision_config=eyes, text_config=getattr(transformers, f"{family}Config")(**text), image_token_index=49, **own
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).double().train()


@pytest.mark.parametrize("name", ["Gemma3", "PaliGemma"])
def test_packed_rows_with_types_that_mix_documents_raise(name):
    """Gemma 3 looks up its types at positions within a document; PaliGemma lets all tokens of type 0 attend."""
    model = separate_documents_(with_images(name))
    batch, texts = packed(), torch.zeros(2, 24, dtype=torch.long)
    images = texts.clone()
    images[0, 2:6] = 1
    one = {"input_ids": batch["input_ids"], "position_ids": torch.arange(24)[None]}
    for types in (texts, images):  # rows of one document
        plain = with_images(name)(**one, token_type_ids=types).logits
        assert model(**one, token_type_ids=types).logits.equal(plain)
    text = rf"packed rows and token_type_ids: {name}ForConditionalGeneration derives from it .* without images"
    for types in (images,) if name == "Gemma3" else (images, texts):
        with pytest.raises(ValueError, match=text):
            model(**batch, token_type_ids=types)
    if name == "Gemma3":  # PaliGemma has another mask without types, and it is not causal
        with keep_fp64():
            expected = loss_of_documents(model, batch_of(), DOCUMENTS).item()
            assert abs(packed_loss(model).item() - expected) < 1e-10
        assert model(**batch, token_type_ids=texts).logits.equal(model(**batch).logits)


def test_types_of_tokens_without_influence_on_masks_are_accepted():
    class Typed(transformers.LlamaForCausalLM):
        """Adds a feature of the type of a token, and fails on types that it has no features for."""

        def forward(self, input_ids, token_type_ids=None, **keywords):
            embeds = self.model.embed_tokens(input_ids)
            if token_type_ids is not None:
                embeds = embeds + self.features[token_type_ids, None]
            return super().forward(inputs_embeds=embeds, **keywords)

    for features, text in (([0.0, 1.0], None), ([0.0], "fails on tokens of type 1 (IndexError")):
        model = Typed(transformers.LlamaConfig(**SIZES))
        model.register_buffer("features", torch.tensor(features))
        prepare_packed_rows_(model)
        typed = getattr(model, FOUND).typed
        assert typed is None if text is None else text in typed, typed


def test_models_that_cannot_be_checked_say_why():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError(x.shape)

    class Counted(nn.Module):
        """Adds the index in the row, whatever the positions are."""

        def forward(self, x):
            return x + torch.arange(x.shape[1])[:, None]

    for kind, text in ((Broken, r"fails on 73 tokens of text \(KeyError"), (Counted, "its positions do not restart")):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        model.model.layers[1].mlp = nn.Sequential(kind(), model.model.layers[1].mlp)
        with pytest.raises(ValueError, match=text):
            separate_documents_(model)


def test_calls_that_would_mix_documents_raise():
    model = separate_documents_(made("Lfm2"))
    with pytest.raises(ValueError, match=r"use_cache=True: Lfm2ForCausalLM got rows of several documents"):
        model(**packed(), use_cache=True)
    conv = model.model.layers[0].conv
    x, tokens = torch.ones(2, 24, 32, dtype=torch.float64), Context(None).tokens(24, documents=DOCUMENTS[1])
    with pytest.raises(ValueError, match=r"layers\.0\.conv got a cache \(past_key_values\) with rows of several"):
        conv(x, past_key_values=transformers.DynamicCache(), par_tokens=tokens)
    with pytest.raises(ValueError, match="got 2 rows of 23 tokens, but position_ids describe 1 rows of 24"):
        conv(x[:, 1:], par_tokens=tokens)

    class BlockMask:
        pass

    with pytest.raises(ValueError, match="got a BlockMask, which cannot be split into documents"):
        conv(x, attention_mask=BlockMask(), par_tokens=tokens)


def test_recomputation_that_gets_no_documents_raises():
    """Jamba passes no keywords to its layers, so that a layer that is computed again has no documents."""
    model = separate_documents_(other("Jamba"))
    model.model.layers[0](torch.ones(2, 24, 32, dtype=torch.float64))  # a program may call a layer itself
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with pytest.raises(ValueError, match=r"layers\.0\.mamba is recomputed in backward, and the module that recomputes"):
        packed_loss(model).backward()


def test_documents_begin_where_positions_do_not_continue():
    assert packed_documents(torch.tensor([[0, 1, 2, 3]])) is None
    assert packed_documents(torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])) == ((2, 2), (1, 3))
    assert packed_documents(torch.tensor([[0, 1, 0, 1]] * 3)) == ((2, 2),)
    of_text = torch.tensor([[0, 1, 0, 1]])
    assert packed_documents(torch.stack([of_text] * 4)) == ((2, 2),)
    assert packed_documents(torch.stack([of_text] * 3)) is None  # of images: positions stand still inside of them
    assert packed_documents(torch.zeros(2, 0)) is None
