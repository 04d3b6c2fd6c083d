"""par-layers on a GPU: the same loss and gradients as on the CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_testing import accelerator_type

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]


def loss_and_gradients(groups, device):
    layers = layer_set("auto", groups)
    model = nn.Sequential(
        layers.Embedding(123, 64),
        layers.LayerNorm(64),
        layers.ColumnLinear(64, 256),
        nn.GELU(),
        layers.RowLinear(256, 64),
    )
    initialize(model, seed=0)
    model.to(device)
    tokens = torch.arange(60).view(4, 15) % 123
    loss = model(tokens.to(device)).square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(each.grad.cpu() for each in model.parameters())]


@pytest.mark.ranks(2, timeout=120)
def test_two_ranks_may_share_a_gpu_over_gloo():
    topology = Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, dist.get_world_size())
    with ProcessGroups(topology, device="cpu") as groups:
        expected = loss_and_gradients(groups, "cpu")
        found = loss_and_gradients(groups, DEVICE)
    # Products are summed up in another order on a GPU; fp32, sums of 256 numbers at most.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
