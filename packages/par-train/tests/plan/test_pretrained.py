"""Plans of models of transformers: what is predicted is what a rank has, receives and keeps."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.distributed as dist

from par_groups import Topology
from par_pipeline.wire.lanes import Lane
from par_plan import Machine, PretrainedShape, TrainingJob, predict
from par_testing import count_collectives
from par_train import Strategy

from .measured_runs import SavedPeak

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


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
OWN = {
    "Qwen3Next": {**DELTA, "num_experts": 0, "head_dim": 16},
    "OlmoHybrid": {**DELTA, "pad_token_id": 0},
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


@pytest.mark.ranks(4)
def test_each_rank_has_as_many_bytes_as_predicted(tmp_path):
    for tied in (False, True):
        folder = tmp_path / str(tied)
        if dist.get_rank() == 0:
            make(tie_word_embeddings=tied).save_pretrained(folder)
        dist.barrier()
        planned = shape(tie_word_embeddings=tied)
        with Strategy(parallel={"pipeline": 2, "tensor": IN_1D}, pipeline={"microbatches": 2}) as strategy:
            model = strategy.from_pretrained(folder)
            made = predict(planned, strategy.groups.topology, replace(JOB, microbatches=2))
            mine = made.ranks[-1 if strategy.groups.rank("pipeline") else 0]
            assert mine.memory.parameters == sum(each.nbytes for each in model.parameters())
            mine = strategy.plan(on_meta(tie_word_embeddings=tied), batch=ROWS)  # the same question, of the strategy
            assert mine.memory[0].parameters == sum(each.nbytes for each in model.parameters())
            assert {move.axis for move in mine.transfers} == {"pipeline", "tensor"}
            assert ("logits" in str(mine)) == (strategy.groups.rank("pipeline") == 1)
            assert ("bubble" in str(mine)) == (mine.bubble == pytest.approx(1 / 3))


# Traffic and activations of steps


def received(events):
    """Bytes over the tensor axis, what ranks agree on left out, which is in fp64 or integers; and operations."""
    sums = Counter()
    for event in events:
        if event.dtype.is_floating_point and event.dtype != torch.float64 and len(event.ranks) > 1:
            part = Fraction(len(event.ranks) - 1, len(event.ranks))
            whole = 2 * part if event.op == "all_reduce" else part
            sums.update({"bytes": whole * event.elements * event.dtype.itemsize, "calls": 1})
    return sums["bytes"], sums["calls"]


def batch(packed=False):
    ids = torch.randint(101, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(CONTEXT).remainder(CONTEXT // 2).repeat(ROWS, 1)  # two documents in a row
    return {"input_ids": ids, "labels": ids, **({"position_ids": positions} if packed else {})}


CUT = (
    (IN_1D, "Llama", {}),
    (IN_1D, "Llama", {"packed": True}),
    (IN_SEQUENCE, "Qwen3", {"tie_word_embeddings": True}),
    (IN_SEQUENCE, "Phi3", {}),
    (IN_1D, "Qwen3Next", {}),  # gathers what its columns compute, and is full between them
    (IN_SEQUENCE, "OlmoHybrid", {}),  # its recurrent layers get the gathered sequence
)
CLOSE = 0.02  # masks of labels and numbers of rows, which no formula counts


def steps(parallel, family="Llama", precision="fp32", packed=False, **options):
    """The bytes and operations of a step, the most that autograd kept, and what was predicted."""
    with Strategy(parallel=parallel, precision=precision) as strategy:
        planned = shape(family, packed, **options)
        made = predict(planned, strategy.groups.topology, replace(JOB, precision=precision), GLOO)
        model = make(family, **options)
        model, optimizer = strategy.initialize(model, torch.optim.AdamW(model.parameters()))
        model.train()
        for _ in range(2):
            with SavedPeak(model.parameters()) as saved, count_collectives() as counted:
                strategy.execute_pipeline(iter([batch(packed)]), model, None, optimizer)
                optimizer.step()
            optimizer.zero_grad()
        return counted.events, saved.peak, made.ranks[0]


@pytest.mark.ranks(2, timeout=120)
def test_a_step_receives_and_keeps_what_was_predicted():
    found = []
    for tensor, family, options in (each for each in CUT if hasattr(transformers, f"{each[1]}Config")):
        events, peak, made = steps({"tensor": tensor}, family, **options)
        transfers = [move for move in made.transfers if move.axis == "tensor"]
        assert received(events) == (sum(Fraction(m.bytes) for m in transfers), sum(m.operations for m in transfers)), (
            family
        )
        saved = made.memory.activations + 4 * ROWS * CONTEXT * 51  # logits, of which a rank has 51 for each token
        assert saved == pytest.approx(peak, rel=CLOSE), (tensor, family)
        found.append((made.memory.activations, peak))
    (plain, least), (packed, most) = found[:2]
    assert packed - plain == pytest.approx(most - least, rel=CLOSE), "masks, and rotary tables of each row"


@pytest.mark.ranks(1)
def test_what_one_device_keeps():
    found = []
    for family, options in (("Llama", {}), ("GPT2", {}), ("Llama", {"packed": True})):
        _, peak, made = steps({}, family, **options)
        saved = made.memory.activations + 4 * ROWS * CONTEXT * 101
        assert saved == pytest.approx(peak, rel=CLOSE), family
        found.append((made.memory.activations, peak))
    (plain, least), (packed, most) = found[0], found[-1]
    assert packed - plain == pytest.approx(most - least, rel=CLOSE), "masks, and keys copied for the queries"


TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 2}


def with_tower(family):
    """A vision-language model whose encoder of images has more layers than its language model."""
    text = {**TEXT, "num_hidden_layers": 3}
    vision = transformers.SiglipVisionConfig(**TOWER, image_size=8, patch_size=4)
    if family == "Gemma3":
        text = transformers.Gemma3TextConfig(**text, head_dim=16)
        config = transformers.Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=4)
    elif family == "Llava":
        config = transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**text))
    else:
        vision = {**TOWER, "depth": 6, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
        rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
        config = transformers.Qwen3VLConfig(
            vision_config={**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            text_config={**text, "head_dim": 16, "rope_parameters": rope},
        )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


@pytest.mark.filterwarnings("ignore:.*Qwen3VL.* shards no layer:UserWarning")
@pytest.mark.ranks(1)
def test_vision_language_models_keep_what_was_predicted_for_text():
    for family in ("Llava", "Gemma3", "Qwen3VL"):
        torch.manual_seed(0)
        with Strategy() as strategy:
            with torch.device("meta"):
                whole = with_tower(family)
            planned = PretrainedShape(whole, context=CONTEXT)
            made = predict(planned, strategy.groups.topology, JOB, GLOO).ranks[0]
            model = with_tower(family)
            model, optimizer = strategy.initialize(model, torch.optim.AdamW(model.parameters()))
            for _ in range(2):
                with SavedPeak(model.parameters()) as saved:
                    strategy.execute_pipeline(iter([batch()]), model.train(), None, optimizer)
                    optimizer.step()
                optimizer.zero_grad()
        assert planned.layers == 3, family
        assert made.memory.parameters == sum(each.nbytes for each in model.parameters()), family
        logits = 4 * ROWS * CONTEXT * 101
        assert made.memory.activations + logits == pytest.approx(saved.peak, rel=CLOSE), family
        assert "without images" in planned.describe()


@pytest.mark.ranks(2, timeout=120)
def test_stages_send_and_keep_what_was_predicted():
    """Messages are not collectives, and are seen where they leave; what this rank sends, the other one receives."""
    sent = []
    send = Lane.send

    def counting(lane, part, number):
        sent.append(part.nbytes)
        return send(lane, part, number)

    Lane.send = counting  # of this rank's process alone
    for precision in ("fp32", "bf16"):
        job = replace(JOB, precision=precision, microbatches=2)
        with Strategy(parallel={"pipeline": 2}, precision=precision, pipeline={"microbatches": 2}) as strategy:
            planned = shape(tie_word_embeddings=True)
            made = predict(planned, strategy.groups.topology, job, GLOO)
            mine = made.ranks[-strategy.groups.rank("pipeline")]
            model = make(tie_word_embeddings=True)
            model, optimizer = strategy.initialize(model, torch.optim.AdamW(model.parameters()))
            model.train()
            for _ in range(2):
                sent.clear()
                with SavedPeak(model.parameters()) as saved, count_collectives() as counted:
                    strategy.execute_pipeline(iter([batch()]), model, None, optimizer)
                    optimizer.step()
                optimizer.zero_grad()
            transfers = {move.what: move.bytes for move in mine.transfers}
            assert sum(sent) == transfers["activations"], precision
            assert received(counted.events)[0] == transfers["tied table"], precision
            logits = 4 * ROWS // 2 * CONTEXT * 101 if strategy.groups.rank("pipeline") else 0
            assert mine.memory.activations + logits == pytest.approx(saved.peak, rel=CLOSE), precision


def one_step(strategy, model, optimizer):
    ids = torch.zeros(ROWS, 64, dtype=torch.int64)
    strategy.execute_pipeline(iter([{"input_ids": ids}]), model, None, optimizer)
    optimizer.zero_grad()


def peak_of(step, folder):
    """The most bytes that were allocated at a time, beyond those that are afterwards, by torch's own profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    allocated = [event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"]
    return max(allocated) - allocated[-1]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # for a new name
