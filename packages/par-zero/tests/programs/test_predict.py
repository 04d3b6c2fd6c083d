"""The program that is predicted for a module that has not run: its bytes are those of the closed forms."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from par_groups import Box, Sharding, set_sharding
from par_testing import for_each
from par_zero import MixedPrecision, Offload, Overlap, ShardOptions, memory, predict_step, program, shard
from par_zero._budget import PeakMemory
from par_zero._sharded import _engine_of
from par_zero.layout.sizes import plan_module
from par_zero.offload.plan import updated_slices

from ..helpers import NewtonSchulz, adamw, batch, deferred, mlp, policies, train

DTYPES = (
    MixedPrecision(),
    MixedPrecision(param_dtype=torch.bfloat16),
    MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
)


def linears(depth, width):
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    return module, torch.optim.AdamW(module.parameters())


def fractions():
    """Of data in tiers, in quarters, so that equal layers are divided exactly."""
    return st.tuples(st.integers(0, 4), st.integers(0, 4)).map(
        lambda pair: {"host": min(pair[0], 4 - pair[1]) / 4, "disk": pair[1] / 4}
    )


@settings(max_examples=150, deadline=None)
@given(
    stage=st.sampled_from(range(4)),
    ranks=st.sampled_from((1, 2, 4, 8)),
    depth=st.sampled_from((4, 8)),
    precision=st.sampled_from(DTYPES),
    inflight=st.integers(1, 3),
    parts=st.tuples(fractions(), fractions(), fractions()),
)
def test_closed_form_of_memory_equals_the_ledger(stage, ranks, depth, precision, inflight, parts):
    """Sizes have no padding. `memory` is of gloo, after a step; a cast copy of gradients is not in it."""
    width, elements = 256, depth * 256**2
    module, optimizer = linears(depth, width)
    moved = parts if stage == 3 else (parts[0], 0, 0)
    tiers = dict(zip(("optimizer", "parameters", "gradients"), moved, strict=True))
    offload = Offload(**tiers, path="/", piece="1GB")
    options = ShardOptions(overlap=Overlap(bucket=1, inflight=inflight), precision=precision)
    step = predict_step(module, optimizer, stage=stage, ranks=ranks, options=options, gloo=True)
    *_, (_, held) = step.program.walk()
    without = memory(stage, elements, ranks, precision=precision, chunk=width**2, inflight=inflight)
    if ranks > 1:  # else nothing is received
        assert held["buffers"] == without.buffers
    assert held["gradients"] == without.gradients + sum(chunk.cast for chunk in step.program.chunks.values())

    plan = plan_module(module, optimizer, stage=stage, ranks=ranks, options=options, gloo=True)
    counted = PeakMemory(plan).count(updated_slices(plan), offload)
    # AdamW's counts of steps, and state that is divided at multiples of 16 elements, or of 4096 bytes on the disk.
    rounded = 4 * depth + 3 * depth * 4096
    for tier in ("device", "host", "disk"):
        parts = {name: by_tier[tier] for name, by_tier in offload.fractions.items()}
        assert counted[tier]["parameters"] == without.parameters * parts["parameters"]
        assert abs(counted[tier]["optimizer"] - without.optimizer * parts["optimizer"]) <= rounded


@for_each(stage=range(4), precision=DTYPES)
def test_assembled_tensors_are_in_the_ledger(stage, precision):
    """Each weight is two matrices, such as q and k, which an optimizer steps as tensors of their own."""
    width, depth, ranks = 64, 4, 2
    module, _ = linears(depth, width)
    boxes = [Box((first, 0), (width // 2, width), first * width, (width, 1), range(ranks)) for first in (0, width // 2)]
    for weight in module.parameters():
        set_sharding(weight, Sharding((width, width), tuple(boxes)))
    options = ShardOptions(precision=precision)  # one chunk, which two ranks divide evenly
    step = predict_step(module, NewtonSchulz(module.parameters()), stage=stage, ranks=ranks, options=options)
    elements = depth * width**2
    form = memory(stage, elements, ranks, precision=precision, slots=1, assembled=elements)
    *_, (_, held) = step.program.walk()
    assert held["gradients"] == form.gradients
    assert step.optimizer == form.optimizer
    if stage == 3:  # units are freed before tensors are assembled
        assert [entry.op for entry in step.program.entries if entry.op in ("free", "cast")][-1] == "cast"


@for_each(stage=range(4))
def test_predicted_gradients_that_stay_raise_the_peak(stage):
    module, optimizer = linears(4, 64)
    options = ShardOptions(overlap=Overlap(bucket=1, inflight=1))
    dropped, kept = (
        predict_step(module, optimizer, stage=stage, ranks=2, options=options, accumulates=each)
        for each in (False, True)
    )
    # Without a copy in another dtype. At stage 0 two ranks sum in place, but not if they add to an earlier sum.
    beside = dropped.program.chunks["0.weight"].received if stage == 0 else 0
    assert kept.program.peak() == {**dropped.program.peak(), "buffers": dropped.program.peak()["buffers"] + beside}
    mixed = ShardOptions(overlap=options.overlap, precision=DTYPES[1])
    dropped, kept = (
        predict_step(module, optimizer, stage=stage, ranks=2, options=mixed, accumulates=each) for each in (False, True)
    )
    assert sum(dropped.program.peak().values()) < sum(kept.program.peak().values())


def test_units_within_units_run_in_the_order_of_registration():
    with torch.device("meta"):
        block = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16)))
        module = nn.Sequential(block, nn.Linear(16, 16))
    options = ShardOptions(units=[block, block[1], module[1]])
    found = predict_step(module, stage=3, ranks=2, options=options)
    events = " ".join(str(entry) for entry in found.program.entries if entry.op in ("F", "B", "C"))
    assert events == "F:0 F:0.1 F:1 B:1 C:1.weight B:0 B:0.1 C:0.1.0.weight C:0.0.weight"


def test_predict_step_without_a_bound_counts_two_reductions():
    module, optimizer = linears(4, 64)
    found = [
        predict_step(module, optimizer, stage=2, ranks=2, options=ShardOptions(overlap=Overlap(bucket=1, inflight=n)))
        for n in (None, 2)
    ]
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="units has a Linear that is not in the module"):
        predict_step(module, stage=3, ranks=2, options=ShardOptions(units=[nn.Linear(1, 1)]))


@for_each(stage=range(4), passes=((True,), (False, True), (True, True)))
@pytest.mark.ranks(2, timeout=600)
def test_steps_of_a_loop_are_the_predicted_programs(stage, passes):
    """Entry by entry, so the checks of helpers.py are not skipped for all loops."""
    for inflight, dtype in itertools.product((1, 2), (None, torch.bfloat16)):
        module = mlp(depth=4)
        optimizer = adamw(module.parameters())
        options = policies(bucket=1, inflight=inflight, param_dtype=dtype)
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, **options)
        predicted = _engine_of(module)._program.predict(passes)[-1]
        assert passes != (True,) or predicted == program(module)
        for step in range(3):
            data = [batch(step, width=8, micro=micro).to(dtype) for micro in range(len(passes))]
            train(module, optimizer, [data], deferred=None if all(passes) else deferred(module))
        assert program(module) == predicted


@pytest.mark.cpu(reason="offload from a CPU")
@for_each(
    offload=({"optimizer": {"host": 0.3, "disk": 0.4}}, {"optimizer": 1, "parameters": "disk", "gradients": "disk"})
)
@pytest.mark.ranks(2)
def test_steps_with_offload_are_the_predicted_programs(offload, tmp_path):
    for stage in range(4) if len(offload) == 1 else (3,):
        module = mlp(depth=4)
        optimizer = adamw(module.parameters())
        options = policies(bucket=1, inflight=2, param_dtype=torch.bfloat16)
        tiers = Offload(**offload, path=tmp_path, piece=256)
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=tiers, **options)
        predicted = program(module)
        for step in range(3):
            train(module, optimizer, [[batch(step, width=8).bfloat16()]])
        assert program(module) == predicted
        assert any(entry.op == "evict" for entry in predicted.entries)
