"""Every schedule through the runtime: the step is the serial one, and a rank keeps what the simulator says."""

import weakref
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch import nn

from par_pipeline import simulate
from par_testing import for_each, storm

from ..runtime_helpers import SCHEDULES, block, check_steps, data


class Counted(nn.Module):
    """A stage, and a count of the inputs that autograd has saved and not freed."""

    live = 0
    peak = 0

    def __init__(self, number):
        super().__init__()
        self.inner = block(5, number)

    def forward(self, x):
        x = x * 1.0  # memory of its own
        Counted.live += 1
        Counted.peak = max(Counted.peak, Counted.live)
        weakref.finalize(x.untyped_storage(), Counted.freed)
        return self.inner(x)

    @staticmethod
    def freed():
        Counted.live -= 1


@for_each(name=SCHEDULES)
@pytest.mark.ranks([storm(2), 4])
def test_gradients_and_loss_are_the_serial_step_s_and_the_most_live_activations_the_simulator_s(name):
    ranks = dist.get_world_size()
    for microbatches in (1, 5) if ranks == 2 else (9,):
        if name == "dualpipe_v" and microbatches < 2 * ranks:
            continue
        schedule = SCHEDULES[name](ranks, microbatches)

        @contextmanager
        def counted(schedule=schedule):
            Counted.live = Counted.peak = 0
            yield
            assert Counted.live == 0
            assert Counted.peak == simulate(schedule).peak(dist.get_rank())

        check_steps(schedule, Counted, [data(17), data(17, seed=1)], around=counted)
