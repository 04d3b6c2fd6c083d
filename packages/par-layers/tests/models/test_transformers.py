"""What models of transformers do beside a forward and a backward, once they are cut."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology
from par_layers import (
    ModelShape,
    PartialGradientReducer,
    communication_volumes,
    layer_cost,
    parallelization_of,
    parallelize,
    verify_plan,
)
from par_testing import assert_equal_to_one_device, count_collectives, keep_fp64, storm

from .helpers import (
    VOCABULARY,
    assert_steps_equal,
    close,
    labels,
    live,
    make,
    tokens,
)

transformers = pytest.importorskip("transformers", minversion="5.4")

REASON = "fp64 sums in another order"


def pair(groups, family="llama", plan="auto", *, logits="auto", **options):
    whole, cut = make(family, **options), make(family, **options)
    return whole, parallelize(cut, groups, plan, logits=logits)


@pytest.mark.ranks(2)
def test_logits_are_cut_where_labels_come_in_training():
    with live() as groups, keep_fp64():
        whole, cut = pair(groups)
        assert cut(input_ids=tokens()).logits.shape[-1] == VOCABULARY
        with parallelization_of(cut).sharded_logits():
            padding = cut(input_ids=tokens(), labels=labels(2)).logits[..., 50:]
        assert padding.shape[-1] == 1
        assert padding.isneginf().all() == (dist.get_rank() == 1)
        cut.eval()
        whole.eval()
        evaluated = cut(input_ids=tokens(), labels=labels(2))
        assert evaluated.logits.shape[-1] == VOCABULARY
        close(evaluated.loss, whole(input_ids=tokens(), labels=labels(2)).loss)
        whole, cut = pair(groups, logits="full")
        assert_steps_equal(whole, cut, groups)
        assert cut(input_ids=tokens(), labels=labels(2)).logits.shape[-1] == VOCABULARY
        whole, cut = pair(groups, logits="sharded")
        assert_steps_equal(whole, cut, groups)
        with pytest.raises(RuntimeError, match=r"generate needs full logits.*logits='auto'"):
            cut.generate(tokens())


@pytest.mark.ranks(2)
def test_logits_read_in_training_with_labels_are_full():
    """Metrics, distillation and a second loss read the logits of a step whose loss came from shards."""
    with live() as groups, keep_fp64():
        whole, cut = pair(groups)
        expected, found = whole(input_ids=tokens(), labels=labels(2)), cut(input_ids=tokens(), labels=labels(2))
        with count_collectives() as counted:
            assert found.logits.shape == expected.logits.shape
            assert found.logits.size(-1) == VOCABULARY
            assert found.logits.half().detach().dtype == torch.float16
            assert found.logits.requires_grad
            assert "shape=[2, 8, 101]" in repr(found.logits)
        assert counted.calls() == 0
        with count_collectives() as counted, torch.no_grad():
            assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
            assert torch.equal(found["logits"][..., -1:].topk(1).values, found[1][:, :, -1:])
        assert counted.calls() == 1
        close(found.logits, expected.logits)
        close(found.logits.detach().softmax(-1), expected.logits.detach().softmax(-1))
        known = parallelization_of(cut)
        close(known.cross_entropy(found.logits, labels(2))[0], known.cross_entropy(expected.logits, labels(2))[0])
        close(known.gather(found.logits), expected.logits)
        teacher = torch.randn(2, 8, VOCABULARY, generator=torch.Generator().manual_seed(0))
        for model in (whole, cut):
            output = model(input_ids=tokens(), labels=labels(2))
            (output.loss + nn.functional.mse_loss(output.logits, teacher.to(output.logits))).backward()
        PartialGradientReducer(cut, groups).handle_gradient()
        close(cut.lm_head.weight.grad[:5], whole.lm_head.weight.grad[51 * dist.get_rank() :][:5])
        inside = cut.model.layers[0].input_layernorm.weight
        close(inside.grad, whole.model.layers[0].input_layernorm.weight.grad)
        pair_of = cut(input_ids=tokens(), labels=labels(2), return_dict=False)
        assert torch.equal(pair_of[1].argmax(-1), expected.logits.argmax(-1))


@pytest.mark.ranks(2)
def test_the_losses_other_words():
    with live() as groups, keep_fp64():
        whole, cut = pair(groups)
        for family, options in {
            "llama": {"num_items_in_batch": torch.tensor(7)},
            "gpt2": {"shift_labels": labels(4)},
            "bert": {},
        }.items():
            whole, cut = pair(groups, family)
            assert_steps_equal(whole, cut, groups, **options)
        with pytest.raises(ValueError, match="target 101 is no class"):
            pair(groups)[1](input_ids=tokens(), labels=torch.full((2, 8), VOCABULARY))
        ignored = torch.full((2, 8), -100)
        assert pair(groups)[1](input_ids=tokens(), labels=ignored).loss.isnan()  # as on one device


def checkpoint(model, *, reentrant):
    """Turns on activation checkpointing, by the name that every release of transformers has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


