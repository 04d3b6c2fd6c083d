import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import sharding_of
from par_layers import PartialGradientReducer, layer_set
from par_testing import assert_equal_to_one_device

from ..helpers import FROM_4, filled, in_the_typical_modes, integers, numbers, run_checks, whole_state


class Tied(nn.Module):
    """Ids to logits through one table."""

    def __init__(self, layers, hidden, vocabulary, tied=True):
        super().__init__()
        self.layers, self.vocabulary = layers, vocabulary
        self.table = layers.VocabEmbedding(vocabulary, hidden)
        self.head = layers.VocabClassifier(hidden, vocabulary, tied=self.table if tied else None)

    def forward(self, ids):
        return self.head(self.table(ids))


def gathered(mode, logits, vocabulary):
    """Whole logits without the padding."""
    return mode.layers.gather(logits, inner=True)[..., :vocabulary]


@pytest.mark.ranks(FROM_4)
@in_the_typical_modes
def test_the_typical_modes(configs):
    run_checks(
        [
            check_vocabulary_logits_equal_one_device,
            check_padded_logits_are_minus_infinity_and_no_part_of_the_state,
            check_the_vocabulary_of_gpt2,
            check_whole_logits_of_few_classes_equal_one_device,
            check_a_shared_table_has_one_parameter_and_the_classifiers_shape,
        ],
        configs[dist.get_world_size()],
    )


def check_vocabulary_logits_equal_one_device(mode):
    for tied, vocabulary in ((False, 13), (True, 13), (True, 16)):
        ids = integers(vocabulary, 8, 4)
        whole = filled(Tied(layer_set(None), 16, vocabulary, tied))
        parallel = filled(Tied(mode.layers, 16, vocabulary, tied))
        expected, logits = whole(ids), gathered(mode, parallel(ids), vocabulary)
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
        upstream = numbers(*expected.shape, seed=7)
        expected.backward(upstream)
        logits.backward(upstream)
        PartialGradientReducer(parallel, mode.groups).handle_gradient()
        reason = f"{mode.tensor}: sums in another order"
        assert_equal_to_one_device(parallel, whole, gradients=True, rtol=1e-10, atol=1e-10, reason=reason)


def check_padded_logits_are_minus_infinity_and_no_part_of_the_state(mode):
    for tied in (False, True):
        model = filled(Tied(mode.layers, 16, 13, tied))
        logits = mode.layers.gather(model(integers(13, 8, 4)), inner=True)
        assert (logits.shape[-1] > 13) == (mode.tensor.get("depth") != 4)  # whose ranks have all features
        assert (logits[..., 13:] == -torch.inf).all()
        assert logits[..., :13].isfinite().all()
        assert sharding_of(model.head.weight).shape == (13, 16)


def check_the_vocabulary_of_gpt2(mode):
    if mode.tensor["mode"] not in ("1d", "2d") or mode.by_sequence:
        return  # the ids are too few
    vocabulary, ids = 50257, torch.tensor([[0, 50256], [12565, 50255], [1, 2], [3, 4]])
    model, one = (filled(Tied(layers, 4, vocabulary)) for layers in (mode.layers, layer_set(None)))
    loss = mode.layers.cross_entropy(model(ids), ids, classes=vocabulary)
    expected = layer_set(None).cross_entropy(one(ids), ids, classes=vocabulary)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    parts = 4 if mode.tensor["mode"] == "1d" else mode.groups.size("row")
    assert model.table.weight.shape[0] == -(-vocabulary // parts)  # rounded up


def check_whole_logits_of_few_classes_equal_one_device(mode):
    x, target = numbers(8, 16), integers(5, 8)
    for bias in (True, False):
        whole, parallel = (filled(layers.Classifier(16, 5, bias)) for layers in (layer_set(None), mode.layers))
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = layer_set(None).cross_entropy(whole(other), target, classes=5)
        logits = parallel(mode.layers.split(mine))
        assert logits.shape[-1] == 5
        loss = mode.layers.cross_entropy(logits, target, classes=5)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
        expected.backward()
        loss.backward()
        PartialGradientReducer(parallel, mode.groups).handle_gradient()
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10)
        reason = f"{mode.tensor}: sums in another order"
        assert_equal_to_one_device(parallel, whole, gradients=True, rtol=1e-10, atol=1e-10, reason=reason)


def check_a_shared_table_has_one_parameter_and_the_classifiers_shape(mode):
    model = Tied(mode.layers, 16, 13)
    assert model.head.weight is model.table.weight
    filled(model)
    assert model.head.weight is model.table.weight
    assert list(whole_state(model)) == ["table.weight"]
    with pytest.raises(ValueError, match=r"the shared table is \(13, 16\), the classifier \(14, 16\)"):
        mode.layers.VocabClassifier(16, 14, tied=model.table)
    assert "vocabulary=13, tied=True" in repr(model.head)
