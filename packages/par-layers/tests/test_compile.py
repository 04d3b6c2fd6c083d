import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_layers import initialize, layer_set
from par_layers.examples.gpt import GPT

from .helpers import modes, run_checks


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the tracer does it itself
@pytest.mark.ranks(2, timeout=180)
def test_a_1d_model_and_losses_are_one_graph_that_computes_the_same():
    """In one world: the first thing that a process compiles takes as long as two more."""
    if dist.get_rank() == 0:
        check_the_losses_of_one_device()
    run_checks([check_a_model_and_its_loss, check_a_loss_in_chunks_and_the_accuracy])


class WithoutMLP(nn.Module):
    """Of a GPT each kind of layer once: an MLP is a column and a row with something between them, as attention is."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.tokens, self.positions = layers.VocabEmbedding(13, 16), layers.PositionEmbedding(8, 16)
        self.norm = layers.LayerNorm(16)
        self.query_key_value, self.output = layers.ColumnLinear(16, 48, blocks=3, unit=4), layers.RowLinear(16, 16)
        self.head = layers.VocabClassifier(16, 13, tied=self.tokens)

    def loss(self, ids, target, label_smoothing):
        hidden = self.norm(self.positions(self.tokens(ids)))
        mixed = self.layers.attention(*self.query_key_value.parts(self.query_key_value(hidden)), head=4, causal=True)
        hidden = self.output(mixed)
        return self.layers.cross_entropy(self.head(hidden), target, classes=13, label_smoothing=label_smoothing)


def check_a_model_and_its_loss(mode):
    check_as_one_graph(WithoutMLP(mode.layers))


@pytest.mark.storm  # whose MLPs are the other test's column and row
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.ranks(2, timeout=180)
def test_a_gpt_is_one_graph_that_computes_the_same():
    for mode in modes():
        check_as_one_graph(GPT(mode.layers, 13, 16, 4, 1, 8, tied=True))


def check_as_one_graph(model):
    initialize(model, seed=0, dtype=torch.float64)
    ids = torch.arange(16).view(2, 8) * 5 % 13
    results = []
    for run in (model.loss, torch.compile(model.loss, fullgraph=True, backend="aot_eager")):
        loss = run(ids, ids.roll(-1, 1), 0.1)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        model.zero_grad()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)  # a graph may sum in another order


def check_a_loss_in_chunks_and_the_accuracy(mode):
    if mode.by_sequence:
        return
    layers = mode.layers
    head = layers.VocabClassifier(16, 13)
    initialize(head, seed=0)
    torch.manual_seed(0)
    hidden, target = torch.randn(2, 8, 16), torch.arange(16).view(2, 8) % 13

    def loss(hidden):
        return layers.linear_cross_entropy(hidden, head, target, classes=13, chunks=2)

    def accuracy(hidden):
        return layers.accuracy(head(hidden), target, classes=13)

    for function in (loss, accuracy):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(hidden), function(hidden), rtol=1e-6, atol=0)  # fp32, another order


def check_the_losses_of_one_device():
    layers, logits = layer_set(None), torch.randn(2, 8, 13)
    target = torch.arange(16).view(2, 8) % 13
    for function in (layers.cross_entropy, layers.accuracy):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        here, there = compiled(logits, target, classes=13), function(logits, target, classes=13)
        torch.testing.assert_close(here, there, rtol=1e-6, atol=0)  # fp32, perhaps summed in another order
