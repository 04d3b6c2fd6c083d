"""The end of connections, and their beginning anew: a rank that others wait for lets go of them first."""

import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from par_pipeline import PipelineError, one_f_one_b, zb_v
from par_pipeline.runtime import pipeline as _pipeline
from par_testing import for_each, storm

from ..runtime_helpers import (
    FEW,
    assert_gradients,
    clear,
    copied,
    data,
    pipeline,
    serial,
    stages_of,
)


def assert_right(run, stages):
    """A step's gradients."""
    clear(stages)
    reference, (x, y) = copied(stages), data(8)
    run.step(x, target=y)
    serial(reference, x.tensor_split(4), y.tensor_split(4))
    assert_gradients(stages, reference, run.schedule, exact=False)


def sockets():
    """How many this process has open."""
    folder = Path("/proc/self/fd")
    return sum(1 for each in folder.iterdir() if each.is_symlink() and str(each.readlink()).startswith("socket:"))


@for_each(make=[storm(one_f_one_b), zb_v], warm=[True, False])
@pytest.mark.ranks([FEW, 3])
def test_a_rank_that_resets_frees_those_that_wait_for_it_in_a_step(make, warm):
    schedule = make(dist.get_world_size(), 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    x, y = data(8)
    if warm:
        run.step(x, target=y)
    if dist.get_rank() > 0:
        with pytest.raises(PipelineError, match=r"rank 0, between two steps: PipelineError: reset\(\)"):
            run.step(x, target=y)
    elif not warm:
        time.sleep(0.3)
    run.reset()
    assert_right(run, stages)


@pytest.mark.ranks(2)
def test_word_of_a_failure_reaches_who_comes_to_its_next_step_after_the_connection_has_ended():
    schedule = one_f_one_b(2, 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    x, y = data(8)
    run.step(x, target=y)
    words = "rank 1, after its last action, joining the outputs: OSError: a fault on purpose"
    if dist.get_rank() == 1:
        fault = mock.patch.object(_pipeline, "merge", side_effect=OSError("a fault on purpose"))
        with fault, pytest.raises(PipelineError, match=words):
            run.step(x, target=y, return_outputs=True)
    else:
        run.step(x, target=y)
        time.sleep(1.5)  # the other rank has let go of its connections meanwhile
        with pytest.raises(PipelineError, match=words):
            run.step(x, target=y)
    run.reset()
    assert_right(run, stages)


@pytest.mark.ranks(3)
def test_who_does_not_come_to_a_reset_is_named_and_may_come_later():
    schedule = one_f_one_b(3, 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    if dist.get_rank() != 1:
        missing = "1|1, 2" if dist.get_rank() == 0 else "1|0, 1"  # where the other one is late, too
        with pytest.raises(PipelineError, match=rf"ranks \[({missing})\] .* did not come to reset\(\) within 0.5 s"):
            run.reset(timeout=0.5)
        with pytest.raises(PipelineError, match=r"call reset\(\)"):
            run.step()
    dist.barrier()
    run.reset()
    assert_right(run, stages)


@pytest.mark.ranks([1, 2])
def test_a_pipeline_that_is_closed_has_no_connections_and_runs_nothing():
    schedule = one_f_one_b(dist.get_world_size(), 4)
    stages = stages_of(schedule)
    x, y = data(8)
    pipeline(stages, schedule).close()
    dist.barrier()
    before = sockets()  # of what is made once; it stays
    with pipeline(stages, schedule) as run:
        run.step(x, target=y)
        run.evaluate(x)
        assert sockets() > before or dist.get_world_size() == 1
    for call in (run.step, run.evaluate):
        with pytest.raises(PipelineError, match=r"the pipeline is closed; make a new Pipeline\("):
            call(x, target=y)
    with pytest.raises(PipelineError, match=r"the pipeline is closed; make a new Pipeline\("):
        run.reset()
    run.close()
    dist.barrier()
    while sockets() > before:  # gloo's threads may have to end first
        time.sleep(0.01)


@pytest.mark.ranks(2)
def test_a_rank_that_begins_a_step_after_another_one_has_closed_hears_of_it():
    schedule = one_f_one_b(2, 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    x, y = data(8)
    run.step(x, target=y)
    if dist.get_rank() == 0:
        run.close()
    else:
        with pytest.raises(PipelineError, match="rank 0, between two steps: PipelineError: its pipeline was closed"):
            run.step(x, target=y)
        run.close()
    if dist.get_rank() == 0:
        time.sleep(0.5)
