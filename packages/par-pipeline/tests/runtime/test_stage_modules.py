"""The stages of a rank as one module: names of the full model, tied parameters, other ranks' parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_pipeline import Pipeline, Transport, build_stages, remove_foreign_parameters_, schedule

from ..runtime_helpers import lanes_of


def tied_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("rank", "names"), [(0, {"0.weight", "0.bias"}), (1, {"0.weight", "2.weight", "2.bias", "3.bias"})]
)
def test_build_stages_keeps_the_names_of_the_full_model(rank, names):
    stages = build_stages(tied_model(), schedule("1f1b", 2, 2), rank)
    assert {name for name, _ in stages.named_parameters()} == names


def test_remove_foreign_parameters_keeps_param_groups():
    model = tied_model()
    optimizer = torch.optim.SGD([{"params": [model[0].bias]}, {"params": [model[2].weight, model[2].bias]}], lr=0.1)
    remove_foreign_parameters_(optimizer, build_stages(model, schedule("1f1b", 2, 2), 1))
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]


@pytest.mark.ranks(2)
def test_pipeline_stages_train_tied_parameters_as_one_device_does():
    whole, plan = tied_model(), schedule("1f1b", 2, 2)
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    loss = nn.functional.mse_loss(whole(batch), batch)
    loss.backward()
    stages = build_stages(tied_model(), plan, dist.get_rank())
    stages.tie_(dist.group.WORLD)
    transport = Transport(lanes=lanes_of)
    with Pipeline(
        stages.runners(), plan, dist.group.WORLD, loss_fn=nn.functional.mse_loss, transport=transport
    ) as pipeline:
        pipeline.forward_backward_step(iter([(batch, batch)]))
        for shared in stages.shared:
            shared.handle_gradient()
    wanted = dict(whole.named_parameters())
    for name, parameter in stages.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad)
