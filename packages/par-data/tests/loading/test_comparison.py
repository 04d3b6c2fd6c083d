"""Ranks that must read the same rows learn of other ones in the first batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_data import BatchComparison


@pytest.mark.ranks(2)
def test_batch_comparison_raises_on_all_ranks_for_other_rows():
    comparison, model = BatchComparison(dist.group.WORLD), nn.Linear(2, 2)
    handle = comparison.watch(model)
    model(torch.ones(1, 2))
    comparison.restart()
    with pytest.raises(ValueError, match=r"the inputs of Linear: ranks \[1\] have another batch than rank 0"):
        model(torch.full((1, 2), float(dist.get_rank())))
    comparison.restart()
    with comparison.paused():
        model(torch.full((1, 2), float(dist.get_rank())))
    handle.remove()
    model(torch.full((1, 2), float(dist.get_rank())))


@pytest.mark.ranks(2)
def test_batch_comparison_counts_calls_by_powers_of_two():
    comparison = BatchComparison(dist.group.WORLD)
    assert [call for call in range(1, 10) if comparison.is_due("train")] == [1, 2, 4, 8]
