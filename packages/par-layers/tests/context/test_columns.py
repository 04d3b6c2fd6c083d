"""Tensors beside each other in one: found where they are, and not where anything is otherwise."""

import pytest
import torch

from par_layers.context.columns import columns, empty_like, joined

SHAPES = [(6, 3, 4, 8), (6, 3, 1, 8), (6, 3, 1, 5)]


def beside(batch=3, tokens=6):
    like = [torch.empty(batch, tokens, heads, head) for heads, head in ((4, 8), (1, 8), (1, 5))]
    whole = torch.arange(tokens * batch * 45.0).view(tokens, batch, 45)
    return whole, columns(whole, like)


@pytest.mark.parametrize("batch", [1, 3])
def test_columns_are_put_together_without_a_copy(batch):
    whole, parts = beside(batch)
    for part, first in zip(parts, (0, 32, 40), strict=True):
        assert torch.equal(part.flatten(2), whole[:, :, first : first + part[0, 0].numel()].transpose(0, 1))
    found = joined(parts)
    assert found is not None
    assert torch.equal(found, whole)
    assert found.data_ptr() == whole.data_ptr()
    assert joined(empty_like(parts, torch.float64)).dtype == torch.float64


def test_what_is_not_all_of_one_tensor_is_not_put_together():
    _, (q, k, v) = beside()
    for parts in ((q, k), (q, v, k), (q, k, v.clone()), (q[:, 1:], k, v), (q, k, v.mul(2)), (q[:2], k[:2], v[:2])):
        assert joined(parts) is None
        assert [x.is_contiguous() for x in empty_like(parts, torch.float32)] == [True] * len(parts)