@pytest.mark.ranks(1)
def test_the_peak_of_a_step_is_logits_over_activations(tmp_path):
    options = {"vocab_size": 4001, "num_hidden_layers": 2, "max_position_embeddings": 64}
    for checkpointing in (False, True):
        planned = PretrainedShape(on_meta(**options), checkpointing=checkpointing)
        memory = predict(planned, topology(1), JOB, GLOO).memory
        with Strategy() as strategy:
            model = make(**options)
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model.train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            step = partial(one_step, strategy, model, optimizer)
            step()
            # No gradient of a parameter is there yet when logits have theirs.
            assert peak_of(step, tmp_path) == pytest.approx(memory.activations + memory.logits, rel=CLOSE), (
                checkpointing
            )


@pytest.mark.ranks(2, timeout=120)
def test_steps_in_16_bits():
    """Under autocast, tensor ranks also keep casts that no operator of the model makes: a tenth is left for them."""
    for tensor, precision, close in ((IN_1D, "bf16-amp", 0.1), (IN_SEQUENCE, "bf16", 0.03)):
        events, peak, made = steps({"tensor": tensor}, precision=precision)
        transfers = [move for move in made.transfers if move.axis == "tensor"]
        assert received(events) == (sum(Fraction(m.bytes) for m in transfers), sum(m.operations for m in transfers)), (
            precision
        )
        assert made.memory.activations + 2 * ROWS * CONTEXT * 51 == pytest.approx(peak, rel=close), precision
