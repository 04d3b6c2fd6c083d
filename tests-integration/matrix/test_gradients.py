"""Every gradient is summed over every axis that needs it exactly once a step: counted, and missed where it is not."""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from par_groups import sharding_of
from par_testing import assert_equal_to_one_device, count_collectives, once

from ._cases import case
from ._training import Run, one_process, strategy_of, tolerance, train_alone

STEPS = 2
BLOCKS = 2  # with embeddings and logits, the four stages of zb_v: every kind of parameter is there
HANDLERS = ("data_parallel", "partial", "pipeline_shared")
REDUCTIONS = {"all_reduce", "reduce_scatter", "all_to_all"}  # what gloo's reduce-scatter is made of is an all-to-all
COUNTED = [[case(2, "1f1b", "SP2", zero=stage, tied=True) for stage in (0, 3)]]
"""Schedules whose weight gradients come later are counted on four ranks, by themselves; 2D is in par-layers' counts."""
ALL_COUNTED = [
    [case(2, "1f1b", "SP2", zero=stage, tied=True) for stage in (0, 2, 3)],
    [case(2, "zb_v", "SP2", zero=stage, tied=True) for stage in (0, 2)],
    [case(2, tensor="2D4", zero=stage) for stage in (0, 2)],
    [case(tensor="2.5D8")],
    [case(tensor="3D8")],
]


class Needed:
    """What a step must communicate, by the records of parameters that par-zero has not cut.

    Attributes:
        whole: Elements of this rank's parameters, each of which wants a mean over the data ranks.
        others: By operation and ranks: elements that are summed over tensor axes, or with another stage.
    """

    def __init__(self, run):
        groups, parameters = run.strategy.groups, list(run.model.parameters())
        self.whole = sum(parameter.numel() for parameter in parameters)
        self.others = Counter()
        stages = ranks(groups["pipeline"])
        for box in (box for parameter in parameters for box in sharding_of(parameter).boxes):
            if box.sum_over:
                axes = box.sum_over if len(box.sum_over) > 1 else box.sum_over[0]
                self.others["all_reduce", ranks(groups[axes])] += math.prod(box.size)
            if len(set(stages) & set(box.copies)) > 1:  # another rank's stage has it too
                for operation in ("send", "recv"):
                    self.others[operation, stages] += math.prod(box.size)


def ranks(group):
    return tuple(dist.get_process_group_ranks(group))


def counted(run):
    """The collectives of a backward, and of the step that follows it; without those of a first step."""
    run.train(1)
    with count_collectives() as backward:
        run.backward()
    with count_collectives() as step:
        run.optimizer.step()
    return backward.events, step.events


@pytest.mark.parametrize(
    "counted_cases", [COUNTED, pytest.param(ALL_COUNTED, marks=pytest.mark.storm)], ids=["some", "all"]
)
@pytest.mark.ranks(8, timeout=180)
def test_each_sum_is_taken_once_a_step_however_many_microbatches_there_are(counted_cases):
    """On the CPU alone: what is summed depends on no device, and gloo's all-gather may crash where it is counted."""
    for cases in counted_cases:
        needed = None
        for each in cases:  # the first cuts nothing over data ranks
            with strategy_of(each, "fp32", "cpu") as strategy:
                run = Run(strategy, BLOCKS, tied=each.tied)
                sharded, needed = needed is not None, needed or Needed(run)
                backward, step = counted(run)
                data = strategy.groups["data"]
                if dist.get_world_size(data) > 1:
                    check_means(backward, data, needed.whole)
                check_sums(step, data, needed.others, sharded=sharded)


def check_means(events, data, whole):
    """Over the data ranks, during backward: as many elements as there are, and a little padding."""
    found = [each for each in events if each.ranks == ranks(data) and each.op in REDUCTIONS]
    found = [each for each in found if each.dtype == torch.float32]
    assert whole <= sum(each.elements for each in found) < 1.05 * whole


def check_sums(events, data, others, *, sharded):
    """Over other axes, before the step: what is needed, which data ranks may share, and the numbers of the norm."""
    events = [each for each in events if each.ranks != ranks(data)]
    found = Counter()
    for each in events:
        if each.dtype == torch.float32:
            found[each.op, each.ranks] += each.elements
    assert found.keys() <= others.keys()
    for key in sorted(others):
        total = torch.tensor(found[key])
        dist.all_reduce(total, group=data)
        assert total.item() == others[key] * (1 if sharded else dist.get_world_size(data)), key
    norm = [(each.op, each.elements) for each in events if each.dtype != torch.float32]
    assert norm == [("all_reduce", 4)]


@pytest.mark.ranks(8, timeout=120)
def test_all_handlers_together_give_the_weights_of_one_device(device):
    """Sequence parallelism, embeddings tied over the pipeline, and data parallelism."""
    expected, whole = once(train_alone, "fp32", STEPS, BLOCKS, device, tied=True)
    together = case(2, "1f1b", "SP2", tied=True)
    with strategy_of(together, "fp32", device) as strategy:
        run = Run(strategy, BLOCKS, tied=True)
        assert max(run.train(STEPS).distance(expected)) < max(tolerance("fp32"))
        reason = "sums over ranks and microbatches are in another order"
        assert_equal_to_one_device(run.model, whole, rtol=1e-4, atol=1e-5, reason=reason)


ON_ITS_AXIS = {
    "data_parallel": case(2, tied=True),
    "partial": case(tensor="SP2", tied=True),
    "pipeline_shared": case(pipeline="1f1b", tied=True),
}


@pytest.mark.ranks(2)
def test_each_handler_is_needed_on_its_axis(device):
    """Else the comparisons above and of the curves would say little."""
    expected = one_process("fp32", STEPS, BLOCKS, device, tied=True)
    for one, alone in ON_ITS_AXIS.items():
        handlers = [{"type": each} for each in HANDLERS if each != one]
        with strategy_of(alone, "fp32", device, gradient_handlers=handlers) as strategy:
            curve = Run(strategy, BLOCKS, tied=True).train(STEPS)
            assert max(curve.distance(expected)) > 50 * max(tolerance("fp32")), one
