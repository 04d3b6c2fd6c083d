"""Plans of Hugging Face Transformers models, from their config, on the meta device."""

from dataclasses import replace

import pytest
import torch

from par_groups import Topology
from par_layers import plan_shardings
from par_plan import Machine, PretrainedShape, TrainingJob, model_flops, predict
from par_plan.models.pretrained import shares
from par_plan.models.pretrained.structure import Structure
from par_plan.report import PlanReport
from par_plan.search import configurations, search_configurations
from par_plan.shape import tensor_split

transformers = pytest.importorskip("transformers", minversion="5.4")

TEXT = {
    "vocab_size": 101,  # divides by neither 2 nor 4
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
CONTEXT, ROWS = 16, 4
GLOO = Machine(gloo=True)
IN_1D = {"size": 2, "mode": "1d"}
IN_SEQUENCE = {**IN_1D, "sequence_parallel": True}


OWN = {
    "Phi3": {"pad_token_id": 0, "eos_token_id": 1},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "OPT": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "GPT2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "num_key_value_heads": None},
}


def make(family="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TEXT, **OWN.get(family, {}), **options})
    return transformers.AutoModelForCausalLM.from_config(config)


def on_meta(family="Llama", **options):
    with torch.device("meta"):
        return make(family, **options)


def shape(family="Llama", packed=False, **options):
    return PretrainedShape(on_meta(family, **options), context=CONTEXT, packed=packed)


def topology(world, **parallel):
    return Topology.from_config(parallel, world)


JOB = TrainingJob(batch=ROWS)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text", "Phi3", "Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_of_every_tensor_rank_are_those_that_cuts_gives(family, tied):
    planned = shape(family, tie_word_embeddings=tied)
    assert planned.parameters == sum(each.numel() for each in on_meta(family, tie_word_embeddings=tied).parameters())
    for tensor in (IN_1D, IN_SEQUENCE, {**IN_1D, "size": 4, "kv_heads": 2}):
        world = topology(tensor["size"], tensor=tensor)
        made = predict(planned, world, JOB)
        records = plan_shardings(on_meta(family, tie_word_embeddings=tied), world, 0)
        elements = sum(torch.Size(box.size).numel() for record in records.values() for box in record.boxes)
        assert made.memory.parameters == 4 * elements


@pytest.mark.parametrize("tied", [False, True])
def test_stages_add_up_to_the_model(tied):
    planned = shape("Qwen3Moe", tie_word_embeddings=tied)
    for schedule, ranks in (("1f1b", 3), ("interleaved", 2), ("zb_v", 2)):
        job = TrainingJob(batch=8, schedule=schedule, microbatches=4)
        made = predict(planned, topology(ranks, pipeline=ranks), job)
        twice = tied and schedule != "zb_v"  # whose first rank has both ends
        assert sum(each.parameters for each in made.ranks) == planned.parameters + twice * 101 * 64, schedule


@pytest.mark.parametrize("tensor", [{}, IN_1D, IN_SEQUENCE], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text", "GPT2", "Qwen3Moe"])
def test_layers_of_one_kind_are_looked_at_once_and_say_what_all_of_them_do(family, tensor, monkeypatch):
    structure, cut = Structure(on_meta(family, num_hidden_layers=9)), tensor_split(topology(2, tensor=tensor or 1))
    looked = []
    monkeypatch.setattr(
        shares, "plan_shardings", lambda model, *given: looked.append(model) or plan_shardings(model, *given)
    )
    found = shares.look(structure, cut)
    assert [name for name, _ in structure.sampled.get_submodule(structure.layers).named_children()] == [
        str(number) for number in structure.samples
    ]
    structure.sampled = structure.model
    assert found == shares.look(structure, cut)
    layers = [len(model.get_submodule(structure.layers)) for model in looked]
    assert layers == ([len(structure.samples), 9] if tensor else [])


@pytest.mark.filterwarnings("ignore:plan='auto'. the plan of GptOssForCausalLM shards")
@pytest.mark.parametrize(("family", "times"), [("Mixtral", 2), ("GptOss", 1)])
def test_experts_without_values(family, times):
    """Where a token's experts are chosen by values, as many as it goes to are counted; GPT-OSS' are not cut."""
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "pad_token_id": 0}
    if not on_meta(family, **options).tp_plan:
        pytest.skip(f"transformers {transformers.__version__} has no plan for {family}")
    two, four = (
        predict(shape(family, **options, intermediate_size=size), topology(2, tensor=IN_1D), JOB).memory
        for size in (96, 192)
    )
    inner = 5 * ROWS * CONTEXT * 2 * 4 * 96 * 4  # gate and up, the activated gate, the product; for two experts
    assert four.activations - two.activations == inner / times


@pytest.mark.parametrize(
    ("family", "options", "parallel", "message"),
    [
        (
            "OPT",
            {},
            {"tensor": IN_1D},
            "no plan .* register it with register_plan",
        ),
        ("Mamba", {}, {"pipeline": 2}, "no complete _pp_plan, and its layers 'backbone.layers' cannot be split"),
        ("Llama", {}, {"tensor": {"size": 4, "mode": "2d"}}, "takes whole; use mode 1d"),
        ("Llama", {}, {"tensor": {"size": 3, "mode": "1d"}}, "do not divide by 3 ranks"),
        ("Llama", {"max_position_embeddings": 15}, {"tensor": IN_SEQUENCE}, "context is 15 tokens"),
        ("Llama", {}, {"pipeline": 6}, "5 layers cannot be cut into the 6 stages"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_remedy(family, options, parallel, message):
    sizes = {axis: one if isinstance(one, int) else one["size"] for axis, one in parallel.items()}
    (world,) = sizes.values()
    context = min(CONTEXT, options.get("max_position_embeddings", CONTEXT))
    planned = PretrainedShape(on_meta(family, **options), context=context)
    with pytest.raises(ValueError, match=message):
        predict(planned, topology(world, **parallel), replace(JOB, microbatches=ROWS, batch=8))


def test_configurations_are_those_that_the_model_allows():
    found = [(each.size("pipeline"), each.size("tensor")) for each, _ in configurations(shape(), 4, JOB)]
    assert {pipeline for pipeline, _ in found} == {1, 2, 4}
    assert {tensor for _, tensor in found} == {1, 2, 4}  # of four, two have a copy of a head of keys each
    alone = [(each.size("pipeline"), each.size("tensor")) for each, _ in configurations(shape("Mamba"), 4, JOB)]
    assert {pipeline for pipeline, _ in alone} == {1}


def test_a_model_that_was_cut_and_a_context_without_tokens_are_refused():
    model = make()
    model.lm_head.weight.par_sharding = None
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is sharded already; plan the model before"):
        PretrainedShape(model)
    with pytest.raises(ValueError, match="context is 0; it"):
        PretrainedShape(on_meta(), context=0)


def test_images_that_a_model_does_not_take_are_refused():
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "num_hidden_layers": 2})
    siglip = transformers.SiglipVisionConfig(hidden_size=32, num_attention_heads=2, image_size=8, patch_size=4)
    fixed = transformers.LlavaConfig(vision_config=siglip, text_config=transformers.LlamaConfig(**TEXT))
    with torch.device("meta"):
        dynamic = transformers.Qwen2_5_VLForConditionalGeneration(config)
        fixed = transformers.LlavaForConditionalGeneration(fixed)
    for model, options, message in (
        (on_meta(), {"images": 1}, "images=1: LlamaForCausalLM has no get_image_features, so it reads no images"),
        (on_meta(), {"images": -1}, "images=-1: it must be 0 or more"),
        (on_meta(), {"image_size": (8, 8)}, "images=0: it must be 0 or more, and positive with image_size"),
        (dynamic, {"images": 1, "image_size": (12, 8)}, r"image_size=\(12, 8\): .* pass multiples of 8 pixels"),
        (dynamic, {"images": 5, "image_size": (16, 16)}, "5 images need 20 tokens, and context=16; pass fewer"),
        (fixed, {"images": 1, "image_size": (16, 16)}, r"LlavaForConditionalGeneration takes images of \(8, 8\) only"),
    ):
        with pytest.raises(ValueError, match=message):
            PretrainedShape(model, context=CONTEXT, **options)
    # Two images of 16 patches, which attend to themselves, and a frozen encoder, which has no backward.
    flops = []
    for trained in (True, False):
        dynamic.model.visual.requires_grad_(trained)
        shapes = [
            PretrainedShape(dynamic, context=CONTEXT, images=n, image_size=(n and (16, 16)) or None) for n in (0, 2)
        ]
        text, both = (model_flops(each) for each in shapes)
        flops.append(both - text)
    assert flops[0] == pytest.approx(3 * flops[1])


DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
}
MAMBA = {
    "mamba_n_heads": 16,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
    "mamba_expand": 2,
    "attn_layer_indices": [1],
}
LIGHTNING = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 2}


@pytest.mark.skipif(not hasattr(transformers, "NemotronHConfig"), reason="needs newer hybrid models")
@pytest.mark.parametrize(
    ("family", "options", "recurrence", "convolution"),
    [
        ("Qwen3Next", DELTA, 4 * 8 * 6, 3 * (2 * 2 * 8 + 4 * 6)),  # H K V, (k - 1) (2 Hk K + H V)
        ("Bamba", MAMBA, 16 * 8 * 4, 3 * (16 * 8 + 2 * 2 * 4)),  # H N P, (k - 1) (H P + 2 G N)
        ("MiniMax", {**LIGHTNING, "block_size": 4}, 4 * 16 * 16, 0),  # H D D
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}, 0, 2 * 64),  # (k - 1) h
    ],
)
def test_states_of_recurrent_layers_follow_their_formula(family, options, recurrence, convolution):
    planned = shape(family, **options, num_hidden_layers=3, pad_token_id=0)
    # Convolutions pass their inputs in the dtype of the model. Recurrences add up in fp32, lightning attention's not.
    for precision, width in (("fp32", 4), ("bf16", 4 if family in {"Qwen3Next", "Bamba"} else 2)):
        size = recurrence * width + convolution * (4 if precision == "fp32" else 2)
        for ranks, documents, edges in ((2, None, 1), (4, None, 3), (4, (8, 8), 2), (4, (4, 4, 4, 4), 0)):
            job = replace(JOB, precision=precision, documents=documents)
            made = predict(planned, topology(ranks, sequence={"size": ranks, "mode": "gather"}), job)
            (states,) = (each for each in made.ranks[0].transfers if each.what == "states")
            # Two layers send forward and backward over each edge; the mean over ranks.
            expected = 2 * 2 * edges / ranks, 2 * 2 * edges * ROWS * size / ranks
            assert (states.operations, states.bytes) == expected, (precision, ranks, documents)
    assert planned.mixture is None or family == "MiniMax"
    zigzag = {"size": 2, "mode": "gather", "split": "zigzag"}
    with pytest.raises(ValueError, match=r"split='zigzag': recurrent layers pass .*; use split='contiguous'"):
        predict(planned, topology(2, sequence=zigzag), JOB)


