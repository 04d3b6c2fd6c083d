import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_groups import sharding_of
from par_layers import PartialGradientReducer, layer_set
from par_testing import assert_equal_to_one_device

from ..helpers import (
    FROM_4,
    assert_layer_equals_one_device,
    filled,
    in_the_typical_modes,
    integers,
    numbers,
    run_checks,
    whole_state,
)


def assert_equal(mode, make, whole_input):
    """Output and gradients of an embedding; its input is whole on every rank."""
    whole, parallel = filled(make(layer_set(None))), filled(make(mode.layers))
    expected, y = whole(whole_input), mode.layers.gather(parallel(whole_input))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{mode.tensor}: {text}")
    upstream = numbers(*expected.shape, seed=7)
    expected.backward(upstream)
    y.backward(upstream)
    PartialGradientReducer(parallel, mode.groups).handle_gradient()
    reason = f"{mode.tensor}: sums in another order"
    assert_equal_to_one_device(parallel, whole, gradients=True, rtol=1e-10, atol=1e-10, reason=reason)
    return parallel


class Tied(nn.Module):
    """A table that is looked up and classifies."""

    def __init__(self, layers, vocabulary, padding_id):
        super().__init__()
        self.layers, self.vocabulary = layers, vocabulary
        self.table = layers.VocabEmbedding(vocabulary, 16, padding_id=padding_id)
        self.classifier = layers.VocabClassifier(16, vocabulary, tied=self.table)

    def forward(self, ids, target):
        return self.layers.cross_entropy(self.classifier(self.table(ids)), target, classes=self.vocabulary)


@pytest.mark.ranks(FROM_4)
@in_the_typical_modes
def test_the_typical_modes(configs):
    run_checks(
        [
            check_tables_equal_one_device,
            check_padding_is_told_by_the_global_id,
            check_a_classifier_that_shares_the_table_trains_the_padding_row,
            check_a_vocabulary_that_does_not_divide_is_padded_with_zeros,
            check_positions_equal_one_device,
            check_a_sequence_longer_than_the_positions_is_refused,
            check_patches_equal_one_device,
            check_images_that_do_not_divide_are_refused,
            check_a_batch_or_a_sequence_that_does_not_divide_is_named,
            check_an_id_outside_the_vocabulary_is_refused_on_every_rank,
        ],
        configs[dist.get_world_size()],
    )


def check_tables_equal_one_device(mode):
    for vocabulary in (16, 30, 5):
        ids = integers(vocabulary, 8, 4)
        ids[0] = torch.tensor([0, vocabulary - 1, 0, vocabulary - 1])
        assert_equal(mode, lambda layers: layers.VocabEmbedding(vocabulary, 16), ids)  # noqa: B023
    assert_equal(mode, lambda layers: layers.Embedding(5, 16), ids)


def check_padding_is_told_by_the_global_id(mode):
    vocabulary = 16
    for padding_id in (0, 1, 15):  # as a local index, 1 would be found on every rank
        ids = integers(vocabulary, 8, 4)
        ids[0, :2] = padding_id
        make = lambda layers, row=padding_id: layers.VocabEmbedding(vocabulary, 16, padding_id=row)  # noqa: E731
        parallel = assert_equal(mode, make, ids)
        for box in sharding_of(parallel.weight).boxes:
            rows = range(box.start[0], box.start[0] + box.size[0])
            zero = [row for row in rows if not box.of(parallel.weight.detach())[row - rows.start].any()]
            assert zero == [row for row in rows if row == padding_id]


def check_a_classifier_that_shares_the_table_trains_the_padding_row(mode):
    for padding_id in (0, 12):
        ids, target = integers(13, 8, 4), integers(13, 8, 4, seed=7)
        ids[0, :2] = padding_id
        one, parallel = filled(Tied(layer_set(None), 13, padding_id)), filled(Tied(mode.layers, 13, padding_id))
        expected, losses = trained(one, ids, target), trained(parallel, ids, target, mode.groups)
        assert one.table.weight[padding_id].any()  # no longer zero, so that looking it up gives something
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)  # sums in another order
        reason = f"{mode.tensor}: sums in another order"
        assert_equal_to_one_device(parallel, one, rtol=1e-10, atol=1e-10, reason=reason)