@pytest.mark.ranks(2)
def test_checkpointing_of_both_kinds():
    """Each kind with whole and cut sequences, in each family."""
    for sequence in (False, True):
        with live(sequence_parallel=sequence) as groups, keep_fp64():
            for family, reentrant in (("llama", sequence), ("deepseek", not sequence)):
                whole, cut = pair(groups, family)
                checkpoint(cut, reentrant=reentrant)
                assert_steps_equal(whole, cut, groups)


@pytest.mark.ranks(2)
def test_half_precision_and_a_deep_copy():
    for sequence in (False, True):
        with live(sequence_parallel=sequence) as groups:
            whole, cut = pair(groups, dtype=torch.bfloat16)
            cut = copy.deepcopy(cut)
            expected = whole(input_ids=tokens(), labels=labels(2))
            here = cut(input_ids=tokens(), labels=labels(2))
            assert here.loss.dtype == torch.float32
            close(here.loss, expected.loss, 1e-2)  # bf16 has three digits
            expected.loss.backward()
            here.loss.backward()
            PartialGradientReducer(cut, groups).handle_gradient()
            norms = [
                sum(
                    parameter.grad.float().square().sum()
                    for name, parameter in model.named_parameters()
                    if "norm" in name
                )
                for model in (whole, cut)
            ]
            close(norms[1], norms[0], 5e-2)


@pytest.mark.ranks(2)
def test_autocast():
    with live() as groups:
        whole, cut = pair(groups, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            expected, here = (model(input_ids=tokens(), labels=labels(2)) for model in (whole, cut))
        close(here.loss, expected.loss, 1e-2)  # bf16 has three digits
        here.loss.backward()
        assert cut.model.layers[0].mlp.up_proj.weight.grad.dtype == torch.float32


# Dropout

DROPS = {"resid_pdrop": 0.3, "embd_pdrop": 0.3}


def losses_with_dropout(groups, **options):
    """Two losses of a GPT-2 and the gradients of both, and where the generator is then."""
    with keep_fp64():
        cut = parallelize(make("gpt2", **options), groups)
        torch.manual_seed(5)
        losses = []
        for seed in (2, 3):
            losses.append(cut(input_ids=tokens(), labels=labels(seed)).loss)
            losses[-1].backward()
        PartialGradientReducer(cut, groups).handle_gradient()
        return cut, torch.stack(losses), torch.get_rng_state()


@pytest.mark.ranks(2)
def test_dropout_drops_alike_on_any_number_of_ranks():
    with ProcessGroups(Topology({"data": 2})) as one:
        for options in (DROPS, {**DROPS, "attn_pdrop": 0.3}):
            alone, expected, state = losses_with_dropout(one, **options)
            for sequence in (False, True):
                with live(sequence_parallel=sequence) as groups:
                    cut, losses, after = losses_with_dropout(groups, **options)
                    assert torch.equal(after, state)
                    if "attn_pdrop" in options:  # attention drops other weights on each rank
                        assert not torch.allclose(losses, expected)
                        continue
                    close(losses, expected)
                    whole = dict(alone.named_parameters())
                    for name, parameter in cut.named_parameters():
                        if parameter.shape == whole[name].shape:
                            close(parameter.grad, whole[name].grad)


@pytest.mark.ranks(2)
def test_dropout_of_attention_differs_between_ranks_and_is_replayed():
    seen = []

    def attend(module, query, key, value, mask, dropout=0.0, **options):
        seen.append(torch.rand(()).item())  # what a dropout would draw
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, **options
        )

    transformers.AttentionInterface.register("test_dropout", attend)
    with live() as groups:
        options = {"attn_pdrop": 0.3, **DROPS, "attn_implementation": "test_dropout"}
        _, plain, _ = losses_with_dropout(groups, **options)
        mine = torch.tensor(seen)
        theirs = mine.clone()
        dist.all_reduce(theirs)
        assert not torch.any(theirs == 2 * mine)
        with keep_fp64():
            for reentrant in (False, True):
                cut = parallelize(make("gpt2", **options), groups)
                checkpoint(cut, reentrant=reentrant)
                torch.manual_seed(5)
                del seen[:]
                loss = cut(input_ids=tokens(), labels=labels(2)).loss
                close(loss, plain[0])
                first = list(seen)
                loss.backward()
                assert seen[len(first) :] == first[::-1]  # recomputed from the last layer on


# Collectives

ROUTED = {
    "mixtral": {"expert_layers": 2, "experts_per_token": 2},
    "deepseek": {"expert_layers": 1, "experts_per_token": 2, "shared_experts": 1, "latent": True},
}


COUNTED = {
    (2, False): ("llama", "mixtral"),
    (2, True): ("llama", "mixtral"),
    (4, False): ("llama", "phi3", "gpt2"),
    (4, True): ("llama", "deepseek", "mixtral"),
}
"""Families by the number of ranks, and by whether the sequence is cut."""


