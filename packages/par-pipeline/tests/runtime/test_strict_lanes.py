"""Tensors on strict communicators: order, buffers and slots of the way over NCCL, with the gradients of one device."""

import pytest
import torch.distributed as dist

from par_pipeline import one_f_one_b, zb_v
from par_testing import Strict, count_collectives, for_each

from ..runtime_helpers import SCHEDULES, assert_gradients, block, check_steps, data, pipeline, stages_of, strict_apart
from .test_end_of_step import tied


def check(name, microbatches=5):
    ranks = dist.get_world_size()
    schedule = SCHEDULES[name](ranks, max(microbatches, 2 * ranks) if name == "dualpipe_v" else microbatches)
    batches = [data(17), data(17, seed=1), data(23)]  # and one of other shapes
    with count_collectives() as counted:
        check_steps(schedule, lambda number: block(5, number), batches, lanes=strict_apart)
    assert counted.elements("send") > 0  # headers, over gloo, are not seen


@for_each(name=SCHEDULES)
@pytest.mark.ranks([2, 4], backend="strict", timeout=120)
def test_every_schedule_is_right_on_strict_communicators(name):
    check(name)


@for_each(name=SCHEDULES)
@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=2), timeout=120)
def test_two_communicators_at_a_time_are_enough(name):
    check(name)


@for_each(name=["1f1b", "interleaved", "zb_v"])
@pytest.mark.ranks(2, backend="strict", strict=Strict(complete="drawn", draw=3), timeout=60)
def test_it_does_not_matter_when_transfers_end(name):
    check(name)


@for_each(make=[one_f_one_b, zb_v])
@pytest.mark.ranks(3, backend="strict", timeout=60)
def test_losses_and_gradients_of_shared_parameters_go_over_strict_communicators_too(make):
    schedule = make(3, 4)
    gradients = []
    for lanes in ({}, {"lanes": strict_apart}):
        stages = stages_of(schedule)
        together = schedule.rank_of(0) == schedule.rank_of(schedule.stages - 1)
        shared = [] if together else [tied(stages, schedule)]
        run = pipeline(stages, schedule, broadcast_loss=True, shared=shared, **lanes)
        x, y = data(8)
        losses = [run.step(x, target=y).loss, run.evaluate(x, target=y).loss]
        assert run.evaluate(x).loss is None
        gradients.append((stages, [loss.item() for loss in losses]))
    (one, of_one), (other, of_other) = gradients
    assert of_one == of_other
    assert_gradients(one, other, schedule, exact=True)
