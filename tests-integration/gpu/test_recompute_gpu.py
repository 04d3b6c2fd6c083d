"""par-recompute on a GPU: the gradients without it, whether activations are recomputed or kept on the host."""

import pytest
import torch
from torch import nn

from par_recompute import Keep, ToHost, checkpoint_layers
from par_testing import accelerator_type

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]


class Layer(nn.Module):
    """A layer of the kind that `checkpoint_layers` looks for: one of several in a row."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers in a list."""

    def __init__(self, width=64, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def trained(policy, to_host):
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if policy is not None or to_host is not None:
        checkpoint_layers(model, policy, to_host=to_host)
    losses = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("to_host", [None, ToHost(), ToHost(ahead=0)], ids=["device", "host", "host-ahead-0"])
@pytest.mark.parametrize("policy", [None, "cheap", "layers", Keep(0.5)], ids=str)
def test_losses_equal_those_without_recomputation(policy, to_host):
    assert trained(policy, to_host) == trained(None, None)
