import pytest
import torch

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_layers.examples.gpt import Block


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the tracer does it itself
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_1d_block_is_one_graph_that_computes_the_same(sequence_parallel):
    parallel = {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": sequence_parallel}}
    with ProcessGroups(Topology.from_config(parallel, 2)) as groups:
        layers = layer_set("auto", groups)
        block = Block(layers, 16, 4, 4)
        initialize(block, seed=0, dtype=torch.float64)
        torch.manual_seed(0)
        whole = torch.randn(2, 8, 16, dtype=torch.float64)
        results = []
        for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
            x = layers.split(whole).detach().requires_grad_()
            y = run(x)
            y.square().sum().backward()
            results.append([y.detach(), x.grad, *(parameter.grad.clone() for parameter in block.parameters())])
            block.zero_grad()
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)  # a graph may sum in another order


def test_the_losses_of_one_device_are_one_graph():
    layers, logits = layer_set(None), torch.randn(2, 8, 13)
    target = torch.arange(16).view(2, 8) % 13
    for function in (layers.cross_entropy, layers.accuracy):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        here, there = compiled(logits, target, classes=13), function(logits, target, classes=13)
        torch.testing.assert_close(here, there, rtol=1e-6, atol=0)  # fp32, perhaps summed in another order