@pytest.mark.storm  # the small models above are reckoned by the same code
def test_70_billion_parameters_on_512_devices_in_seconds():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    planned = PretrainedShape(on_meta(**sizes, **heads, tie_word_embeddings=False), context=8192)
    assert planned.parameters == 70_553_706_496
    machine, job = Machine(memory=80e9), TrainingJob(batch=512, precision="bf16")
    found = search_configurations(planned, 512, job, machine, top=3)
    said = PlanReport(shape=planned, world=512, job=job, machine=machine, configured=None, ranking=found).text()
    assert "7.055e+10 parameters: LlamaForCausalLM, 80 layers, width 8192, 64 heads, context 8192" in said
    assert {each.topology.modes.get("tensor", ("none",))[0] for each in found.best} <= {"1d", "none"}
    best = found.best[0].busiest.seconds["compute"]
    flops = 6 * 70e9 * 512 * 8192  # attention beside
    assert best == pytest.approx(flops / 512 / (989e12 * 0.5), rel=0.35)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # for a new name
def test_recomputed_layers_keep_their_input():
    options = {"context": 4096}
    model = on_meta(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, max_position_embeddings=4096)
    shapes = [PretrainedShape(model, checkpointing=each, **options) for each in (False, True)]
    plain, again = (predict(each, topology(1), JOB).memory for each in shapes)
    inputs = 5 * ROWS * 4096 * 1024 * 4
    layer = (plain.activations - again.activations + inputs - again.logits) / 4  # of five, one is there in either case
    assert 0.9 * plain.activations < 5 * layer < plain.activations  # beside them there are the last norm and the head
    assert plain.logits == again.logits < layer
    assert not PretrainedShape(model).checkpointing
    model.gradient_checkpointing_enable()
    assert PretrainedShape(model).checkpointing
