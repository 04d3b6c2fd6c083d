"""Where data ends: everywhere at once, which ends a loop; or on some ranks alone, which is an error on all of them."""

import re

import pytest
import torch.distributed as dist

from par_pipeline import PipelineError, one_f_one_b, zb_v
from par_testing import for_each

from ..runtime_helpers import FEW, assert_gradients, clear, copied, data, pipeline, serial, stages_of


def made(make=one_f_one_b):
    schedule = make(dist.get_world_size(), 4)
    stages = stages_of(schedule)
    return pipeline(stages, schedule), stages


def assert_right(run, stages, batches):
    """A step's gradients, of the batch that is the next one on all ranks."""
    clear(stages)
    reference, (x, y) = copied(stages), data(8)
    run.forward_backward_step(batches)
    serial(reference, x.tensor_split(4), y.tensor_split(4))
    assert_gradients(stages, reference, run.schedule, exact=False)


@for_each(make=[one_f_one_b, zb_v])
@pytest.mark.ranks([1, FEW, 3])
def test_data_that_ends_on_all_ranks_ends_the_loop_and_a_new_iterator_goes_on(make):
    run, stages = made(make)
    for forward_only in (False, True):
        for count in (1, 0, 2):
            batches = iter([tuple(data(8))] * count)
            for _ in range(count):
                assert_right(run, stages, batches)
            with pytest.raises(StopIteration):
                run.forward_backward_step(batches, forward_only=forward_only)
    run.close()


@pytest.mark.ranks([FEW, 3])
def test_data_that_ends_on_some_ranks_alone_is_an_error_on_all_of_them():
    last = dist.get_world_size() - 1
    run, stages = made()
    for short, forward_only in ([{0}, False], [{last}, False], [{*range(last)}, False], [{last}, True]):
        batches = iter([tuple(data(8))] * (1 if dist.get_rank() in short else 2))
        assert_right(run, stages, batches)
        long = [rank for rank in range(last + 1) if rank not in short]
        words = f"the data of ranks {sorted(short)} of the pipeline has ended, that of ranks {long} has not; give all"
        with pytest.raises(PipelineError, match=re.escape(words)):
            run.forward_backward_step(batches, forward_only=forward_only)
        with pytest.raises(PipelineError, match=r"call reset\(\)"):
            run.forward_backward_step(iter([tuple(data(8))]))
        run.reset()
        assert_right(run, stages, iter([tuple(data(8))]))


@pytest.mark.ranks(2)
def test_data_that_raises_on_one_rank_is_an_error_on_all_also_where_that_of_the_other_has_ended():
    def broken():
        raise OSError("no such sample")
        yield

    for other in ([tuple(data(8))], []):
        run, stages = made()
        batches = broken() if dist.get_rank() == 1 else iter(other)
        words = "rank 1, before its first action: OSError: no such sample"
        if not other and dist.get_rank() == 0:
            words = r"the data of ranks \[0\] of the pipeline has ended, that of ranks \[1\] has not"
        with pytest.raises(PipelineError, match=words):
            run.forward_backward_step(batches)
        run.reset()
        assert_right(run, stages, iter([tuple(data(8))]))
