"""LoRA adapters of peft around linears that are cut: trained, merged and refused as on one device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import PartialGradientReducer, communication_volumes, parallelization_of, parallelize
from par_testing import assert_equal_to_one_device, count_collectives, for_each, keep_fp64, storm

from .helpers import TEXT, assert_steps_equal, close, labels, live, make, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # peft asks by the older name
pytest.importorskip("transformers", minversion="5.4")
peft = pytest.importorskip("peft", minversion="0.21")

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "o_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "value", "dense"],
}


def adapted(family, *, model=None, **options):
    """A model with adapters, both of whose matrices are drawn."""
    config = peft.LoraConfig(
        **{
            "r": 3,
            "lora_alpha": 6,
            "target_modules": TARGETS.get(family),
            "fan_in_fan_out": family == "gpt2",
            **options,
        }
    )
    torch.manual_seed(0)
    inside = peft.get_peft_model(make(family) if model is None else model, config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in inside.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            parameter.data = parameter.data.double()  # buffers stay what `make` has left
    return inside


@pytest.mark.ranks([storm(2), 4], timeout=120)
def test_adapters_train_as_on_one_device():
    """Each family, and on 4 ranks, where heads of keys are copied, those that have fewer of them."""
    if dist.get_world_size() == 2:
        check_adapters(sequence=False, families=("qwen3", "phi3", "bert"))
        check_adapters(sequence=True, families=("llama", "gpt2"))
    else:
        check_adapters(sequence=False, families=("llama",))
        check_adapters(sequence=True, families=("qwen3", "phi3"))


@pytest.mark.storm
@pytest.mark.ranks([storm(2), 4], timeout=120)
def test_adapters_of_every_family_train_as_on_one_device():
    for sequence in (False, True):
        check_adapters(sequence=sequence, families=TARGETS)


def check_adapters(*, sequence, families):
    with live(sequence_parallel=sequence) as groups, keep_fp64():
        for family in families:
            whole, cut = adapted(family), adapted(family)
            assert parallelize(cut, groups) is cut
            try:
                assert_steps_equal(whole, cut, groups)
            except Exception as error:
                error.add_note(f"in the family {family}, sequence={sequence}")
                raise


@pytest.mark.ranks(2, timeout=240)
def test_dora_trains_and_merges_as_on_one_device():
    """The magnitudes lie like the output features; the norms of a row-parallel weight are summed over the ranks."""
    for sequence, family in ((False, "gpt2"), (True, "llama")):
        with live(sequence_parallel=sequence) as groups, keep_fp64():
            received, planned = [], []
            for use_dora in (False, True):
                cut = adapted(family, use_dora=use_dora)
                parts = communication_volumes(cut.get_base_model(), groups.topology, tokens().numel())
                planned.append(sum(part.elements for part in parts.values()))
                parallelize(cut, groups)
                with count_collectives() as counted:
                    cut(input_ids=tokens(), labels=labels(2)).loss.backward()
                received.append(counted.received())
                cut.zero_grad()
            # The plan counts a gradient of the embedding, too, which is frozen here.
            assert received[1] - received[0] == planned[1] - planned[0] > 0
            whole = adapted(family, use_dora=True)
            assert_steps_equal(whole, cut, groups)
            trained = [key for key, parameter in cut.named_parameters() if parameter.requires_grad]
            assert any("lora_magnitude_vector" in key for key in trained)
            whole, cut = (model.eval().merge_and_unload() for model in (whole, cut))
            with torch.no_grad():
                close(cut(input_ids=tokens()).logits, whole(input_ids=tokens()).logits)


@pytest.mark.ranks(2)
def test_open_regions_and_the_model_inside():
    """With a rule that leaves every Column to itself, A has a whole gradient."""
    with live() as groups, keep_fp64():
        whole, cut = adapted("llama"), adapted("llama")
        plan = {**parallelization_of(parallelize(make("llama"), groups)).plan, "model.layers.0.self_attn": "replicate"}
        parallelize(cut.get_base_model(), groups, plan)
        assert_steps_equal(whole, cut, groups)


@pytest.mark.ranks(2)
def test_merged_adapters_give_the_same_tokens():
    options = {"attention_mask": torch.ones(2, 8, dtype=torch.int64), "max_new_tokens": 4, "do_sample": False}
    with live(sequence_parallel=True) as groups, keep_fp64():
        whole, cut = adapted("llama").eval(), parallelize(adapted("llama"), groups).eval()
        expected = whole.generate(input_ids=tokens(), **options)
        assert torch.equal(cut.generate(input_ids=tokens(), **options), expected)
        merged = cut.merge_and_unload()
        assert torch.equal(merged.generate(input_ids=tokens(), **options), expected)


@pytest.mark.ranks(2)
def test_dropout_of_adapters_drops_alike_on_any_number_of_ranks():
    with ProcessGroups(Topology({"data": 2})) as one, keep_fp64():
        alone = parallelize(adapted("llama", lora_dropout=0.3), one)
        torch.manual_seed(5)
        expected = alone(input_ids=tokens(), labels=labels(2)).loss
        for sequence in (False, True):
            with live(sequence_parallel=sequence) as groups:
                cut = parallelize(adapted("llama", lora_dropout=0.3), groups)
                torch.manual_seed(5)
                close(cut(input_ids=tokens(), labels=labels(2)).loss, expected)


@pytest.mark.ranks(2)
def test_what_cannot_be_cut_is_refused(tmp_path):
    bad = {
        "an embedding, a head or experts": {"target_modules": ["lm_head"]},
        "an embedding, a head or": {"target_modules": ["embed_tokens"]},
        "DoRA with lora_dropout=0.1": {"use_dora": True, "lora_dropout": 0.1},
        "'lm_head' is trained in full next to its adapters .* but the plan shards it": {"modules_to_save": ["lm_head"]},
        "trains some rows of the embedding.*remove trainable_token_indices": {"trainable_token_indices": [3, 99]},
    }
    with live() as groups:
        for message, options in bad.items():
            with pytest.raises(TypeError, match=message):
                parallelize(adapted("llama", **options), groups)
        scaled = peft.get_peft_model(
            make("llama"), peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
        )
        with pytest.raises(TypeError, match=r"an adapter of the kind ia3 \(Linear\), which tensor ranks cannot split"):
            parallelize(scaled, groups)
        prompts = {
            "adds keys and values for all heads": (
                peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
            ),
            "'model.layers.1.self_attn' is AdaptedAttention of the kind adaption_prompt": peft.AdaptionPromptConfig(
                task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1
            ),
        }
        for message, config in prompts.items():
            model = peft.get_peft_model(make("llama"), config)
            before = sum(parameter.numel() for parameter in model.parameters())
            with pytest.raises(TypeError, match=message):
                parallelize(model, groups)
            assert sum(parameter.numel() for parameter in model.parameters()) == before
        cut = parallelize(make("llama"), groups)
        with pytest.raises(ValueError, match="was added after this model was sharded"):
            parallelize(adapted("llama", model=cut), groups)
        cut = parallelize(adapted("llama"), groups)
        with pytest.raises(RuntimeError, match=r"would write this rank's part alone; use Strategy\.save"):
            cut.save_pretrained(tmp_path)


@pytest.mark.ranks(2)
def test_a_classifier_whose_head_peft_trains_whole_equals_one_device():
    """peft adds the head of a classifier to modules_to_save by itself; the plan has no rule for that."""
    transformers = pytest.importorskip("transformers")

    def classifier():
        torch.manual_seed(0)
        model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TEXT, num_labels=3)).double()
        return adapted("llama", model=model, task_type="SEQ_CLS", target_modules=["q_proj", "down_proj"])

    for sequence in (False, True):
        with live(sequence_parallel=sequence) as groups, keep_fp64():
            whole, cut = classifier(), parallelize(classifier(), groups)
            for model in (whole, cut):
                model(input_ids=tokens(), labels=torch.tensor([0, 2])).loss.backward()
            PartialGradientReducer(cut, groups).handle_gradient()
            assert cut.score.modules_to_save["default"].weight.grad is not None
            reason = "fp64 sums in another order; rotary frequencies are fp32 on both sides"
            assert_equal_to_one_device(cut, whole, gradients=True, rtol=1e-10, atol=1e-10, reason=reason)


@pytest.mark.ranks(2)
def test_weight_gradients_can_be_put_off():
    """Those of cut linears whose input was gathered, and of weights that lie the other way round."""
    for family in ("llama", "gpt2"):
        with live(sequence_parallel=True) as groups, keep_fp64():
            plain, cut = (parallelize(make(family), groups) for _ in range(2))
            later = []
            for module in cut.modules():
                if isinstance(module, nn.Linear) and hasattr(module, "weight_grad_hook"):
                    module.weight_grad_hook = later.append
            for model in (plain, cut):
                model(input_ids=tokens(), labels=labels(2)).loss.backward()
            for listened, gradient in enumerate(later):
                gradient(listened=bool(listened % 2))
            for model in (plain, cut):
                PartialGradientReducer(model, groups).handle_gradient()
            for (name, here), (_, there) in zip(cut.named_parameters(), plain.named_parameters(), strict=True):
                torch.testing.assert_close(here.grad, there.grad, rtol=1e-12, atol=1e-14, msg=name)


DEALT = {
    "own axis": {"expert": 2},
    "folded": {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}},
}
OF_ATTENTION = {"target_modules": ["q_proj", "o_proj"]}


def adapted_mixture(**options):
    model = make("mixtral", output_router_logits=False)
    return adapted("mixtral", model=model, **{**OF_ATTENTION, **options})


@pytest.mark.ranks(2)
@for_each(way=DEALT)
def test_adapters_beside_dealt_experts_train_as_on_one_device(way):
    """Experts and routers are frozen; where ranks see other tokens, each takes a row of the batch. Recomputed, too."""
    with ProcessGroups(Topology.from_config(DEALT[way], 2)) as groups, keep_fp64():
        whole, cut = adapted_mixture(), adapted_mixture()
        cut.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        parallelize(cut, groups)
        axes = ("data", "sequence", "expert")
        parts = groups.size(axes)
        rows = slice(None) if parts == 1 else slice(dist.get_rank(), dist.get_rank() + 1)
        whole(input_ids=tokens(), labels=tokens()).loss.backward()
        cut(input_ids=tokens()[rows], labels=tokens()[rows]).loss.backward()
        PartialGradientReducer(cut, groups).handle_gradient()
        for name, parameter in cut.named_parameters():
            reference = whole.get_parameter(name)
            assert (parameter.grad is None) == (not reference.requires_grad), name
            if parameter.grad is not None:
                if parts > 1:
                    dist.all_reduce(parameter.grad)
                for box in sharding_of(parameter).boxes:
                    close(box.of(parameter.grad) / parts, reference.grad[box.slices])


@pytest.mark.ranks(2)
@for_each(way=DEALT)
def test_adapters_on_dealt_experts_are_refused(way):
    options = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}
    with ProcessGroups(Topology.from_config(DEALT[way], 2)) as groups, keep_fp64():
        model = adapted_mixture(**options)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(
            TypeError, match=r"'model.layers.0.mlp.experts' has an adapter \(ParamWrapper\) on .* experts"
        ):
            parallelize(model, groups)
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, old)
