"""A model whose experts are single numbers, so that all it can get wrong is routing and balance."""

import torch
import torch.distributed as dist
from torch import nn

from par_layers import PartialGradientReducer, Router, RouterLosses, initialize

from ..helpers import numbers

HIDDEN, EXPERTS, TOP_K = 8, 6, 2


class Layer(nn.Module):
    """x + x * (the gated sum of its experts' numbers)."""

    def __init__(self, **options):
        super().__init__()
        self.gate = Router(HIDDEN, EXPERTS, TOP_K, **options)
        self.outputs = nn.Parameter(numbers(EXPERTS, seed=11))
        self.ids = []

    def forward(self, x, mask=None, sequences=None):
        tokens = x.flatten(0, -2)
        routing = self.gate(tokens, None if mask is None else mask.flatten(), sequences=sequences)
        self.ids.append(routing.ids)
        y = (routing.gates * self.outputs[routing.ids]).sum(-1, keepdim=True) * tokens
        return x + y.view_as(x)


def filled(layer, seed=3):
    """The layer in fp64, its router's weight the same wherever it is."""
    layer.to(torch.float64)
    if layer.gate.weight.is_meta:
        initialize(layer, seed, dtype=torch.float64)
    with torch.no_grad():
        layer.gate.weight.copy_(numbers(EXPERTS, HIDDEN, seed=seed))
    return layer


def whole_gradients(layer, groups, averaged):
    """Sums what is partial, and averages over the ranks of other tokens."""
    if layer.gate.load.axes.partial:  # which a parameter of ours says itself; that of this test does not
        dist.all_reduce(layer.outputs.grad, group=groups["tensor"])
    PartialGradientReducer(layer.gate, groups).handle_gradient()
    for parameter in layer.parameters():
        if averaged:
            dist.all_reduce(parameter.grad, group=groups[averaged])
            parameter.grad /= groups.size(averaged)


def backward(layer, y, upstream, scale=1.0):
    """A main loss that is a weighted sum of outputs, multiplied like the routers' losses."""
    RouterLosses(layer).scale = scale
    ((y * upstream).sum() * scale).backward()
