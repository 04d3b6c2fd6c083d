"""The formulas of memory. That they hold is measured in test_measured.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from par_groups import Topology
from par_plan.costs.memory import (
    MemoryUse,
    ZeroSharding,
    added,
    optimizer_offloaded,
    parameters_offloaded,
    share_buffers,
    state_memory,
    with_offload,
    zero_sharding,
)
from par_plan.costs.traffic import data_traffic
from par_plan.inputs import NUMBER_WIDTHS, TrainingJob
from par_plan.live import model_sizes, plan_models
from par_plan.shape import ModelSlice, ParameterCount, Shape, TensorSplit, count
from par_zero import MixedPrecision, Offload, Overlap, ShardOptions, predict_step


def replicas(zero, ranks, elements=1000, **changes):
    return ZeroSharding(
        zero=zero, ranks=ranks, elements=elements, chunk=100, chunks=10, gathered=300, stays=100, reduced=200, **changes
    )


def test_the_zero_papers_figure_comes_out():
    for zero, gigabytes in enumerate((120, 31.4, 16.6, 1.88)):
        state = state_memory(replicas(zero, 64, elements=7_500_000_000), NUMBER_WIDTHS["bf16"]).state
        assert state / 1e9 == pytest.approx(gigabytes, rel=3e-3)


def test_gradients_that_accumulate_are_whole():
    at_once, later = (state_memory(replicas(3, 4, accumulates=one), NUMBER_WIDTHS["bf16"]) for one in (False, True))
    assert at_once.buffers == (2 * 100 + 300) * 2  # whole gradients, gathered parameters
    assert later.buffers == (1000 + 1000) * 2


def test_fp32_gradients_take_room_when_activations_are_gone():
    memory = state_memory(replicas(1, 4), NUMBER_WIDTHS["bf16"])
    assert memory.step == 4 * 1000 / 4
    assert memory.kept == 200 / 4 * 2  # two buffers that chunks are received in
    assert memory.total == memory.state + memory.step + memory.kept
    full = MemoryUse(parameters=1, gradients=1, optimizer=1, buffers=2, activations=5, step=3)
    assert full.total == 3 + 7


@settings(max_examples=60, deadline=None)
@given(
    stage=st.sampled_from(range(4)),
    ranks=st.sampled_from((2, 4, 8)),
    precision=st.sampled_from(("fp32", "bf16")),
    bucket=st.sampled_from((1, 10_000_000)),
    depth=st.integers(2, 8),
    vocabulary=st.sampled_from((256, 4096)),
)
def test_closed_forms_of_a_step_equal_the_ledger(stage, ranks, precision, bucket, depth, vocabulary):
    """Gradients, buffers and units at the peak: of a built model, and of its sizes only as in a search.

    A search counts two of the largest chunks for any model, where the ledger counts those that meet.
    """
    width = 256
    with torch.device("meta"):
        blocks = (
            nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False))
            for _ in range(depth)
        )
        model = nn.Sequential(nn.Embedding(vocabulary, width), nn.ModuleList(blocks), nn.LayerNorm(width))
    optimizer, numbers = torch.optim.AdamW(model.parameters()), NUMBER_WIDTHS[precision]
    dtypes = MixedPrecision() if precision == "fp32" else MixedPrecision(param_dtype=torch.bfloat16)
    options = ShardOptions(units=list(model[1]), overlap=Overlap(bucket=bucket, inflight=2), precision=dtypes)
    sizes = model_sizes(model, optimizer, stage=stage, ranks=ranks, options=options, gloo=True)
    program = sizes.step.program
    ledger = sum(program.peak().values())

    def of_step(memory):
        return memory.total - memory.parameters - memory.optimizer

    assert of_step(sizes.memory_of(program)) == ledger
    if bucket > 1 and stage < 3:
        ends = (vocabulary + 2) * width
        searched = ParameterCount(
            total=depth * 8 * width**2 + ends,
            block=8 * width**2,
            blocks=depth,
            ends=ends,
            table=vocabulary * width,
            largest=max(4 * width**2, vocabulary * width),
            tensors=2 * depth + 3,
        )
        form = of_step(state_memory(zero_sharding(searched, numbers, zero=stage, ranks=ranks, gloo=True), numbers))
        assert 0.999 * ledger <= form <= 1.5 * ledger
        of_search = data_traffic(zero_sharding(searched, numbers, zero=stage, ranks=ranks, gloo=True), numbers)
        topology = Topology.from_config({}, ranks)
        moved = plan_models([sizes], topology, TrainingJob(batch=1, zero=stage), None).transfers
        assert {each.what: each.bytes for each in moved} == {
            each.what: pytest.approx(each.bytes, rel=1e-3) for each in of_search
        }


@settings(max_examples=20, deadline=None)
@given(
    stage=st.sampled_from(range(4)),
    ranks=st.sampled_from((2, 4)),
    precision=st.sampled_from(("fp32", "bf16")),
    host=st.sampled_from((0.5, 1)),
)
def test_offload_of_an_accelerator_equals_the_ledger(stage, ranks, precision, host):
    """What the host of an accelerator takes of the optimizer, and what the device gives back."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    optimizer, numbers = torch.optim.AdamW(model.parameters()), NUMBER_WIDTHS[precision]
    dtypes = MixedPrecision() if precision == "fp32" else MixedPrecision(param_dtype=torch.bfloat16)
    options = ShardOptions(overlap=Overlap(bucket=1, inflight=2), precision=dtypes)
    before, after = (
        predict_step(model, optimizer, stage=stage, ranks=ranks, options=options, offload=offload, accelerator=True)
        for offload in (None, Offload(optimizer=host, piece="1GB"))
    )
    own = 4 * 256**2 / (ranks if stage else 1)
    source = optimizer_offloaded(
        before.movable,
        copies=own * numbers.master,
        gradients=own * numbers.gradient,
        numbers=numbers,
        zero=stage,
        gloo=False,
    )
    assert after.tiers["host"]["optimizer"] == pytest.approx(host * source.takes["host"], rel=0.01)
    assert after.tiers["host"]["gradients"] == pytest.approx(host * source.beside, rel=0.01)
    gradients = host * own * numbers.gradient if stage >= 2 else 0
    freed = before.optimizer - after.optimizer + gradients
    assert freed == pytest.approx(host * source.frees, rel=0.01)
    if stage >= 2:  # a chunk frees its sums on the device
        held = [list(step.program.walk())[-1][1]["gradients"] for step in (before, after)]
        assert held[0] - held[1] >= gradients


