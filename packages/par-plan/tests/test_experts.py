"""Plans of mixtures of experts: a check row that was computed by hand, busy experts, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from par_groups import Topology
from par_layers import plan_shardings
from par_plan.costs.pipeline import pipeline_cost
from par_plan.inputs import Machine, TrainingJob
from par_plan.models.pretrained import PretrainedShape
from par_plan.prediction import predict
from par_plan.report import PlanReport, as_dict, transfers
from par_plan.search import configurations, search_configurations
from par_plan.shape import ExpertLayers, Shape

EXPERTS = ExpertLayers(number=8, hidden=32, shared=1, dense_layers=1)
SHAPE = Shape(layers=4, width=64, heads=4, context=256, experts=EXPERTS)
JOB = TrainingJob(batch=64, precision="bf16")
FOLDED = {"tensor": {"size": 2, "mode": "1d"}, "expert": {"size": 4, "tensor": 1}}


@pytest.fixture(scope="module")
def deepseek():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config())
    return PretrainedShape(model, context=4096)


def test_671_billion_parameters_on_2048_devices(deepseek):
    """DeepSeek-V3, pipeline 16, experts over 64 ranks, four layers on a rank: 705e6 in experts, 932e6 beside them."""
    assert 671.0e9 < deepseek.parameters < 671.1e9
    topology = Topology.from_config({"pipeline": 16, "expert": 64}, 2048)
    job = TrainingJob(batch=128 * 16, zero=1, precision="bf16", microbatches=16)
    made = predict(deepseek, topology, job, Machine(memory=80e9))
    middle = made.ranks[2]
    assert middle.experts.layers == 4
    assert middle.parameters == pytest.approx(705e6 + 932e6, rel=1e-3)
    assert middle.memory.state == pytest.approx(10.9e9, rel=5e-3)
    of_copies = next(move for move in middle.transfers if move.axis == "expert_data")
    assert of_copies.bytes == pytest.approx(705e6 * 2 / 2, rel=1e-3)  # half of them, of 2 bytes
    exchange = {move.what: move for move in middle.transfers if move.axis == "expert_parallel"}
    passes = 4 * 16  # layers and microbatches
    one = exchange["dispatch"].bytes / exchange["dispatch"].operations
    assert one == pytest.approx(462e6, rel=3e-3)  # and 0.5e6 of gates
    layer = sum(move.bytes for move in exchange.values()) / passes
    assert layer == pytest.approx(1.85e9, rel=2e-3)
    assert layer / 50e9 == pytest.approx(37e-3, rel=2e-3)
    assert middle.seconds["experts"] / passes == pytest.approx(37e-3, rel=0.02)  # with latencies
    assert middle.experts.kept == pytest.approx(738e6, rel=1e-3)
    schedule = pipeline_cost(job.schedule, 16, job.microbatches)
    part = deepseek.part(schedule, schedule.places[5])
    matrices = deepseek.flops(part)[0] / 4 * 4096
    assert matrices == pytest.approx(14.4e12, rel=0.01)
    assert matrices / 400e12 == pytest.approx(36e-3, rel=0.01)


def test_the_report_says_over_what_rows_travel():
    ranking = search_configurations(SHAPE, 16, JOB, Machine(memory=80e9), 3)
    topology = Topology.from_config({"expert": {"size": 8, "tensor": 1}}, 16)
    configured = predict(SHAPE, topology, JOB, Machine(memory=80e9, devices_per_node=4, network=1e6))
    machine = Machine(memory=80e9, devices_per_node=4, network=1e6)
    said = PlanReport(shape=SHAPE, world=16, job=JOB, machine=machine, configured=configured, ranking=ranking)
    assert any("8 ranks of 2 nodes" in each and "fewer nodes" in each for each in said.reasons())
    lines = "\n".join(transfers(configured))
    for what in (
        "data x expert: ",
        "data x expert_data: ",
        "expert_parallel: ",
        "of dispatch",
        "of combine",
        "of counts",
    ):
        assert what in lines
    assert "experts x imbalance 1: 3 layers, each" in lines
    assert as_dict(configured)["parallel"]["expert"] == 8
    folded = predict(SHAPE, Topology.from_config(FOLDED, 8), JOB, machine)
    assert as_dict(folded)["parallel"]["expert"] == FOLDED["expert"]
    assert Topology.from_config(as_dict(folded)["parallel"], 8).to_json() == folded.topology.to_json()


def test_busy_experts_take_more_of_everything_on_the_busiest_rank():
    topology = Topology.from_config({"expert": 4}, 8)
    even, busy = (predict(SHAPE, topology, replace(JOB, imbalance=load)) for load in (1.0, 1.5))
    assert busy.busiest.experts.kept == 1.5 * even.busiest.experts.kept
    assert busy.seconds > even.seconds
    more = SHAPE.mixture.top_k * SHAPE.mixture.expert * 6 * 3 * 0.5 * 64 / 8 * 256
    machine = Machine()
    seconds = busy.busiest.seconds["compute"] - even.busiest.seconds["compute"]
    assert seconds == pytest.approx(more / machine.flops / machine.efficiency)
    counted = predict(SHAPE, topology, replace(JOB, imbalance=(5, 1, 1, 1, 1, 1, 1, 1)))
    assert counted.busiest.experts.imbalance == 6 / 3  # two experts a rank
    assert counted.busiest.transfers == predict(SHAPE, topology, replace(JOB, imbalance=2.0)).busiest.transfers


def test_the_search_deals_experts_out_in_every_way_that_divides():
    found = {}
    for topology, _ in configurations(SHAPE, 8, JOB):
        spread = (topology.size("expert_parallel"), topology.size("expert_tensor")) if topology.views else None
        found.setdefault(topology.size("tensor"), set()).add(spread)
    assert found[1] == {None, (2, 1), (4, 1), (8, 1)}
    assert found[2] == {None, *((parallel, 1) for parallel in (1, 2, 4, 8)), (2, 2), (4, 2)}
    dense = Shape(layers=4, width=64, heads=4, context=256)
    assert not any(topology.views for topology, _ in configurations(dense, 8, JOB))


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({"experts": None}, {"expert": 2}, "the model has none"),
        ({"experts": replace(EXPERTS, number=6)}, {"expert": 4}, "6 experts do not divide by the 4 ranks"),
        (
            {"experts": replace(EXPERTS, hidden=33, shared=0)},
            {"tensor": {"size": 2, "mode": "1d"}, "expert": {"size": 2, "tensor": 2}},
            "33 features of an expert do not divide by the 2 tensor ranks",
        ),
        ({}, {"tensor": {"size": 4, "mode": "2d"}}, "experts need tensor mode '1d' or none"),
    ],
)
def test_what_does_not_divide_is_named(changes, parallel, message):
    with pytest.raises(ValueError, match=message):
        predict(replace(SHAPE, **changes), Topology.from_config(parallel, 8), JOB)


def test_loads_that_are_none():
    with pytest.raises(ValueError, match=r"imbalance is 0\.9"):
        TrainingJob(batch=8, imbalance=0.9)
    with pytest.raises(ValueError, match="pass the token count of each expert"):
        TrainingJob(batch=8, imbalance=(0, 0))
    with pytest.raises(ValueError, match="rows of 2 experts, but the model has 8"):
        predict(SHAPE, Topology.from_config({"expert": 2}, 8), replace(JOB, imbalance=(1, 2)))
    with pytest.raises(ValueError, match="top_k=9: it must not exceed the 8 experts"):
        replace(EXPERTS, top_k=9)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
}
MODELS = [
    MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=8),
    Qwen3MoeConfig(**SIZES, intermediate_size=64, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2),
    GptOssConfig(**SIZES, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2, head_dim=8),
    DeepseekV3Config(
        **SIZES,
        intermediate_size=64,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
]


@pytest.mark.filterwarnings("ignore:plan='auto'. the plan of GptOssForCausalLM shards")
@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model_type)
def test_parameters_of_models_of_transformers_are_those_that_a_rank_is_given(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = PretrainedShape(model, context=16)
    for parallel in ({"expert": 4}, FOLDED, {"tensor": {"size": 2, "mode": "1d"}, "expert": {"size": 2, "tensor": 2}}):
        topology = Topology.from_config(parallel, 8)
        made = predict(shape, topology, TrainingJob(batch=8))
        given = {
            name: sum(math.prod(box.size) for box in each.boxes)
            for name, each in plan_shardings(model, topology).items()
        }
        whole = {name: each.numel() for name, each in model.named_parameters()}
        assert made.ranks[0].parameters == sum((whole | given).values()), parallel
        assert made.busiest.experts.layers == 3 - (config.model_type == "deepseek_v3")
