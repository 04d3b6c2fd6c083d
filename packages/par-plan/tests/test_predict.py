"""Predictions of whole configurations: pure, for any world."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from par_groups import Topology
from par_plan.inputs import Machine, TrainingJob
from par_plan.live import model_sizes, plan_models
from par_plan.prediction import MARGIN, predict
from par_plan.shape import ModelSlice, Shape
from par_zero import MixedPrecision, Overlap, ShardOptions

SHAPE = Shape(layers=16, width=1024, heads=16, context=512)
JOB = TrainingJob(batch=64, precision="bf16")
IN_1D = {"size": 4, "mode": "1d"}


def topology(world, **parallel):
    return Topology.from_config(parallel, world)


def made(world, job=JOB, machine=None, shape=SHAPE, **parallel):
    return predict(shape, topology(world, **parallel), job, machine)


def test_devices_share_the_arithmetic():
    one = made(1)
    flops = 64 * 512 * 6 * 12 * 16 * 1024**2
    assert one.busiest.seconds["compute"] == pytest.approx(flops / (989e12 * 0.5), rel=0.1)  # attention is beside it
    for world, parallel in ((8, {}), (4, {"tensor": IN_1D}), (4, {"pipeline": 4})):
        found = made(world, replace(JOB, microbatches=8), **parallel)
        assert found.busiest.seconds["compute"] == pytest.approx(one.seconds / world, rel=0.02)  # the head is on one


def test_a_bubble_takes_its_part_of_the_time():
    found = made(4, replace(JOB, microbatches=8), pipeline=4)
    assert found.bubble == pytest.approx(3 / 11)
    seconds = found.busiest.seconds
    assert seconds["bubble"] / (found.seconds - seconds["data"]) == pytest.approx(3 / 11)


def test_each_stage_takes_less_memory_than_the_one_before():
    states = [made(8, replace(JOB, zero=zero)).memory.state for zero in range(4)]
    assert states == sorted(states, reverse=True)
    parameters = SHAPE.parameters
    assert states == pytest.approx([parameters * each for each in (16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8)])


def test_a_group_inside_a_node_is_faster_than_one_across_nodes():
    near = made(32, tensor=IN_1D)
    far = made(32, tensor=IN_1D, machine=Machine(devices_per_node=2))
    assert far.busiest.seconds["tensor"] > 5 * near.busiest.seconds["tensor"]
    replicas = [made(32, machine=Machine(devices_per_node=each)).busiest.seconds["data"] for each in (8, 32)]
    assert replicas[0] > replicas[1]  # a group over two nodes is across nodes


def test_traffic_hides_behind_backward_as_far_as_that_lasts():
    slow = Machine(network=1e9)
    assert made(16).busiest.seconds["data"] < made(16, machine=slow).busiest.seconds["data"]
    exposed = made(16, replace(JOB, batch=4096)).busiest.seconds["data"]
    assert exposed == pytest.approx(4 * 10e-6, rel=0.01)  # one collective for flags, over 16 ranks


def test_the_terms_are_the_time_and_the_largest_is_the_bound():
    found = made(8, replace(JOB, microbatches=8), pipeline=2)
    assert sum(found.busiest.seconds.values()) == found.seconds
    assert found.seconds == max(sum(each.seconds.values()) for each in found.ranks)
    assert found.bound == "compute"
    assert made(8, replace(JOB, batch=8, microbatches=1), pipeline=8).bound == "bubble"


def test_what_fits_leaves_a_margin():
    found = made(8)
    assert found.fits(Machine(memory=found.memory.total / (1 - MARGIN) + 1))
    assert not found.fits(Machine(memory=found.memory.total))


def test_the_fullest_rank_of_a_pipeline_counts():
    found = made(4, replace(JOB, microbatches=8), pipeline=4)
    assert [each.place for each in found.ranks] == ["first", "middle", "last"]
    assert found.memory is found.ranks[0].memory  # 1F1B keeps most there
    small = [each.memory.activations for each in found.ranks]
    assert small[0] > small[1] > small[2]


def test_microbatches_that_differ_by_a_row():
    even, uneven = (made(1, replace(JOB, microbatches=each)) for each in (32, 33))
    assert even.memory.activations == uneven.memory.activations  # of the larger ones
    assert even.seconds == uneven.seconds


def test_float8_takes_less_for_the_inputs_of_products():
    activations = [made(1, replace(JOB, precision=each)).memory.activations for each in ("fp32", "bf16", "fp8")]
    assert activations == sorted(activations, reverse=True)


def test_plan_of_a_built_model_equals_the_formulas():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 400, bias=False) for _ in range(10)))
    optimizer, job = torch.optim.AdamW(model.parameters()), TrainingJob(batch=1, zero=3, precision="bf16")
    options = ShardOptions(overlap=Overlap(bucket=1, inflight=2), precision=MixedPrecision(param_dtype=torch.bfloat16))
    (memory,), transfers = planned(model, optimizer, options, 8, job)
    chunk = 256 * 400
    assert memory.state == 16 * 10 * chunk / 8 + 4 * 10  # with counts of steps, one for each tensor
    # When the optimizer's fp32 gradients are made, two buffers of chunks and the first unit are still there.
    assert memory.total == memory.state + 4 * 10 * chunk / 8 + 3 * chunk * 2
    assert {move.what: move.bytes for move in transfers} == {
        "gradients": 2 * 10 * chunk * 7 / 8,
        "parameters": 2 * (10 + 8) * chunk * 7 / 8,  # the last two units of forward stay for backward
        "flags": 2 * 4 * 4 * 7 / 8,
    }
    assert planned(model, optimizer, options, 1, job)[1] == ()


def planned(model, optimizer, options, ranks, job):
    plan = plan_models(
        [model_sizes(model, optimizer, stage=3, ranks=ranks, options=options)], topology(ranks), job, None
    )
    return plan.memory, plan.transfers


@pytest.mark.parametrize(
    ("world", "changes", "parallel", "message"),
    [
        (3, {}, {}, "batch of 64 does not divide over 3 data ranks"),
        (1, {"microbatches": 65}, {}, "into 65 microbatches"),
        (32, {}, {"tensor": {"size": 32, "mode": "1d"}}, "model.heads is 16"),
        (4, {"microbatches": 64}, {"tensor": {"size": 4, "mode": "2d"}}, "rows of a microbatch is 1"),
        (4, {"precision": "fp8"}, {"tensor": {"size": 4, "mode": "2d"}}, "'fp8'"),
        (32, {}, {"pipeline": 32}, "16 layers cannot be cut into the 32 stages"),
        (4, {"schedule": "zb_h1", "zero": 3, "microbatches": 8}, {"pipeline": 4}, "zero 3"),
        (4, {"schedule": "1f2b", "microbatches": 8}, {"pipeline": 4}, "1f2b"),
        (4, {}, {"expert": 2}, "the model has none"),
        (32, {}, {"sequence": {"size": 32, "mode": "ulysses"}}, "16 heads a rank do not divide by the 32 ranks"),
        (4, {"documents": (500, 13)}, {"sequence": 2}, "documents"),
    ],
)
def test_what_does_not_go_together_is_named(world, changes, parallel, message):
    with pytest.raises(ValueError, match=message):
        made(world, replace(JOB, **changes), **parallel)


def test_a_job_has_a_stage_and_a_precision_that_there_are():
    with pytest.raises(ValueError, match="zero is 4"):
        TrainingJob(batch=1, zero=4)
    with pytest.raises(ValueError, match="'fp64'; it can be fp32"):
        TrainingJob(batch=1, precision="fp64")


def test_a_machine_has_numbers_above_0():
    with pytest.raises(ValueError, match="network=0: it must be positive"):
        Machine(network=0)


# Sequences


LONG = Shape(layers=16, width=1024, heads=16, context=65_536)


def over(mode, ranks=8, **options):
    return {"size": ranks, "mode": mode, **options}


def test_ranks_of_a_sequence_share_activations_and_the_arithmetic():
    one = made(1, TrainingJob(batch=8), shape=LONG)
    for mode in ("gather", "ring", "ulysses"):
        found = made(8, TrainingJob(batch=8), shape=LONG, sequence=over(mode))
        extra = 1.1 if mode == "ulysses" else 1.001  # outputs by heads, beside those by tokens
        assert one.memory.activations / 8 < found.memory.activations < extra * one.memory.activations / 8
        assert found.memory.state == one.memory.state
        assert found.busiest.seconds["compute"] == pytest.approx(one.busiest.seconds["compute"] / 8, rel=1e-3), mode


def test_attention_lasts_as_long_as_on_the_rank_that_has_most_to_do():
    balanced, contiguous = (
        made(8, TrainingJob(batch=8), shape=LONG, sequence=over("ring", split=cut)).busiest.seconds["compute"]
        for cut in ("zigzag", "contiguous")
    )
    attention = 8 * LONG.context * LONG.flops(ModelSlice(blocks=16, first=True, last=True))[1] / (989e12 / 2 * 8)
    assert contiguous - balanced == pytest.approx(attention * (15 / 8 - 1), rel=1e-3)  # it sees 15/16 of all on average


def test_documents_that_do_not_see_each_other_take_less_time_and_move_nothing():
    job = TrainingJob(batch=8, documents=(8192,) * 8)
    found, whole = (made(8, each, shape=LONG, sequence=over("gather")) for each in (job, TrainingJob(batch=8)))
    assert not [move for move in found.busiest.transfers if move.what == "keys and values"]
    assert found.seconds < whole.seconds
    assert made(1, job, shape=LONG).seconds < made(1, TrainingJob(batch=8), shape=LONG).seconds


def test_what_comes_over_a_sequence_is_by_the_formulas():
    rows, elements = 8, 2 * 65_536 * 1024  # keys and values of a row
    for mode, what, expected in (
        ("ring", "keys and values", 3 * elements * 7 / 8),
        ("gather", "keys and values", 3 * elements * 3 * 7 / (4 * 8)),
        ("ulysses", "tokens for heads", 4 * 7 / 8**2 * 65_536 * 2 * 1024),
    ):
        found = made(
            8,
            TrainingJob(batch=rows),
            shape=LONG,
            sequence=over(mode, **({"split": "zigzag"} if what[0] == "k" else {})),
        )
        transfers = {move.what: move for move in found.busiest.transfers}
        assert transfers[what].bytes == pytest.approx(16 * rows * 4 * expected), mode
        assert (
            transfers["gradients"].bytes == 2 * 7 / 8 * 4 * LONG.parameters
        )  # averaged over the ranks of the sequence
        assert found.traffic["sequence"] == transfers[what].bytes + transfers["sums of losses"].bytes


def test_exchanges_of_tokens_for_heads_are_fast_inside_a_node():
    near, far = (
        made(16, TrainingJob(batch=8, precision="bf16"), shape=LONG, sequence=mode).busiest.seconds["sequence"]
        for mode in (over("2d", 16, ulysses=8), over("ulysses", 16))
    )
    assert near < far / 3


def test_a_million_tokens_fit_where_they_are_cut():
    """The activations of one row would take 550 GB on each of eight tensor ranks."""
    shape, job = Shape(layers=32, width=4096, heads=32, context=2**20), TrainingJob(batch=16, precision="bf16", zero=1)
    machine, tensor = Machine(memory=80e9), {**IN_1D, "size": 8, "sequence_parallel": True}
    whole = made(128, job, machine, shape, tensor=tensor)
    cut = made(128, replace(job, microbatches=16), machine, shape, tensor=tensor, sequence=over("gather", 16))
    assert whole.memory.activations > 6 * 80e9
    assert not whole.fits(machine)
    assert cut.fits(machine)