def test_of_experts_and_all_else_those_lend_buffers_whose_sums_receive_into_them():
    for dense, experts, received in ((4, 2, 200), (2, 1, 0), (4, 1, 200), (4, 4, 200), (2, 2, 0)):
        apart = share_buffers([replicas(0, ranks, gloo=True) for ranks in (dense, experts)])
        assert added([state_memory(each, NUMBER_WIDTHS["fp32"]) for each in apart]).buffers == 4 * received
    on_device = share_buffers([replicas(1, ranks) for ranks in (4, 2)])
    assert added([state_memory(each, NUMBER_WIDTHS["fp32"]) for each in on_device]).buffers == 4 * 200 / 2


@pytest.mark.parametrize(
    ("precision", "gloo", "parts", "device", "host", "disk"),
    [  # of 250 elements a rank; Adam has two slots, and in bf16 a copy; gradients take 500 bytes, and cast 1000
        ("bf16", False, {"host": 0.5}, 4000 - 0.5 * (3000 + 500), 0.5 * (3000 + 1500), 0),
        ("bf16", False, {"host": 0.25, "disk": 0.5}, 4000 - 0.75 * 3500, 0.25 * 3000 + 0.75 * 1500, 0.5 * 3000),
        ("bf16", False, {"host": 1, "parameters_host": 0.5}, 4000 - 3500 - 250, 4500 + 250, 0),
        ("fp32", False, {"host": 1}, 4000 - 3000, 3000 + 1000, 0),
        ("fp32", False, {"host": 1, "parameters_host": 0.5}, 4000 - 3000 - 500, 4000, 0),  # which are the copies
        ("fp32", False, {"parameters_host": 0.5}, 4000 - 500, 500, 0),
        ("fp32", False, {"host": 0.5, "disk": 0.5, "parameters_host": 1}, 0, 2500 + 500, 1000),
        ("fp32", True, {"host": 0.5, "parameters_disk": 0.5}, 4000 - 1000 - 500, 1000, 500),
    ],
)
def test_what_lies_elsewhere_is_that_of_the_formulas(precision, gloo, parts, device, host, disk):
    given, numbers = replicas(3, 4, gloo=gloo), NUMBER_WIDTHS[precision]
    memory = with_offload(
        state_memory(given, numbers), given, numbers, TrainingJob(batch=1, zero=3, precision=precision, **parts)
    )
    assert (memory.state, memory.host, memory.disk) == (device, host, disk)


def test_parameters_leave_at_stage_3_alone_and_not_while_they_stay_gathered():
    assert parameters_offloaded(replicas(2, 4), NUMBER_WIDTHS["fp32"]) is None
    assert parameters_offloaded(replicas(3, 4, accumulates=True), NUMBER_WIDTHS["fp32"]) is None
    assert parameters_offloaded(replicas(3, 4), NUMBER_WIDTHS["fp32"]).frees == 1000


def test_blocks_are_gathered_together_until_they_fill_a_bucket():
    small, large = (
        zero_sharding(
            count(
                Shape(layers=6, width=width, heads=4, context=16),
                TensorSplit(),
                ModelSlice(blocks=6, first=True, last=True),
            ),
            NUMBER_WIDTHS["fp32"],
            zero=3,
            ranks=2,
        )
        for width in (64, 512)
    )
    assert small.gathered == small.stays == small.elements  # one unit
    assert large.chunks == 7
    assert large.gathered == large.elements - 4 * large.chunk
