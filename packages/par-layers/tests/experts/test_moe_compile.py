"""Whole layers under torch.compile, over ranks and on one device."""

import pytest
import torch
import torch.distributed as dist

from par_layers import ExpertConfig, layer_set

from .worlds import Tokens, world

TOKENS = Tokens(rows=(2,), experts=4)  # as many on each rank, as a capacity wants them

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",  # the tracer does it itself
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # and looks where graphs begin
)


class Graphs:
    """A backend that runs what was traced as it is, and keeps the names of its operators."""

    def __init__(self):
        self.operators = []

    def __call__(self, graph, inputs):
        names = [str(node.target) for part in graph.modules() if hasattr(part, "graph") for node in part.graph.nodes]
        self.operators += names
        return graph.forward


def results(layer, run, x):
    """The output of a layer, and every gradient."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


def check_the_same(layer, run, *tokens):
    for x in tokens:
        for eager, compiled in zip(results(layer, layer, x), results(layer, run, x), strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)  # fp64, sums in another order


@pytest.mark.ranks(2, timeout=180)
def test_with_a_capacity_a_layer_over_ranks_is_one_graph_without_a_number_for_the_host():
    with world({"expert": 2}) as here:
        layer = TOKENS.make(here.layers, capacity_factor=1.0, num_shared_experts=1)
        graphs = Graphs()
        compiled = torch.compile(layer, backend=graphs, fullgraph=True)
        check_the_same(layer, compiled, TOKENS.of(here.replica))
        assert sum("all_to_all_single" in name for name in graphs.operators) == 4  # two in forward and in backward
        assert not any(name in ("item", "tolist") or "_local_scalar_dense" in name for name in graphs.operators)
        assert layer.gate.load.dropped.item() > 0  # rows were dropped in both


@pytest.mark.ranks(2, timeout=180)
def test_without_a_capacity_a_compiled_layer_over_ranks_computes_the_same():
    with world({"expert": 2}) as here:
        tokens = Tokens(rows=(2, 1), experts=4)
        layer = tokens.make(here.layers, num_shared_experts=1)
        compiled = torch.compile(layer, backend="eager")
        check_the_same(layer, compiled, tokens.of(here.replica))
        assert dist.get_world_size() == here.replicas


@pytest.mark.storm
@pytest.mark.parametrize(
    ("options", "others"),
    [
        (
            {"expert": ExpertConfig(activation="clamped_swiglu", bias=True, interleaved=True, transposed=True)},
            slice(1, None),
        ),
        pytest.param({"expert": ExpertConfig(activation="gelu", bias=True)}, slice(0), marks=pytest.mark.storm),
    ],
    ids=["clamped, transposed", "gelu, no tokens"],
)
def test_with_a_capacity_every_kind_of_expert_is_one_graph(options, others):
    """For any number of tokens: the second graph is one of all of them."""
    layer, x = TOKENS.make(layer_set(None), capacity_factor=1.0, **options), TOKENS.of(0)
    torch.compiler.reset()
    check_the_same(layer, torch.compile(layer, backend="aot_eager", fullgraph=True), x, x[:, others])
