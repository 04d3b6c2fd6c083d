"""Models of transformers that are cut, as scripts use them: seeds by rank, layers in eval(), heads called alone."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_layers import PartialGradientReducer, parallelize
from par_testing import assert_equal_to_one_device, keep_fp64

from .helpers import TEXT, VOCABULARY, close, labels, live, make, tokens

transformers = pytest.importorskip("transformers", minversion="5.4")

REASON = "fp64 sums in another order"


def classifier(**options):
    config = transformers.LlamaConfig(**{**TEXT, "num_labels": 3, **options})
    return transformers.LlamaForSequenceClassification(config)


@pytest.mark.ranks(2)
def test_every_rank_receives_the_weights_of_the_first():
    """A head that each process draws, a buffer that is saved, and weights that are cut."""

    def drawn(seed):
        torch.manual_seed(seed)
        model = classifier().double()
        model.register_buffer("bias", torch.rand(3))
        return model

    for sequence in (False, True):
        with live(sequence_parallel=sequence) as groups, keep_fp64():
            whole, cut = drawn(0), parallelize(drawn(dist.get_rank()), groups)
            assert_equal_to_one_device(cut, whole, rtol=0, atol=0, reason="the same numbers")
            assert torch.equal(cut.bias, whole.bias)
            close(cut(input_ids=tokens()).logits, whole(input_ids=tokens()).logits)


@pytest.mark.ranks(2)
def test_a_model_on_meta_beside_a_drawn_one_is_refused():
    with live() as groups:
        with torch.device("meta" if dist.get_rank() else "cpu"):
            model = classifier()
        with pytest.raises(ValueError, match="plans or models to cut"):
            parallelize(model, groups)


@pytest.mark.ranks(2)
def test_generate_draws_the_same_tokens_on_every_rank():
    """With other seeds on each rank; the first one's text is that of one device, and seeds go on as they were."""
    options = {"attention_mask": torch.ones(2, 8, dtype=torch.int64), "do_sample": True, "temperature": 2.0}
    with live() as groups, keep_fp64():
        whole, cut = make("llama").eval(), parallelize(make("llama"), groups).eval()
        # Transformers keeps hash() of a config, and each process of torchrun hashes texts by a seed of its own.
        cut.generation_config._original_object_hash = dist.get_rank()
        for ends in ([], list(range(2, 14))):
            for model in (cut, copy.deepcopy(cut)):
                torch.manual_seed(0)
                expected = whole.generate(tokens(), max_new_tokens=20, eos_token_id=ends, **options)
                torch.manual_seed(dist.get_rank())
                texts = model.generate(tokens(), max_new_tokens=20, eos_token_id=ends, **options)
                assert torch.equal(texts, expected)
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        cut.generate(tokens(), max_new_tokens=4, **{**options, "do_sample": False})
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.ranks(2)
def test_generate_refuses_other_prompts_on_each_rank():
    with live() as groups:
        cut = parallelize(make("llama", dtype=torch.float32), groups).eval()
        with pytest.raises(ValueError, match=r"prompts or options of generate\(\).*the same"):
            cut.generate(tokens(dist.get_rank() + 1), max_new_tokens=2)
        with pytest.raises(ValueError, match=r"prompts or options of generate\(\)"):
            cut.generate(tokens(), max_new_tokens=2 + dist.get_rank())


@pytest.mark.ranks(2)
def test_the_head_called_alone_gives_whole_logits():
    with live() as groups, keep_fp64():
        cut = parallelize(make("llama"), groups)
        hidden = torch.ones(2, 4, 32, dtype=torch.float64)
        expected = make("llama").lm_head(hidden)
        for before in ({"labels": labels(2)}, {}, {"labels": labels(2)}):
            logits = cut(input_ids=tokens(), **before).logits
            assert logits.shape[-1] == VOCABULARY
            close(cut.lm_head(hidden), expected)
        with pytest.raises(ValueError, match="target 101 is no class"):
            cut(input_ids=tokens(), labels=torch.full((2, 8), VOCABULARY))
        close(cut.lm_head(hidden), expected)


def modes(model, way):
    """Sets the modes of a model and of its parts."""
    model.train(way != "a layer in train")
    if way == "a layer in eval":
        model.model.layers[0].eval()
    elif way == "a layer in train":
        model.model.layers[1].train()
    elif way == "attention in eval":
        model.model.layers[1].self_attn.eval()
    elif way == "a projection in eval":
        model.model.layers[0].mlp.down_proj.eval()
    return model


