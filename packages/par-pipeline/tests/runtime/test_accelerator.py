"""The runtime on an accelerator that is not CUDA: a strict one, which names races and counts the host's waits."""

import pytest
import torch
import torch.distributed as dist

from par_pipeline import ActivationOffload, Pipeline, Transport, gpipe, one_f_one_b, zb_h1
from par_testing import for_each, pageable_seen, waits_seen

from ..runtime_helpers import block, copied, data, lanes_of, mse, serial, stages_of

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1}


@for_each(name=["1f1b", "gpipe", "zb_h1"], offload=[None, ActivationOffload()])
@pytest.mark.accelerator
@pytest.mark.ranks(2, backend="strict")
def test_step_on_an_accelerator_has_the_gradients_of_a_cpu(name, offload):
    device = torch.device("strict")
    schedule = SCHEDULES[name](2, 6)
    stages = stages_of(schedule, lambda number: block(5, number))
    reference = copied(stages)
    x, y = data(6 * 4)
    serial(reference, x.tensor_split(6), y.tensor_split(6))
    rank = dist.get_rank()
    stage = stages[rank].to(device)
    options = {"loss_fn": mse, "offload": offload, "transport": Transport(lanes=lanes_of)}
    pipeline = Pipeline([stage], schedule, dist.group.WORLD, **options)
    x, y = x.to(device), y.to(device)
    for _ in range(2):
        stage.zero_grad()
        waits_seen()
        pageable_seen()
        pipeline.step(x, target=y)
    assert waits_seen() == {}
    assert pageable_seen() == {}
    for parameter, expected in zip(stage.parameters(), reference[rank].parameters(), strict=True):
        assert torch.allclose(parameter.grad.cpu(), expected.grad)
    timeline = pipeline.timeline()
    assert timeline.makespan > 0
    pipeline.close()