def trained(model, ids, target, groups=None):
    """The losses of two steps: what the first gives the padding row, the second looks up."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(ids, target)
        loss.backward()
        if groups is not None:
            PartialGradientReducer(model, groups).handle_gradient()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_a_vocabulary_that_does_not_divide_is_padded_with_zeros(mode):
    table = filled(mode.layers.VocabEmbedding(13, 16))
    sharding = sharding_of(table.weight)
    assert sharding.shape == (13, 16)
    outside = torch.ones_like(table.weight)
    for box in sharding.boxes:
        box.of(outside).zero_()
    assert not (table.weight * outside).any()
    assert torch.equal(whole_state(table)["weight"], filled(layer_set(None).VocabEmbedding(13, 16)).weight)


def check_positions_equal_one_device(mode):
    for sequence in (4, 12):
        x = numbers(8, sequence, 16)
        assert_layer_equals_one_device(mode, lambda layers: layers.PositionEmbedding(12, 16), x)


def check_a_sequence_longer_than_the_positions_is_refused(mode):
    positions = filled(mode.layers.PositionEmbedding(4, 16))
    with pytest.raises(ValueError, match="the sequence has 8 positions, this embedding 4"):
        positions(mode.layers.split(numbers(8, 8, 16)))


def check_patches_equal_one_device(mode):
    # 7 patches and the class token divide by 2, 4 and 8.
    assert_equal(mode, lambda layers: layers.PatchEmbedding(2, 3, 16), numbers(8, 3, 2, 14))


def check_images_that_do_not_divide_are_refused(mode):
    embedding = filled(mode.layers.PatchEmbedding(2, 3, 16))
    with pytest.raises(ValueError, match="images of 3 x 4 do not divide into patches of 2 x 2"):
        embedding(numbers(8, 3, 3, 4))
    if mode.by_sequence:
        with pytest.raises(ValueError, match=r"1 \+ patches is 3, which does not divide by 4 ranks"):
            embedding(numbers(8, 3, 2, 4))


def check_a_batch_or_a_sequence_that_does_not_divide_is_named(mode):
    table = filled(mode.layers.VocabEmbedding(16, 16))
    if mode.by_sequence:
        with pytest.raises(ValueError, match=f"3.*does not divide by {dist.get_world_size()} ranks"):
            table(integers(16, 8, 3))
    elif mode.tensor["mode"] != "1d":
        with pytest.raises(ValueError, match=r"3.*does not divide by \d ranks"):
            table(integers(16, 3, 4))
        with pytest.raises(ValueError, match=r"3.*does not divide by \d ranks"):
            mode.layers.split(numbers(3, 4, 16))


def check_an_id_outside_the_vocabulary_is_refused_on_every_rank(mode):
    table = filled(mode.layers.VocabEmbedding(13, 16))  # padded: 13 is a local row, but no id
    for wrong in (13, -1, 99):
        ids = integers(13, 8, 4)
        ids[0, 0] = wrong
        with pytest.raises((ValueError, IndexError)):
            table(ids)


def test_patches_are_those_of_a_strided_convolution():
    embedding, images = filled(layer_set(None).PatchEmbedding(2, 3, 16)), numbers(2, 3, 4, 6)
    tokens = embedding(images)
    convolved = functional.conv2d(images, embedding.weight.view(16, 3, 2, 2), embedding.bias, stride=2)
    torch.testing.assert_close(tokens[:, 1:], convolved.flatten(2).transpose(1, 2), rtol=1e-12, atol=1e-12)
    assert torch.equal(tokens[:, 0], embedding.class_token.expand(2, -1))
