import pytest
import torch
import torch.distributed as dist

from par_layers import initialize, layer_set

from ..helpers import FROM_4, in_the_typical_modes, modes

BATCH, LENGTH, WIDTH, VOCABULARY = 4, 8, 8, 30


def made(layers):
    classifier = layers.VocabClassifier(WIDTH, VOCABULARY)
    initialize(classifier, seed=0, dtype=torch.float64)
    return classifier


@pytest.mark.ranks([1, *FROM_4])
@in_the_typical_modes
def test_in_parts_it_is_the_same_loss_with_the_same_gradients(configs):
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    target = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    target[1, 2:6] = -100
    for mode in modes(configs[dist.get_world_size()]):
        layers = mode.layers
        results = []
        for chunks in (None, 3):  # unequal ones; where the sequence is cut, more than a rank has tokens
            classifier, hidden = made(layers), layers.split(whole).detach().requires_grad_()
            if chunks is None:
                loss = layers.cross_entropy(classifier(hidden), target, classes=VOCABULARY, label_smoothing=0.1)
            else:
                loss = layers.linear_cross_entropy(
                    hidden, classifier, target, classes=VOCABULARY, chunks=chunks, label_smoothing=0.1
                )
            loss.backward()
            results.append((loss.detach(), hidden.grad, classifier.weight.grad))
        for result in results[1:]:
            for got, expected in zip(result, results[0], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)  # sums in parts, fp64


def test_the_whole_logits_are_never_kept():
    layers = layer_set(None)
    classifier = layers.VocabClassifier(WIDTH, 2_000)
    initialize(classifier, seed=0)
    hidden = torch.randn(2, 64, WIDTH, requires_grad=True)
    target = torch.zeros(2, 64, dtype=torch.int64)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        layers.linear_cross_entropy(hidden, classifier, target, classes=2_000, chunks=8)
    assert max(sizes) <= 2_000 * WIDTH  # the weight; the logits would be 256,000
