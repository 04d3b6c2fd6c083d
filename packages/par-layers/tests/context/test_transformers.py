"""Models of transformers over a cut sequence: losses and gradients of one device, and what is refused."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import Context, Mask
from par_layers.context.existing.transformers import NAME, _attention, read

transformers = pytest.importorskip("transformers", minversion="5.4")
masking_utils = pytest.importorskip("transformers.masking_utils")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "Mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=6)),
    "Gemma3": lambda: transformers.Gemma3ForCausalLM(  # whose scale is not that of its heads
        transformers.Gemma3TextConfig(
            **SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=3
        )
    ),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        )
    ),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SIZES, sliding_window=5, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager"
        )
    ),
}

LENGTHS = {
    "longrope": {"original_max_position_embeddings": 16, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    "dynamic": {"factor": 2.0},
}
"""Rotations that are others where the last token of a batch is far away, as it is on the second rank alone."""


def of_length(rope):
    angles = {"rope_type": rope, "rope_theta": 100.0, **LENGTHS[rope]}
    sizes = {**SIZES, "max_position_embeddings": 16, "rope_parameters": angles}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def made(name):
    """A model whose parameters are the same on every rank, in float64."""
    torch.manual_seed(3)
    return (of_length(name) if name in LENGTHS else MODELS[name]()).double().train()


def whole_loss(model, ids, labels, documents):
    """Each document by itself, as one device would compute it."""
    total, count = 0.0, 0
    for row, lengths in enumerate(documents):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            targets = torch.nn.functional.pad(labels[row : row + 1, part], (0, 1), value=-100)[:, 1:]
            logits = model(input_ids=ids[row : row + 1, part], use_cache=False).logits
            total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            count, start = count + int((targets != -100).sum()), start + length
    return total / count


def compare(name, config, batch, lengths, *, documents=None, recompute=False):
    model = made(name)
    labels = batch["labels"].masked_fill(batch.get("attention_mask", torch.ones(())) == 0, -100)
    expected = whole_loss(model, batch["input_ids"], labels, lengths)
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    world = dist.get_world_size()
    with ProcessGroups(Topology.from_config({"sequence": {"size": world, **config}}, world)) as groups:
        context = Context(groups, block=4)
        context.transformers_(model)
        if recompute:
            getattr(
                model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
            )()  # its name before v6
        mine, tokens = context.cut(batch, documents=documents)
        loss = context.sum(model(**mine, par_tokens=tokens).loss)
        loss.backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                # Models compute norms, rotations and losses in float32.
                torch.testing.assert_close(
                    parameter.grad / world,
                    gradients[key],
                    rtol=1e-5,
                    atol=1e-6,
                    msg=lambda text, key=key: f"{name}, {key}: {text}",
                )
        torch.testing.assert_close(
            loss, expected, rtol=1e-6, atol=1e-8, check_dtype=False
        )  # the model rounds to float32


def batch_of(rows=2, length=24):
    ids = torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


DOCUMENTS = [[24], [5, 12, 7]]
"""Of two rows."""


@pytest.mark.ranks(2)
def test_models_are_those_of_one_device():
    modes = ("gather", "ring", "ulysses", "gather", "ring", "gather")
    for name, mode in zip(MODELS, modes, strict=True):
        compare(name, {"mode": mode}, batch_of(), DOCUMENTS, documents=DOCUMENTS)
    compare("Llama", {"mode": "ring"}, batch_of(), DOCUMENTS, documents=DOCUMENTS, recompute=True)
    for rope in LENGTHS:  # of one device, which turns all tokens by the longest document of the batch
        compare(rope, {"mode": "gather"}, batch_of(), [[24], [24]])
    check_two_contexts_in_one_process()


def check_two_contexts_in_one_process():
    """Their calls mixed, and a third model without one between them, which is the same as ever."""
    topologies = [
        Topology.from_config({"sequence": {"size": 2, **config}}, 2)
        for config in ({"mode": "ring", "split": "zigzag"}, {"mode": "ulysses"})
    ]
    plain, batch = made("Mistral"), batch_of()
    expected = plain(**batch).loss
    expected.backward()
    with ProcessGroups(topologies[0]) as first, ProcessGroups(topologies[1]) as second:
        contexts = [Context(groups) for groups in (first, second)]
        models = [context.transformers_(made("Mistral")) for context in contexts]
        batches = [context.cut(batch) for context in contexts]
        assert batches[0][1] != batches[1][1]
        losses = [
            context.sum(model(**mine, par_tokens=tokens).loss)
            for context, model, (mine, tokens) in zip(contexts, models, batches, strict=True)
        ]
        assert plain(**batch).loss.equal(expected)
        for loss, model in zip(losses, models, strict=True):
            loss.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, check_dtype=False)  # losses are in float32
            for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
                dist.all_reduce(mine.grad)
                torch.testing.assert_close(mine.grad / 2, whole.grad, rtol=1e-5, atol=1e-6)  # as in `compare`


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("name", [*MODELS, "Llama 4"])
def test_models_over_more_ranks(name):
    if name == "Llama 4":  # slow to import; its first layer sees chunks, its second one everything
        small = {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "floor_scale": 4}
        MODELS[name] = lambda: transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(**SIZES, **small, no_rope_layers=[1, 0])
        )
    for config in ({"mode": "2d", "ulysses": 2, "split": "zigzag"}, {"mode": "gather", "split": "balanced"}):
        for recompute in (False, True):
            compare(name, config, batch_of(), DOCUMENTS, documents=DOCUMENTS, recompute=recompute)


@pytest.mark.ranks(2)
def test_padding_and_positions_are_documents():
    padded = batch_of()
    padded["attention_mask"] = torch.ones(2, 24, dtype=torch.int64)
    padded["attention_mask"][1, 20:] = 0  # labels there are no targets, whatever they are
    compare("Llama", {"mode": "gather"}, padded, [[24], [20, 4]])
    packed = batch_of(rows=1)
    packed["position_ids"] = torch.cat([torch.arange(9), torch.arange(15)])[None]
    compare("Llama", {"mode": "gather"}, packed, [[9, 15]])


def test_padding_is_no_document_whatever_its_positions():
    context, batch, counted = Context(None), batch_of(), torch.arange(24).expand(2, -1)
    right = {**batch, "attention_mask": torch.ones(2, 24, dtype=torch.int64), "position_ids": counted}
    right["attention_mask"][1, 20:] = 0
    assert context.cut(right)[1].documents == ((24,), (20, 4))
    left = {**batch, "attention_mask": (counted >= 3).long()}
    anew = (counted - 3).clamp_min(0)
    assert context.cut({**left, "position_ids": anew})[1].documents == ((1, 1, 1, 21),)
    with pytest.raises(ValueError, match=r"padding before tokens whose position_ids count on; they must begin anew"):
        context.cut({**left, "position_ids": counted})
    pairs = torch.ones(2, 1, 24, 24).tril()
    for positions in ({}, {"position_ids": counted}):
        with pytest.raises(
            ValueError, match=r"attention_mask is \[2, 1, 24, 24\] and input_ids are \[2, 24\]; masks of"
        ):
            context.cut({"input_ids": batch["input_ids"], "attention_mask": pairs, **positions})
    with pytest.raises(ValueError, match=r"position_ids are \[3, 2, 24\]; they must be \[B, length\]"):
        context.cut({**batch, "position_ids": counted.expand(3, 2, 24)})


def test_masks_are_read_of_the_functions_of_models():
    zero = torch.zeros(1, dtype=torch.int64)
    for function, mask in [
        (masking_utils.causal_mask_function, Mask(causal=True)),
        (masking_utils.bidirectional_mask_function, Mask()),
        (masking_utils.sliding_window_causal_mask_function(7), Mask(causal=True, window=7)),
        (masking_utils.sliding_window_bidirectional_mask_function(5), Mask(window=6)),
        (masking_utils.chunked_causal_mask_function(48, zero), Mask(causal=True, chunk=48)),
    ]:
        assert read(function) == mask
    blocks = masking_utils.blockwise_overlay(torch.zeros(1, 20))
    with pytest.raises(ValueError, match="the model's mask_function depends on data"):
        read(masking_utils.or_masks(masking_utils.causal_mask_function, blocks))
    with pytest.raises(ValueError, match="none of causal, sliding window and chunk"):
        read(lambda _row, _head, query, key: (query - key) % 2 == 0)


def test_what_cannot_be_equal_is_refused():
    context, batch = Context(None), batch_of()
    with pytest.raises(ValueError, match=r"Linear is no model of transformers; call context\.attention in its code"):
        context.transformers_(torch.nn.Linear(2, 2))
    t5 = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=10)
    with pytest.raises(ValueError, match="has an encoder"):
        context.transformers_(transformers.T5ForConditionalGeneration(t5))
    bart = transformers.BartConfig(d_model=8, decoder_layers=1, decoder_attention_heads=2, vocab_size=10)
    with pytest.raises(ValueError, match="BartForCausalLM takes no position_ids"):
        context.transformers_(transformers.BartForCausalLM(bart))
    routed = transformers.MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True)
    with pytest.raises(ValueError, match=r"adds a loss of its routers, .*; set config\.output_router_logits = False"):
        context.transformers_(transformers.MixtralForCausalLM(routed))
    roberta = transformers.RobertaConfig(**SIZES, is_decoder=True)
    with pytest.raises(ValueError, match=r"roberta\.embeddings counts positions from its padding index, .* to data"):
        context.transformers_(transformers.RobertaForCausalLM(roberta))
    with pytest.raises(
        ValueError,
        match=r"layers\.0 is StableLmDecoderLayer, .* keyword arguments to its StableLmAttention, .* for data, tensor",
    ):
        context.transformers_(transformers.StableLmForCausalLM(transformers.StableLmConfig(**SIZES)))
    capped = {**SIZES, "attn_logit_softcapping": 30.0}
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.self_attn caps .* \(attn_logit_softcapping=30\.0\).*sequence.* to"
    ):
        context.transformers_(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**capped)))
    context.check_transformers(
        transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**capped))  # which ignores it
    )
    model = context.transformers_(made("Llama"))
    mine, tokens = context.cut(batch)
    with pytest.raises(ValueError, match=r"call model\(\*\*batch, par_tokens=tokens\)"):
        model(**mine)
    with pytest.raises(ValueError, match="gives its attention a tensor 'extra', unknown here, which would be lost"):
        model(**mine, par_tokens=tokens, extra=torch.ones(1))
    with pytest.raises(ValueError, match="padding at the right alone"):
        context.cut({**batch, "attention_mask": torch.arange(24).expand(2, -1) > 3})
    with pytest.raises(ValueError, match="position_ids must count up from 0 in each document"):
        context.cut({**batch, "position_ids": torch.arange(1, 25).expand(2, -1)})
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention dropout is 0.1, .*; set it to 0"):
        model(**mine, par_tokens=tokens)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.ranks(2)
def test_model_without_places_computes_as_with_them(name):
    """Positions jump on the first rank of a zigzag cut alone, and transformers takes jumps for documents."""
    with ProcessGroups(Topology.from_config({"sequence": {"size": 2, "split": "zigzag"}}, 2)) as groups:
        context = Context(groups, block=4)
        model = context.transformers_(made(name))
        mine, tokens = context.cut(batch_of())
        jumps = bool((mine["position_ids"].diff() != 1).any())
        assert jumps == (groups.rank("sequence") == 0)
        expected = model(**mine, par_tokens=tokens).loss
        for left_out in [{"attention_mask"}, {"position_ids"}, {"attention_mask", "position_ids"}]:
            given = {key: value for key, value in mine.items() if key not in left_out}
            assert torch.equal(model(**given, par_tokens=tokens).loss, expected)
        labels = {key: mine[key] for key in ("labels", "shift_labels", "num_items_in_batch")}
        by_place = model(mine["input_ids"], None, mine["position_ids"], par_tokens=tokens, **labels)
        assert torch.equal(by_place.loss, expected)
        embedded = model.get_input_embeddings()(mine["input_ids"])
        assert torch.equal(model(inputs_embeds=embedded, par_tokens=tokens, **labels).loss, expected)


@pytest.mark.ranks(2)
def test_padding_on_one_rank_raises_on_all():
    with ProcessGroups(Topology.from_config({"sequence": {"size": 2}}, 2)) as groups:
        context = Context(groups)
        model = context.transformers_(made("Llama"))
        mine, tokens = context.cut(batch_of())
        mine["attention_mask"] = torch.ones_like(mine["input_ids"])  # by another hand
        model(**mine, par_tokens=tokens)
        if groups.rank("sequence") == 1:
            mine["attention_mask"][:, -2:] = 0
        with pytest.raises(RuntimeError, match="attention_mask has padding"):
            model(**mine, par_tokens=tokens)


@pytest.mark.ranks(2)
def test_what_a_mode_cannot_share_is_refused_before_anything_is_changed():
    with ProcessGroups(Topology.from_config({"sequence": {"size": 2, "mode": "ulysses"}}, 2)) as groups:
        context, model = Context(groups), made("Llama")
        context.check_heads(4)
        with pytest.raises(
            ValueError, match="heads 3 do not divide by 2 ranks of ulysses; use mode 'ring' or 'gather'"
        ):
            context.check_heads(3)
        context.check_transformers(model)
        assert model.config._attn_implementation == "sdpa"
        with pytest.raises(ValueError, match="Linear is no model of transformers"):
            context.check_transformers(torch.nn.Linear(2, 2))
        context.transformers_(model)
        with pytest.raises(ValueError, match=r"generate\(\) reads cached keys of earlier tokens"):
            model.generate(torch.ones(1, 3, dtype=torch.int64))
        mine, _ = context.cut(batch_of(), compare=False)
        again, _ = context.cut(batch_of())
        assert all(torch.equal(mine[name], again[name]) for name in again)
        whole = torch.nn.functional.pad(batch_of()["labels"], (0, 1), value=-100)[:, 1:]
        shifted, _ = context.cut({"input_ids": batch_of()["input_ids"], "shift_labels": whole})
        assert torch.equal(shifted["shift_labels"], mine["shift_labels"]), "given as targets, they are only cut"
        assert shifted["num_items_in_batch"] == mine["num_items_in_batch"] == 2 * 23
        if groups.rank("sequence") == 1:
            with pytest.raises(ValueError, match="padding at the right alone"):  # on this rank alone, and nobody waits
                context.cut({**batch_of(), "attention_mask": torch.arange(24).expand(2, -1) > 3}, compare=False)


def test_a_copy_has_the_context_and_another_model_has_none():
    context, plain = Context(None), made("Llama")
    model = context.transformers_(copy.deepcopy(plain))
    mine, tokens = context.cut(batch_of())
    assert plain.config._attn_implementation == "sdpa"
    loss, other = model(**mine, par_tokens=tokens).loss, copy.deepcopy(model)(**mine, par_tokens=tokens).loss
    assert loss.equal(other)
    torch.testing.assert_close(loss, plain(**batch_of()).loss, rtol=1e-6, atol=0, check_dtype=False)  # in float32


def attend(context, mask, **keywords):
    """Calls attention as a layer of a model does, with heads first."""
    q, module = torch.zeros(1, 2, 8, 4), torch.nn.Module()
    if context is not None:
        setattr(module, NAME, context)
    return _attention(module, q, q, q, mask, par_tokens=Context(None).tokens(8), **keywords)


def test_what_only_a_call_shows_is_refused():
    context, causal = Context(None), Mask(causal=True)
    for keywords, words in [
        ({"softcap": 30.0}, "Module uses softcap, which attention over ranks does not support"),
        ({"position_bias": torch.zeros(1)}, "Module uses position_bias, which attention over ranks does not support"),
        ({"output_attentions": True}, "Module uses output_attentions, which attention over ranks does not support"),
        ({"sliding_window": 5}, r"has a window of 5, but its mask is Mask\(causal=True\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            attend(context, causal, **keywords)
    for mask, window in ((Mask(causal=True, window=5), 5), (Mask(window=6), 5)):
        attend(context, mask, sliding_window=window, softcap=None, output_attentions=False)
    for mask in (None, torch.ones(1, 1, 8, 8)):
        with pytest.raises(
            ValueError, match="in the place of a mask of positions; masks of pairs and attention without"
        ):
            attend(context, mask)
    with pytest.raises(ValueError, match=r"Module has no context; call context\.transformers_\(model\)"):
        attend(None, causal)


def test_what_a_mask_of_a_call_cannot_say_is_refused():
    context, model = Context(None), made("Llama")
    context.transformers_(model)
    mine, tokens = context.cut(batch_of())
    cache = model(**mine, par_tokens=tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"past_key_values have tokens of earlier calls.*use_cache=False"):
        model(**mine, par_tokens=tokens, past_key_values=cache)
    hidden = {**mine, "attention_mask": (torch.arange(24) < 20).expand(2, -1).long()}
    with pytest.raises(RuntimeError, match=r"attention_mask has padding; documents say it: context\.cut makes them"):
        model(**hidden, par_tokens=tokens)
    unread = masking_utils.create_causal_mask(
        config=model.config,
        inputs_embeds=torch.zeros(2, 24, 32),
        attention_mask=mine["attention_mask"],
        past_key_values=None,
        position_ids=mine["position_ids"],
        or_mask_function=lambda _row, _head, query, key: key == query,
    )
    x = torch.zeros(2, 4, 24, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="LlamaAttention: the model adds an or_mask_function or and_mask_function, "):
        _attention(model.model.layers[0].self_attn, x, x, x, unread, par_tokens=tokens)


BOTH_WAYS = {  # windows of both, and of neither: what their masks show is read
    "Qwen2-MoE": lambda **more: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **{key: value for key, value in SIZES.items() if key != "head_dim"},
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            experts_implementation="eager",
            **more,
        )
    ),
    "ModernBERT": lambda **more: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
            num_hidden_layers=3,
            local_attention=6,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            **more,
        )
    ),
}


@pytest.mark.ranks(2)
def test_windows_of_every_convention_are_those_of_one_device():
    """A window that no layer has, which is 0 in the config; and those of encoders, which count themselves, or not."""
    windowed = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ids = batch_of()["input_ids"]
    with ProcessGroups(Topology.from_config({"sequence": {"size": 2, "mode": "gather"}}, 2)) as groups:
        context = Context(groups, block=4)
        for name, more in (("Qwen2-MoE", {}), ("Qwen2-MoE", windowed), ("ModernBERT", {})):
            torch.manual_seed(0)
            expected = BOTH_WAYS[name](**more).eval()(input_ids=ids).logits
            torch.manual_seed(0)
            model = context.transformers_(BOTH_WAYS[name](**more)).eval()
            mine, tokens = context.cut({"input_ids": ids})
            logits = context.gather(model(**mine, par_tokens=tokens).logits, tokens)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # fp32: sums in another order


def small(stem, kind, **more):
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    return getattr(transformers, f"{stem}{kind}")(getattr(transformers, f"{stem}Config")(**sizes, **more))


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small("Llama", "ForSequenceClassification", num_labels=1), "has a head that reads one token of each"),
        (lambda: small("Llama", "ForQuestionAnswering"), "LlamaForQuestionAnswering has a head that reads one token"),
        (lambda: small("Bert", "Model"), "BertModel has 'pooler'.*add_pooling_layer=False"),
        (
            lambda: transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**{**SIZES, **LATENT})),
            "is GlmMoeDsaAttention, whose code computes with its attention_mask",
        ),
    ],
    ids=["reward model", "question answering", "pooler", "indexer"],
)
def test_what_reads_several_tokens_is_refused_before_anything_changes(make, message):
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        Context(None).transformers_(model)
    assert model.config._attn_implementation == before
    assert not hasattr(model, NAME)


def test_logits_of_whole_rows_are_refused():
    """Of a class of one's own, whose name tells nothing."""

    class Scores(transformers.LlamaForCausalLM):
        def forward(self, *args, **keywords):
            output = super().forward(*args, **keywords)
            output.logits = output.logits[:, -1]
            return output

    model, context = Scores(transformers.LlamaConfig(**SIZES)), Context(None)
    Scores.forward.__signature__ = inspect.signature(transformers.LlamaForCausalLM.forward)
    with pytest.raises(ValueError, match=r"^Scores returned logits \[4, 50\] of full rows"):
        context.transformers_(model)


def test_layers_whose_attention_is_their_own_are_refused():
    class Own(transformers.LlamaForCausalLM):
        @classmethod
        def _can_set_attn_implementation(cls):
            return False

    model, context = Own(transformers.LlamaConfig(**SIZES)), Context(None)
    with pytest.raises(ValueError, match=r"Own does not let its attention be replaced; call context\.attention in it"):
        context.transformers_(model)
