"""What comes after the last action may fail, too: every rank hears of it, by name and soon."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from par_pipeline import PipelineError, Shared, one_f_one_b, zb_v
from par_pipeline.runtime import pipeline as _pipeline
from par_pipeline.runtime.run import StepExecution
from par_pipeline.wire.message import MessageKind
from par_testing import for_each

from ..runtime_helpers import (
    FEW,
    assert_gradients,
    clear,
    copied,
    data,
    pipeline,
    send_tensors_apart,
    serial,
    stages_of,
)

PLACES = {
    "summing the gradients of shared parameters": (Shared, "_fill_"),
    "joining the outputs": (_pipeline, "merge"),
    "summing the loss": (StepExecution, "loss"),
    "sharing the loss": (_pipeline, "flatten"),
}
"""What to replace so that a step fails there."""


def failing(place):
    return mock.patch.object(*PLACES[place], side_effect=OSError("a fault on purpose"))


def tied(stages, schedule):
    """The first weights of the first and the last stage, as if they were one parameter."""
    stages[-1][0].weight.data.copy_(stages[0][0].weight)  # also where the last stage is a reference alone
    mine = {}
    for number in {0, schedule.stages - 1} & set(schedule.stage_of(dist.get_rank())):
        mine[f"{number}.weight"] = stages[number][0].weight
    return Shared(mine, dist.group.WORLD)


def two_steps(run, x, y):
    for _ in range(2):
        run.step(x, target=y)


def assert_right(run, stages, x, y):
    """A step's gradients, but for those that are shared."""
    clear(stages)
    reference = copied(stages)
    run.step(x, target=y)
    serial(reference, x.tensor_split(4), y.tensor_split(4))
    for module in (stages, reference):
        for number in (0, run.schedule.stages - 1):
            module[number][0].weight.grad = None
    assert_gradients(stages, reference, run.schedule, exact=False)


@pytest.mark.storm
@for_each(place=PLACES, broadcast_loss=[True, False])
@pytest.mark.ranks([FEW, 3])
def test_a_failure_after_the_last_action_is_named_on_every_rank_in_this_step_or_before_the_next_one_is_over(
    place, broadcast_loss
):
    if place == "sharing the loss" and not broadcast_loss:
        return
    last = dist.get_world_size() - 1
    culprits = [last] if place in ("joining the outputs", "sharing the loss") else [0, last]
    for culprit in culprits:
        schedule = one_f_one_b(last + 1, 4)
        stages = stages_of(schedule)
        shared = [tied(stages, schedule)] if place != "sharing the loss" else []
        run = pipeline(stages, schedule, broadcast_loss=broadcast_loss, shared=shared)
        x, y = data(8)
        run.step(x, target=y, return_outputs=True)
        named = rf"rank {culprit}, after its last action, {place}: OSError: a fault on purpose"
        if dist.get_rank() == culprit:
            with failing(place), pytest.raises(PipelineError, match=named):
                run.step(x, target=y, return_outputs=True)
        elif broadcast_loss or (place.startswith("summing the grad") and dist.get_rank() in (0, last)):
            with pytest.raises(PipelineError, match=named):
                run.step(x, target=y, return_outputs=True)
        else:
            with pytest.raises(PipelineError, match=named):
                two_steps(run, x, y)
        with pytest.raises(PipelineError, match=r"call reset\(\)"):
            run.step(x, target=y)
        run.reset()
        assert_right(run, stages, x, y)


@pytest.mark.ranks(3)
def test_a_rank_between_those_with_shared_parameters_that_fails_last_leaves_nobody_waiting():
    schedule = one_f_one_b(3, 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule, shared=[tied(stages, schedule)])
    x, y = data(8)
    if dist.get_rank() == 1:
        with failing("summing the loss"), pytest.raises(PipelineError, match="rank 1, after its last action"):
            run.step(x, target=y)
    else:
        with pytest.raises(PipelineError, match="rank 1, after its last action, summing the loss: OSError"):
            two_steps(run, x, y)


@pytest.mark.ranks(2)
def test_a_rank_that_has_heard_of_a_failure_between_steps_begins_nothing():
    schedule = one_f_one_b(2, 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    x, y = data(8)
    ran = []
    stages[0].register_forward_hook(lambda *_: ran.append(1))
    if dist.get_rank() == 1:
        with failing("joining the outputs"), pytest.raises(PipelineError):
            run.step(x, target=y, return_outputs=True)
        dist.barrier()
    else:
        run.step(x, target=y)
        dist.barrier()
        word = run._equipment.wire._inboxes[1]._posted[0].first
        while word.item() == MessageKind.UNWRITTEN:  # it is on its way
            time.sleep(0.01)
        ran.clear()
        with pytest.raises(PipelineError, match="joining the outputs"):
            run.step(x, target=y)
        assert not ran


@for_each(make=[one_f_one_b, zb_v], apart=[False, True])
@pytest.mark.ranks([FEW, 3])
def test_the_loss_is_the_same_tensor_on_every_rank_and_none_where_none_is_computed(make, apart):
    send_tensors_apart(apart)
    schedule = make(dist.get_world_size(), 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule, broadcast_loss=True)
    x, y = data(11)
    for call in (run.step, run.evaluate):
        loss = call(x, target=y).loss
        losses = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss)
        assert len({each.item() for each in losses}) == 1
        assert losses[0] > 0
    assert run.evaluate(x).loss is None


@pytest.mark.ranks(2)
def test_what_all_ranks_must_be_given_alike_is_compared_when_the_pipeline_is_made():
    schedule = one_f_one_b(2, 4)
    stages = stages_of(schedule)
    shared, rank = tied(stages, schedule), dist.get_rank()
    with pytest.raises(ValueError, match="rank 1 has other values of broadcast_loss than rank 0"):
        pipeline(stages, schedule, broadcast_loss=rank == 1)
    with pytest.raises(ValueError, match="rank 1 has other shared parameters"):
        pipeline(stages, schedule, shared=[shared] if rank else [])
    with pytest.raises((TypeError, ValueError), match="shared has a str in it; give a list of Shared"):
        pipeline(stages, schedule, shared=["weight"] if rank else [shared])