@pytest.mark.ranks(2)
def test_layers_of_another_mode_than_the_model():
    """Activations are cut, or not, by the model's beginning; with a gradient and without, with the head and without."""
    ways = ("a layer in eval", "a layer in train", "attention in eval", "a projection in eval")
    with live(sequence_parallel=True) as groups, keep_fp64():
        for family in ("llama", "mixtral"):
            for way in ways if family == "llama" else ways[:2]:
                whole, cut = make(family), parallelize(make(family), groups)
                for model in (whole, cut):
                    modes(model, way if "projection" not in way or family == "llama" else ways[0])
                with torch.no_grad():
                    close(cut(input_ids=tokens()).logits, whole(input_ids=tokens()).logits)
                    inside = [model.model(input_ids=tokens()).last_hidden_state for model in (cut, whole)]
                    close(*inside)
                outputs = [model(input_ids=tokens(), labels=labels(2)) for model in (whole, cut)]
                for each in outputs:
                    each.loss.backward()
                PartialGradientReducer(cut, groups).handle_gradient()
                close(outputs[1].loss, outputs[0].loss)
                assert_equal_to_one_device(cut, whole, gradients=True, rtol=1e-10, atol=1e-10, reason=REASON)


@pytest.mark.ranks(2)
def test_dropout_that_stays_on_drops_alike_where_nothing_is_cut():
    """Monte Carlo dropout: the model in eval(), its dropouts in train(), no gradient."""

    def outputs(groups):
        model = parallelize(make("gpt2", resid_pdrop=0.3, embd_pdrop=0.3), groups).eval()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        torch.manual_seed(5)
        with torch.no_grad():
            return model(input_ids=tokens()).logits

    with keep_fp64(), live() as plain, live(sequence_parallel=True) as groups:
        close(outputs(groups), outputs(plain))


@pytest.mark.ranks(2)
def test_dropout_of_ranks_with_other_seeds_is_refused():
    """In the first forward in training, on every rank; a model that drops nothing may be seeded by rank."""
    with live() as groups:
        for options in ({"resid_pdrop": 0.3}, {"attn_pdrop": 0.3}):
            cut = parallelize(make("gpt2", dtype=torch.float32, **options), groups)
            torch.manual_seed(dist.get_rank())
            cut.eval()
            cut(input_ids=tokens())
            cut.train()
            for _ in range(2):
                with pytest.raises(ValueError, match=r"other random numbers for dropout.*such as seed \+ data rank"):
                    cut(input_ids=tokens())
            torch.manual_seed(0)
            cut(input_ids=tokens())
            torch.manual_seed(dist.get_rank())
        parallelize(make("gpt2", dtype=torch.float32), groups)(input_ids=tokens())


@pytest.mark.ranks(2)
def test_generate_in_training_mode_cuts_no_sequence():
    """As online reinforcement learning does between steps; 7 tokens and then one at a time divide by no ranks."""
    options = {"attention_mask": torch.ones(2, 7, dtype=torch.int64), "max_new_tokens": 4, "do_sample": False}
    with live(sequence_parallel=True) as groups, keep_fp64():
        whole, cut = make("llama").train(), parallelize(make("llama"), groups).train()
        for _ in range(2):
            expected = whole.generate(tokens(length=7), **options)
            assert torch.equal(cut.generate(tokens(length=7), **options), expected)
            losses = [model(input_ids=tokens(), labels=labels(2)).loss for model in (whole, cut)]
            close(*losses)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # peft asks by the older name
def test_adapters_are_switched_off_and_over_as_on_one_device():
    """As for the reference of DPO, which is the model without its adapter, or with another one."""
    peft = pytest.importorskip("peft", minversion="0.21")

    def adapted():
        model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj", "up_proj"]))
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
                parameter.data = parameter.data.double()
        return model

    for sequence in (False, True):
        with live(sequence_parallel=sequence) as groups, keep_fp64():
            whole, cut = adapted(), parallelize(adapted(), groups)
            with whole.disable_adapter(), cut.disable_adapter():
                close(cut(input_ids=tokens()).logits, whole(input_ids=tokens()).logits)
            for adapter in ("other", "default"):
                outputs = []
                for model in (whole, cut):
                    model.set_adapter(adapter)
                    outputs.append(model(input_ids=tokens(), labels=labels(2)).loss)
                    outputs[-1].backward()
                close(*outputs)
            PartialGradientReducer(cut, groups).handle_gradient()
            assert_equal_to_one_device(cut, whole, gradients=True, rtol=1e-10, atol=1e-10, reason=REASON)


@pytest.mark.ranks(2)
def test_plan_auto_without_layers_warns():
    """Transformers' plan of some families has the head alone."""
    with live() as groups:
        config = transformers.DiffLlamaConfig(**TEXT)
        with pytest.warns(UserWarning, match=r"plan of DiffLlamaForCausalLM shards no layer"):
            parallelize(transformers.DiffLlamaForCausalLM(config), groups)