@pytest.mark.ranks([storm(2), 4])
def test_collectives_are_what_the_formulas_say():
    p, m = dist.get_world_size(), 16
    for sequence in (False, True):
        with live(sequence_parallel=sequence) as groups, keep_fp64():
            for family in COUNTED[p, sequence]:
                cut = make(family)
                parts = communication_volumes(cut, groups.topology, m)
                parallelize(cut, groups)
                with count_collectives() as counted:
                    cut(input_ids=tokens(), labels=labels(2)).loss.backward()
                assert counted.received() == sum(part.elements for part in parts.values()), family
                assert counted.calls() == sum(part.calls for part in parts.values()), family
                experts = {
                    "mixtral": {"expert_layers": 2},
                    "deepseek": {"expert_layers": 1, "shared_experts": 1, "latent": True},
                }
                routed = {**experts[family], "experts_per_token": 2} if family in experts else {}
                shape = ModelShape(tokens=m, width=32, layers=2, **routed)
                expected = layer_cost("1d", {"tensor": p}, shape, sequence_parallel=sequence)
                assert counted.received() == expected.each, family
                with count_collectives() as once:
                    PartialGradientReducer(cut, groups).handle_gradient()
                if family == "llama" and p == 2:
                    assert once.received() == expected.once


# What is refused


@pytest.mark.ranks(2)
def test_calls_that_would_be_silently_wrong(tmp_path):
    with live() as groups:
        _, cut = pair(groups)
        with pytest.raises(RuntimeError, match=r"save_pretrained would write .* use par_checkpoint.save\(path"):
            cut.save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match="resize_token_embeddings would make whole weights"):
            cut.resize_token_embeddings(120)
        assert cut.tp_plan
        assert not cut._tp_size
    with live(sequence_parallel=True) as groups:
        _, cut = pair(groups)
        with pytest.raises(ValueError, match="output_hidden_states=True gives activations that are cut"):
            cut(input_ids=tokens(), output_hidden_states=True)
        with pytest.raises(ValueError, match="output_hidden_states=True gives activations that are cut"):
            cut.model(input_ids=tokens(), output_hidden_states=True)  # without the head, as in a reward model
        with pytest.raises(ValueError, match=r"has 1 tokens, .* To generate, call model.eval\(\)"):
            cut.train()(input_ids=tokens(length=1))
        with torch.no_grad():
            assert len(cut.eval()(input_ids=tokens(), output_hidden_states=True).hidden_states) == 3
            for called in (cut, cut.model):
                with pytest.raises(ValueError, match="output_attentions=True gives the heads of this rank alone"):
                    called(input_ids=tokens(), output_attentions=True)
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
        )
        plan = {"encoder.block.*.layer.1.DenseReluDense.wi": "colwise"}
        with pytest.raises(TypeError, match="an encoder and a decoder"):
            parallelize(model, groups, plan)


@pytest.mark.ranks(2)
def test_models_that_have_no_plan_or_are_cut_by_others():
    with live() as groups:
        sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
        model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=32, word_embed_proj_dim=16, **sizes))
        with pytest.raises(TypeError, match=r"OPTForCausalLM has no plan .*register_plan"):
            parallelize(model, groups)
        model = make("llama")
        model._tp_size = 2
        with pytest.raises(TypeError, match="transformers has cut this LlamaForCausalLM"):
            parallelize(model, groups)
        model = make("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
        with pytest.raises(ValueError, match=r"q_proj.weight': 3 units of 8 features do not divide by 2 ranks"):
            parallelize(model, groups)


@pytest.mark.ranks(2)
def test_rules_that_match_nothing_in_this_size():
    with live() as groups:
        known = parallelization_of(pair(groups, "qwen3 with experts", mlp_only_layers=[])[1])
    assert known.unmatched == tuple(f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down"))
    assert "rules that match nothing here: model.layers.*.mlp.gate_proj" in known.describe()


@pytest.mark.ranks(2)
def test_a_plan_for_a_model_of_transformers_is_proven():
    with live() as groups, keep_fp64():
        batch = {"input_ids": tokens(), "labels": labels(2)}
        assert verify_plan(lambda: make("qwen3"), groups, batch).worst < 1e-10
        without = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
        with pytest.raises(RuntimeError):  # the gate's features do not meet the others
            verify_plan(lambda: make("qwen3"), groups, batch, without)


@pytest.mark.ranks(1)
def test_one_rank_is_the_model_as_it_was():
    with live() as groups:
        whole, cut = pair(groups)
        assert type(cut.lm_head) is nn.Linear
        expected = whole(input_ids=tokens(), labels=labels(2)).loss
        assert torch.equal(cut(input_ids=tokens(), labels=labels(2)).loss, expected)
        assert_equal_to_one_device(cut, whole)
