"""par-layers on a GPU: the same loss and gradients as on the CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology, tree
from par_layers import initialize, layer_set
from par_layers.modes.lanes import sum_of_lanes, sums_on
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


@pytest.mark.skipif(DEVICE != "cuda", reason="the kernel is written in Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lanes_in_one_kernel_have_the_same_bits_for_every_division(dtype):
    kernel, generator = sums_on(torch.device(DEVICE)), torch.Generator().manual_seed(0)
    assert kernel is not sum_of_lanes
    for rows, columns, features in ((1, 32, 32), (70, 65, 40), (300, 512, 256)):
        x, weight = (torch.randn(size, 8 * features, generator=generator).to(DEVICE, dtype) for size in (rows, columns))
        found, eps = kernel(x, weight, 8), torch.finfo(dtype).eps
        torch.testing.assert_close(found, sum_of_lanes(x, weight, 8), rtol=8 * eps, atol=64 * eps * features**0.5)
        assert torch.equal(kernel(x[rows // 2 :], weight, 8), found[rows // 2 :])
        assert torch.equal(kernel(x, weight[columns // 2 :], 8), found[:, columns // 2 :])
        for ranks in (2, 4, 8):
            parts = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
            assert torch.equal(tree([kernel(*each, 8 // ranks) for each in parts]), found)
