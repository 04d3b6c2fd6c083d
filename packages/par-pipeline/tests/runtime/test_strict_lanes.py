"""Tensors on strict communicators: order, buffers and slots of the way over NCCL, with the gradients of one device."""

import os

import pytest
import torch.distributed as dist

from par_pipeline import PipelineError, one_f_one_b, zb_v
from par_testing import Strict, count_collectives, for_each

from ..runtime_helpers import (
    SCHEDULES,
    TYPICAL,
    assert_gradients,
    block,
    check_steps,
    clear,
    copied,
    data,
    pipeline,
    serial,
    stages_of,
    strict_apart,
    strict_lanes_to_reset,
)
from .test_end_of_step import tied


def check(name, rows=(17, 17, 31), microbatches=5):
    ranks = dist.get_world_size()
    schedule = SCHEDULES[name](ranks, max(microbatches, 2 * ranks) if name == "dualpipe_v" else microbatches)
    batches = [data(size, seed=number) for number, size in enumerate(rows)]  # whose microbatches change their shapes
    with count_collectives() as counted:
        check_steps(schedule, lambda number: block(5, number), batches, transport={"lanes": strict_apart})
    assert counted.elements("send") > 0  # headers, over gloo, are not seen


@pytest.mark.storm
@for_each(name=SCHEDULES)
@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=2), timeout=120)
def test_every_schedule_is_right_on_strict_communicators_of_which_two_at_a_time_are_enough(name):
    check(name)


@for_each(name=TYPICAL)
@pytest.mark.ranks(4, backend="strict", timeout=120)
def test_ranks_between_the_first_and_the_last_one_are_right_on_strict_communicators(name):
    check(name)


@for_each(name=SCHEDULES)
@pytest.mark.storm
@pytest.mark.ranks([2, 4], backend="strict", timeout=120)
def test_every_schedule_is_right_however_many_communicators_go_on_at_a_time(name):
    check(name)


@for_each(name=["1f1b", "interleaved", "zb_v"])
@pytest.mark.ranks(2, backend="strict", strict=Strict(complete="drawn", draw=3))
def test_it_does_not_matter_when_transfers_end_nor_whether_a_receive_was_posted_for_more_or_for_less(name):
    check(name, rows=(17, 17, 31, 31, 17))  # unknown, as known, more, just changed, less


def fails_soon(run, words):
    """A step that fails within seconds, with these words."""
    x, y = data(12)
    with pytest.raises(PipelineError, match=words):
        run.step(x, target=y)


def stages_at_fault(schedule, fault):
    """Stages that have run one step, and of which the middle one calls something once, in its next third forward."""
    stages = stages_of(schedule)
    run = pipeline(stages, schedule, transport={"lanes": strict_lanes_to_reset})
    x, y = data(12)
    run.step(x, target=y)  # so that receives are posted in the next one
    forwards = []

    def act(*_):
        forwards.append(1)
        if len(forwards) == 3:
            fault()

    if dist.get_rank() == 1:
        stages[1].register_forward_pre_hook(act)
    return stages, run


@for_each(make=[one_f_one_b, zb_v])
@pytest.mark.ranks(3, backend="strict")
def test_a_stage_that_raises_while_others_have_posted_receives_is_named_and_reset_makes_good(make):
    def fault():
        raise OSError("a fault on purpose")

    schedule = make(3, 6)
    stages, run = stages_at_fault(schedule, fault)
    fails_soon(run, r"stage 1, microbatch 2, action 1F2 on rank 1: OSError: a fault on purpose")
    run.reset()
    clear(stages)
    reference, (x, y) = copied(stages), data(12)
    run.step(x, target=y)
    serial(reference, x.tensor_split(6), y.tensor_split(6))
    assert_gradients(stages, reference, schedule, exact=make is one_f_one_b)


@pytest.mark.ranks(3, backend="strict", dies=(1,))
def test_a_rank_that_vanishes_while_others_have_posted_receives_is_named():
    _, run = stages_at_fault(one_f_one_b(3, 6), lambda: os.kill(os.getpid(), 9))
    fails_soon(run, "rank 1 is gone")


@for_each(make=[one_f_one_b, zb_v])
@pytest.mark.ranks(3, backend="strict")
def test_losses_and_gradients_of_shared_parameters_go_over_strict_communicators_too(make):
    schedule = make(3, 4)
    gradients = []
    for transport in ({}, {"lanes": strict_apart}):
        stages = stages_of(schedule)
        together = schedule.rank_of(0) == schedule.rank_of(schedule.stages - 1)
        shared = [] if together else [tied(stages, schedule)]
        run = pipeline(stages, schedule, broadcast_loss=True, shared=shared, transport=transport)
        x, y = data(8)
        losses = [run.step(x, target=y).loss, run.evaluate(x, target=y).loss]
        assert run.evaluate(x).loss is None
        gradients.append((stages, [loss.item() for loss in losses]))
    (one, of_one), (other, of_other) = gradients
    assert of_one == of_other
    assert_gradients(one, other, schedule, exact=True)
